"""What a block takes under each policy, in bytes and seconds: the figures that `plan` and `fit` reason with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .spec import Policy


class Cost(NamedTuple):
    """What one block takes under one policy; bytes are the device's."""

    saved: int
    """Kept from its forward to its backward, its input included where that stays on the device."""
    forward: int
    """The most that is alive in its forward pass, its input and output included, beside what earlier blocks keep."""
    backward: int
    """The most that is alive in its backward pass, what it kept, the gradients of its output, input and parameters included, beside what
    earlier blocks keep and the gradients of later blocks' parameters."""
    seconds: float
    """Its forward and backward pass, with what is computed again."""


class BlockCosts(NamedTuple):
    """One block of a chain."""

    input: int
    """Bytes of its input."""
    gradients: int
    """Bytes of its parameters' gradients, which stay to the end of the backward pass."""
    forward_seconds: float
    """Its forward pass alone: what it takes to rebuild the input of the next block in a segment."""
    options: Mapping[Policy, Cost]
    """The policies that it may be given."""
