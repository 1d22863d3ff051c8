"""A block that is cut across ranks: tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053), as the engine computes with it.

Each rank has some of the heads and some of the hidden units: rows of the weights of q, k, v, gate and up, columns of those of out and down.
Rows of the stream, x to mid to y, are the same on all ranks, and so are norms. What ranks have parts of is added up over them:

    forward      the branch of each half, behind out and behind down
    backward     the gradient of what q, k, v, and what gate and up are taken of; of queries' and keys' norms and of sinks, where there are

The branch of the attention half is kept for backward beside x in a plain pre-norm block, whatever else is: nothing goes twice between ranks
there. Masks of dropout are equal on all ranks for what all have (the residual stream) and parts of one mask for what each has a share of.
`ckpt_ext.adopt` and `ckpt_ext.integrations` read such blocks from `torch.distributed.tensor.parallel.parallelize_module`'s DTensors.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .spec import BlockSpec

if TYPE_CHECKING:
    from .rng import Dropout

_ROWS = 1 << 32
"""Rows of a mask between one rank's share and the next one's: more tokens than a call has."""


class TensorParallel(NamedTuple):
    """The ranks that a block is cut across, and which of them this is."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def share(self, spec: BlockSpec) -> BlockSpec:
        """What of a block is this rank's. Raises NotImplementedError where it cannot be cut evenly, or has norms across heads."""
        counts = {name: getattr(spec, name) for name in ("heads", "kv_heads", "hidden_dim")}
        for name, count in counts.items():
            if count % self.size:
                raise NotImplementedError(f"{name} must be a multiple of the {self.size} ranks that a block is cut across, got {count}")
        if spec.qk_norm == "row":
            raise NotImplementedError("qk_norm must be None or 'head' in a block that is cut across ranks, got 'row'")
        return replace(spec, **{name: count // self.size for name, count in counts.items()})

    def total(self, part: Tensor) -> Tensor:
        """`part` added up over the ranks, in its place."""
        if self.size > 1:
            dist.all_reduce(part, group=self.group)
        return part

    def heads(self, share: BlockSpec) -> slice:
        """This rank's heads among all, for what `share` has given."""
        return slice(self.rank * share.heads, (self.rank + 1) * share.heads)

    def of_share(self, dropout: Dropout | None) -> Dropout | None:
        """The dropout of rows of which each rank has some columns: every rank draws other rows of the mask."""
        return None if dropout is None else dropout.rows_from(self.rank * _ROWS)

    def check_same(self, state: Tensor) -> None:
        """Raise RuntimeError where ranks reserved different RNG states: masks of the stream would differ. Looked at once a group."""
        if self.size == 1 or self.group in _CHECKED:
            return
        states = [torch.empty_like(state) for _ in range(self.size)]
        dist.all_gather(states, state, group=self.group)
        if any(not torch.equal(state, other) for other in states):
            raise RuntimeError(
                "dropout of a block that is cut across ranks must have one RNG state on all of them, got different ones. "
                "Tip: torch.manual_seed with the same seed on the ranks of a tensor-parallel group."
            )
        _CHECKED.add(self.group)


class Share(NamedTuple):
    """How a projection's weight `[out, in]` is cut: this rank has some outputs, or the products of some inputs, which add up."""

    across: TensorParallel
    cut: Literal["out", "in"]

    @property
    def adds_bias(self) -> bool:
        """Whether this rank's outputs have the bias in them: of products that add up, those of one rank."""
        return self.cut == "out" or self.across.rank == 0


_CHECKED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
