"""How to cut a chain of blocks into segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .validate import positive_int


def check_lengths(lengths: Sequence[int], blocks: int) -> None:
    """Refuse lengths of segments that are no positive ints or do not sum to the number of blocks."""
    for index, length in enumerate(lengths):
        positive_int(f"segments[{index}]", length)
    if sum(lengths) != blocks:
        raise ValueError(f"segments must sum to the number of blocks, {blocks}, got {list(lengths)}")


def even_lengths(blocks: int, segments: int) -> list[int]:
    """Lengths of `segments` segments, or of as many as there are blocks, that differ by at most one; the earlier ones are longer."""
    segments = min(segments, max(blocks, 1))
    return [blocks // segments + (index < blocks % segments) for index in range(segments)]


def least_peak_lengths(inputs: Sequence[int], working_sets: Sequence[int]) -> list[int]:
    """Lengths of the segments whose peak in backward is least, given the bytes of each block's input and of its working set.

    While a segment is worked on, there are alive the first inputs of it and of the segments before it, its other inputs, and the working
    set of one of its blocks. Backward frees the later segments first, so the earlier ones may be longer. Exact: a bisection over the peak,
    and for each a dynamic programme over where segments end, which keeps of all ways to reach a block the one with the least kept.
    """
    if not inputs:
        return []
    low, high = max(working_sets), sum(inputs) + max(working_sets)
    while low < high:
        middle = (low + high) // 2
        if _within(middle, inputs, working_sets) is None:
            low = middle + 1
        else:
            high = middle
    lengths = _within(low, inputs, working_sets)
    assert lengths is not None
    return lengths


def _within(peak: int, inputs: Sequence[int], working_sets: Sequence[int]) -> list[int] | None:
    """Lengths whose peak is at most `peak`, of least bytes kept between forward and backward; None where there are none."""
    before = [0, *accumulate(inputs)]
    kept: list[int | None] = [0] + [None] * len(inputs)
    starts = [0] * (len(inputs) + 1)
    for start in range(len(inputs)):
        kept_before = kept[start]
        if kept_before is None:
            continue
        widest = 0
        for stop in range(start + 1, len(inputs) + 1):
            widest = max(widest, working_sets[stop - 1])
            if kept_before + before[stop] - before[start] + widest > peak:
                break
            now = kept_before + inputs[start]
            best = kept[stop]
            if best is None or now < best:
                kept[stop], starts[stop] = now, start
    if kept[-1] is None:
        return None
    lengths, stop = [], len(inputs)
    while stop:
        lengths.append(stop - starts[stop])
        stop = starts[stop]
    return lengths[::-1]
