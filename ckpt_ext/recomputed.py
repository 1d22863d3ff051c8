"""Masks within regions that others checkpoint: a forward pass that is run again in backward must find the masks that it drew first.

`torch.utils.checkpoint` sees to that by putting generators back, unless told not to (`preserve_rng_state=False`, as accelerate's FSDP2
path has it). Then all that draws gets other numbers the second time, and the gradients are of a forward pass that never was.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import rng
from .replay import Again, ReplayMismatch

_HOOKS = torch._C._autograd
_FORWARD, _AGAIN = (f"{name}.__init__.<locals>.pack_hook" for name in ("_checkpoint_hook", "_recomputation_hook"))
"""The functions of `torch.utils.checkpoint` that see what a region saves: the first time, and when it is run again."""


class _Draws:
    """The mask states that a region's forward pass drew, and how many of them each of its recomputations has come to."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.taken: dict[Any, int] = {}

    def take(self, recomputation: Any) -> Tensor:
        index = self.taken.get(recomputation, 0)
        self.taken[recomputation] = index + 1
        if index >= len(self.states):
            raise ReplayMismatch(
                f"a checkpointed region drew masks {len(self.states)} times, and once more when it was run again",
                "the region must run the same operations again: look for conditions that changed in between.",
            )
        return self.states[index]


_DRAWN: weakref.WeakKeyDictionary[Any, _Draws] = weakref.WeakKeyDictionary()
"""By the frame that `torch.utils.checkpoint` keeps of a call."""


class _Surroundings(NamedTuple):
    """What regions a piece of code runs in."""

    frames: list[Any]
    """Of regions of `torch.utils.checkpoint` that run for the first time."""
    again: tuple[Any, Any] | None = None
    """The frame of one that is run again, and which recomputation it is."""
    replayed: bool = False
    """Whether a region of this package is run again."""


def reserve(device: torch.device) -> Tensor:
    """`rng.reserve(device)`; in a region of `torch.utils.checkpoint` that is run again, what it gave there the first time.

    Raises RuntimeError in a reentrant one that was told to draw other masks, for what it drew the first time is not known, and
    ReplayMismatch where a region draws more often than it did.
    """
    state = rng.reserve(device)
    if torch.compiler.is_compiling():
        return state
    check_reentrant()
    around = _surroundings()
    if around.again is not None:
        frame, recomputation = around.again
        # The generator has moved on all the same, as it did then: what draws after this is put back by others, or not.
        state = _draws(frame).take(recomputation)
    for frame in around.frames:
        _draws(frame).states.append(state)
    return state


def in_reentrant() -> bool:
    """Whether this runs in the backward pass of a reentrant checkpoint, whose forward pass ran without gradients."""
    if torch.compiler.is_compiling() or _reentrant_node() is None:
        return False
    around = _surroundings()  # that node may also be where another region's recomputation starts
    return around.again is None and not around.replayed


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


def _draws(frame: Any) -> _Draws:
    return _DRAWN.setdefault(frame, _Draws())


def check_reentrant() -> None:
    """Raise RuntimeError in the backward pass of a reentrant checkpoint that does not put generators back."""
    if getattr(_reentrant_node(), "preserve_rng_state", True) is False and in_reentrant():
        raise RuntimeError(
            "preserve_rng_state must be True in a reentrant checkpoint around dropout, got False: masks would be others in backward"
        )


def _reentrant_node() -> Any:
    node = torch._C._current_autograd_node()
    return node if type(node).__name__ == "CheckpointFunctionBackward" else None  # torch's, and its many copies


def _surroundings() -> _Surroundings:
    if _HOOKS._top_saved_tensors_default_hooks(False) is None:
        return _Surroundings([])
    stack = []
    try:
        while (hooks := _HOOKS._top_saved_tensors_default_hooks(False)) is not None:
            stack.append(hooks)
            _HOOKS._pop_saved_tensors_default_hooks()
    finally:
        for hooks in reversed(stack):
            _HOOKS._push_saved_tensors_default_hooks(*hooks)
    frames, again, replayed = [], None, False
    for pack, _ in stack:
        function = inspect.unwrap(pack)
        replayed = replayed or isinstance(getattr(pack, "__self__", None), Again)
        if getattr(function, "__module__", None) != "torch.utils.checkpoint":
            continue
        held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
        if function.__qualname__ == _FORWARD:
            frames.append(held["frame"])
        elif function.__qualname__ == _AGAIN:
            again = held["target_frame_ref"](), held["gid"]
    return _Surroundings(frames, again, replayed)
