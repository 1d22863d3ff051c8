"""Segments: runs of blocks of which only the first keeps its input; backward rebuilds the inputs of the others, then goes block by block.

Each block stays an autograd node of its own, so that its gradients are handed over, and its intermediates freed, before the next one's
turn. Rebuilding runs the segment's blocks but the last once more, with the same RNG states, hence the same bits. The most that is alive is
the inputs of the segments, the inputs within one, and one block's working set (Chen et al., arXiv:1604.06174, section 3).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import BlockCall, Shared
from .guards import without_autocast
from .offload import saved_by
from .run import run_block


class Place(NamedTuple):
    """A block's place in a segment."""

    segment: Segment
    position: int

    @property
    def is_first(self) -> bool:
        """Whether this is the block that keeps its input."""
        return self.position == 0

    def saved_tensors(self, node: Any) -> Sequence[Tensor]:
        """What the block's node has saved, x first, rebuilt where it was not kept."""
        if self.is_first:
            return self.segment.take_first(node)
        _, *inputs = node.saved_tensors
        return self.segment.take_input(self.position), *inputs


class Segment:
    """What backward needs to rebuild the inputs of a segment's blocks, and those that are rebuilt and still to come."""

    def __init__(self) -> None:
        # The node that keeps x holds this object; held strongly in turn, neither would ever be freed.
        self._first_node: weakref.ref[Any] | None = None
        self._members: list[tuple[BlockCall, Sequence[Any]]] = []
        self._first: Sequence[Tensor] | None = None
        self._inputs: dict[int, Tensor] = {}

    def join(self, node: Any, call: BlockCall, inputs: Sequence[Any]) -> None:
        """Add the next block: its autograd node, its static arguments, and `Shared` and parameters.

        They are the tensors that its node saves, too, so that a change in place is noticed when its turn comes.
        """
        if not self._members:
            self._first_node = weakref.ref(node)
        self._members.append((call, inputs))

    def take_first(self, node: Any) -> Sequence[Tensor]:
        """What the first block has saved. It is unpacked once a backward pass: some hooks on saved tensors allow no more."""
        first, self._first = self._first, None
        return saved_by(node) if first is None else first

    def take_input(self, position: int) -> Tensor:
        """The input of the block there, which is not kept any longer."""
        # Backward comes to the last block first: what an earlier backward may have left is not its.
        if position not in self._inputs or position == len(self._members) - 1:
            self._rebuild(position)
        return self._inputs.pop(position)

    def _rebuild(self, last: int) -> None:
        node = None if self._first_node is None else self._first_node()
        assert node is not None, "a node lives as long as those behind it"
        self._inputs.clear()
        self._first = saved_by(node)
        x = self._first[0]
        with without_autocast(x):
            for position, (call, inputs) in enumerate(self._members[:last]):
                shared, tensors = Shared(*inputs[: len(Shared._fields)]), inputs[len(Shared._fields) :]
                _check_there(tensors)
                x, _ = run_block(call, call.layout.bind(tensors), x, shared)
                self._inputs[position + 1] = x


def _check_there(parameters: Sequence[Any]) -> None:
    """Refuse those whose memory a sharding library has freed until it is their block's turn, instead of reading what lies there now."""
    for tensor in parameters:
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise RuntimeError(
                "parameters of all blocks of a segment must be there when it is rebuilt, got freed ones: "
                "leave segments out where each block is sharded by itself"
            )
