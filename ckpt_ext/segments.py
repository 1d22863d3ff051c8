"""Segments: runs of blocks of which only the first keeps its input; backward rebuilds the inputs of the others, then goes block by block.

Each block stays an autograd node of its own, so that its gradients are handed over, and its intermediates freed, before the next one's
turn. Rebuilding runs the segment's blocks but the last once more, with the same RNG states, hence the same bits. The most that is alive is
the inputs of the segments, the inputs within one, and one block's working set (Chen et al., arXiv:1604.06174, section 3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .call import Shared
from .guards import without_autocast
from .run import run_block


class Place(NamedTuple):
    """A block's place in a segment."""

    segment: Segment
    position: int

    @property
    def is_first(self) -> bool:
        """Whether this is the block that keeps its input."""
        return self.position == 0

    def input(self) -> Tensor:
        """The block's input, for backward."""
        return self.segment.take_input(self.position)


class Segment:
    """The autograd nodes of a segment's blocks, and in backward the rebuilt inputs of those that are still to come.

    Everything that rebuilding needs is among the tensors that the nodes save: autograd frees it when it frees theirs.
    """

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._inputs: dict[int, Tensor] = {}

    def join(self, node: Any) -> None:
        """Add the node of the next block: its `saved_tensors` begin with x (or None), `Shared` and the parameters; its `call` is static."""
        self._nodes.append(node)

    def take_input(self, position: int) -> Tensor:
        """The input of the block there, which is not kept any longer."""
        # Backward comes to the last block first: what an earlier backward may have left is not its.
        if position not in self._inputs or position == len(self._nodes) - 1:
            self._rebuild(position)
        return self._inputs.pop(position)

    def _rebuild(self, last: int) -> None:
        self._inputs.clear()
        x, *_ = self._nodes[0].saved_tensors
        with without_autocast(x):
            for position, node in enumerate(self._nodes[:last]):
                _, *inputs = node.saved_tensors
                shared, tensors = Shared(*inputs[: len(Shared._fields)]), inputs[len(Shared._fields) :]
                x, _ = run_block(node.call, node.call.layout.bind(tensors), x, shared)
                self._inputs[position + 1] = x
