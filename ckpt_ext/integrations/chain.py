"""Segments within a swapped model, whose own forward calls its layers one by one: which call goes on with which segment.

A segment is rebuilt from its first layer's input, so each further layer must have been given the output of the one before as it was. That
is looked at in every call: a layer that got anything else begins a segment of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from ..partition import check_lengths, even_lengths, least_peak_lengths
from ..segments import Place, Segment
from ..slicing import working_set
from ..spec import BlockSpec
from ..validate import positive_int

Segments = int | Sequence[int] | Literal["auto"] | None


@dataclass(frozen=True)
class Link:
    """A layer's place in its model: plain data, so that it is copied and pickled with the layer."""

    index: int
    count: int
    """Of the layers that are swapped."""
    segments: int | tuple[int, ...] | Literal["auto"]
    """Their number, their lengths, or as many as make the peak least."""

    def lengths(self, x: Tensor, spec: BlockSpec, *, trained: bool) -> Sequence[int]:
        """Of the segments of a model all of whose layers are like this one."""
        if isinstance(self.segments, tuple):
            return self.segments
        if isinstance(self.segments, int):
            return even_lengths(self.count, self.segments)
        working = working_set(spec, x.size(0) * x.size(1), x.element_size(), trained=trained)
        return least_peak_lengths([x.nbytes] * self.count, [working] * self.count)


def links(count: int, segments: Segments) -> list[Link | None]:
    """The places of `count` layers; Nones where there are no segments. Raises ValueError for lengths that do not sum to `count`."""
    if segments is None:
        return [None] * count
    if isinstance(segments, str):
        if segments != "auto":
            raise ValueError(f"segments must be None, a number, lengths or 'auto', got {segments!r}")
        return [Link(index, count, "auto") for index in range(count)]
    if isinstance(segments, int):
        positive_int("segments", segments)
        return [Link(index, count, segments) for index in range(count)]
    if not hasattr(segments, "__len__"):
        raise ValueError(f"segments must be None, a number, lengths or 'auto', got {segments!r}")
    check_lengths(segments, count)
    return [Link(index, count, tuple(segments)) for index in range(count)]


class _Under(NamedTuple):
    """The segment that the last call of a layer was in, and what the next layer must come with to be in it, too."""

    segment: Segment
    position: int
    """Of that layer."""
    layer: int
    """Its index in the model."""
    last: int
    """Index of the segment's last layer."""
    output: weakref.ref[Tensor]
    version: int


class _Running(threading.local):
    under: _Under | None = None


_RUNNING = _Running()


class Called(NamedTuple):
    """Where a layer that is called stands."""

    place: Place | None
    """None for one that is alone in its segment."""
    last: int
    """Index of the segment's last layer."""
    is_cut_off: bool = False
    """Whether the layer was to go on with a segment, and begins one, since it was not given the output of the one before."""


def place_of(link: Link | None, x: Tensor, spec: BlockSpec, *, trained: bool) -> Called:
    """Where a layer stands that is called with x."""
    if link is None:
        return Called(None, -1)
    under, _RUNNING.under = _RUNNING.under, None
    if under is not None and under.layer + 1 == link.index <= under.last and under.output() is x and under.version == x._version:
        return Called(Place(under.segment, under.position + 1), under.last)
    end, length = 0, 0
    for length in link.lengths(x, spec, trained=trained):
        end += length
        if link.index < end:
            break
    return Called(None if link.index == end - 1 else Place(Segment(), 0), end - 1, link.index > end - length)


def passed(link: Link | None, called: Called, y: Tensor) -> None:
    """Note the output of a layer that was `called`. What needs no gradient keeps nothing: the segment begins behind it."""
    if link is not None and called.place is not None and y.requires_grad:
        segment, position = called.place
        _RUNNING.under = _Under(segment, position, link.index, called.last, weakref.ref(y), y._version)
