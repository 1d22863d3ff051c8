"""Blocks within regions that others checkpoint: a forward pass that is run again in backward must draw the masks that it drew first.

`torch.utils.checkpoint` sees to that by putting generators back, unless told not to (`preserve_rng_state=False`, as accelerate's FSDP2
path has it). Then all that draws gets other numbers the second time, and the gradients would be of a forward pass that never was. Its
selective checkpointing hands results of operators back, and blocks write over those of their products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from . import rng
from .replay import ReplayMismatch


def reserve(device: torch.device) -> Tensor:
    """`rng.reserve(device)`. Raises RuntimeError in a reentrant checkpoint that is run again and was told to draw other masks."""
    check_reentrant()
    return rng.reserve(device)


def check_cache() -> None:
    """Raise RuntimeError in a selective checkpoint that is run again and told not to look whether what it handed back was written over."""
    if torch.compiler.is_compiling():
        return
    if any(getattr(mode, "allow_cache_entry_mutation", False) for mode in _get_current_dispatch_mode_stack()):
        raise RuntimeError(
            "allow_cache_entry_mutation must be False in a selective checkpoint around a block, which writes over results of its products"
        )


def in_reentrant() -> bool:
    """Whether this runs in the backward pass of a reentrant checkpoint, whose forward pass ran without gradients."""
    if torch.compiler.is_compiling() or _reentrant_node() is None:
        return False
    # That node may also be where the recomputation of another region starts, which has hooks on what it saves.
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def drawn(state: Tensor | None) -> Tensor | None:
    """What a Function keeps on its context, beside what it saves, for `check_drawn`."""
    return None if torch.compiler.is_compiling() else state


def check_drawn(ctx: Any, state: Tensor | None) -> None:
    """Raise ReplayMismatch where the mask state that was saved is not `ctx.drawn`, the forward pass's: somebody ran that again otherwise.

    Nothing is read, hence no device waited for, unless hooks on saved tensors gave another tensor back. A first backward pass looks, and
    drops what it looked at, which would outlive it.
    """
    first = ctx.drawn
    if first is None:
        return
    ctx.drawn = None
    if state is None or first is state or isinstance(state, FakeTensor):
        return
    if not torch.equal(first, state.to(first.device)):
        raise ReplayMismatch(
            "a block's dropout drew other masks when a checkpoint around it ran it again",
            "let the checkpoint put generators back (preserve_rng_state=True), or leave it out: a block keeps only its input as it is.",
        )


def check_reentrant() -> None:
    """Raise RuntimeError in the backward pass of a reentrant checkpoint that does not put generators back."""
    if getattr(_reentrant_node(), "preserve_rng_state", True) is False and in_reentrant():
        raise RuntimeError(
            "preserve_rng_state must be True in a reentrant checkpoint around dropout, got False: masks would be others in backward"
        )


def _reentrant_node() -> Any:
    node = torch._C._current_autograd_node()
    return node if type(node).__name__ == "CheckpointFunctionBackward" else None  # torch's, and its many copies
