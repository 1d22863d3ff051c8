"""A block's forward pass, both halves, on plain tensors."""

from __future__ import annotations

from torch import Tensor

from . import attention_half, mlp_half
from .call import BlockCall, Shared
from .weights import BlockWeights


def run_block(call: BlockCall, weights: BlockWeights, x: Tensor, shared: Shared) -> tuple[Tensor, list[Tensor]]:
    """The block's output, and what `call.save` keeps besides the inputs: internals of the attention half, then the rest for "all"."""
    branch, internals = attention_half.forward(call, weights, x, shared, kept={})
    # What backward rebuilds is dropped before the MLP half makes its own.
    kept = list(map(internals.__getitem__, kept_names(call)))
    del internals
    y, slices = mlp_half.forward(call, weights, branch, x, shared)
    if call.save == "all":
        kept += (tensor for internals in slices for tensor in internals.values())
    return y, kept


def kept_names(call: BlockCall) -> tuple[str, ...]:
    """Which internals of the attention half are kept."""
    return {"input": (), "attention": ("out", "lse"), "all": attention_half.internals_of(call.spec)}[call.save]
