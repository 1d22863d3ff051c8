"""The exact search behind `ckpt_ext.plan`, whose docstring says what is counted: from each position of a chain on, the best ways to go on.

All that is alive at some moment grows one for one with the bytes that earlier blocks keep. So a way to treat the blocks from a position on
comes down to two numbers: its need, the most that is ever alive beside what the blocks before keep, and its time. Of the ways from a
position only a Pareto front is kept. Fronts are built from the last block to the first, and the first block's answers for every budget at
once. A move goes from one position to a later one: a lone block under one of its policies, or a segment.

Times are whole ticks, so that equal sums are equal whatever their order; the low bits count segments, so that fewer win a tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .costs import BlockCosts, Cost
from .spec import Policy

Integers = NDArray[np.int64]


class Clock:
    """Seconds of a chain as whole numbers of 62 bits, rounded to about 2**-50 of the slowest way in a chain of some hundred blocks."""

    def __init__(self, blocks: Sequence[BlockCosts]) -> None:
        longest = sum(max(cost.seconds for cost in block.options.values()) + block.forward_seconds for block in blocks)
        self._segment_bits = len(blocks).bit_length()
        self._exponent = math.frexp(longest)[1] - (61 - self._segment_bits)

    def time(self, seconds: float, segments: int = 0) -> int:
        """`seconds`, and that many segments of more than one block."""
        return (round(math.ldexp(seconds, -self._exponent)) << self._segment_bits) + segments

    def seconds(self, time: int) -> float:
        """The seconds of a time."""
        return math.ldexp(time >> self._segment_bits, self._exponent)


def later_gradients(blocks: Sequence[BlockCosts]) -> list[int]:
    """For each block, the bytes of the gradients of the blocks after it."""
    return list(accumulate((block.gradients for block in reversed(blocks[1:])), initial=0))[::-1]


def waiting_input(blocks: Sequence[BlockCosts]) -> int:
    """Bytes of an offloaded input that is on the device in another block's turn: the largest that there may be."""
    return max(block.input for block in blocks)


class State(IntEnum):
    """Where the offloaded inputs are, as far as a position between two blocks can tell. It decides how many of them are on the device."""

    NONE_BEFORE = 0
    """No block before the position is offloaded."""
    SOME_BEFORE = 1
    """Some are, and none after it."""
    AROUND = 2
    """Some before it are, and some after it."""

    @property
    def waiting(self) -> tuple[int, int]:
        """How many inputs that other blocks offload are on the device in the forward, and in the backward, of a block that does not.

        The last two stay until the next one is parked or taken; once one behind is taken, the next is fetched ahead.
        """
        return ((0, 0), (2, 2), (2, 1))[self]

    @classmethod
    def between(cls, before: bool, after: bool) -> State:
        """The state where some before, and some after, are offloaded."""
        return (cls.AROUND if after else cls.SOME_BEFORE) if before else cls.NONE_BEFORE


class Move(NamedTuple):
    """What is done with the blocks from a position up to `stop`. Bytes are beside what earlier blocks keep."""

    stop: int
    policies: tuple[Policy, ...]
    forward: int
    """The most that is alive in their forward passes."""
    backward: int
    """The most that is alive in their backward passes, the rebuild of a segment included."""
    kept: int
    """What they keep from forward to backward."""
    time: int
    """As `Clock` counts it."""

    def through(self, state: State, waiting: int) -> Iterator[tuple[State, int]]:
        """From `state`: the states that may be at `stop`, and the need of these blocks; `waiting` is the size of an offloaded input."""
        if not self.policies[0].offload:
            forward, backward = state.waiting
            yield state, max(self.forward + forward * waiting, self.backward + backward * waiting)
        elif state != State.SOME_BEFORE:
            for after in (State.SOME_BEFORE, State.AROUND):
                yield after, max(self.forward, self.backward)


class _Tail(NamedTuple):
    """The last blocks of a segment, under policies that may stand inside of one.

    Bytes are beside what the blocks before the tail keep; those of backward also beside the segment's inputs before the tail.
    """

    policies: tuple[Policy, ...]
    forward: int
    """The most in the forward pass of the last block; the others need more when they are run again."""
    backward: int
    """The most in backward, the rebuild of these blocks included."""
    kept: int
    """What its blocks keep, which is not their inputs."""
    end: int
    """What is there while the segment is rebuilt: the gradients of its output and of later blocks' parameters."""
    time: int


def moves(blocks: Sequence[BlockCosts], clock: Clock) -> list[list[Move]]:
    """For each position, all moves from there."""
    later, waiting = later_gradients(blocks), waiting_input(blocks)
    found: list[list[Move]] = []
    tails: list[list[_Tail]] = []  # by where they end, the last block first
    for position in range(len(blocks) - 1, -1, -1):
        block, gradients = blocks[position], later[position]
        steps = [
            Move(position + 1, (policy,), cost.forward, cost.backward + gradients, cost.saved, clock.time(cost.seconds))
            for policy, cost in block.options.items()
        ]
        for stop, ends in zip(range(len(blocks), position + 1, -1), tails, strict=True):
            steps += _segments(block, gradients, waiting, clock, stop, ends)
        tails = [_longer(ends, block, gradients, clock) for ends in tails]
        tails.append(list(_last(block, gradients, clock)))
        found.append(steps)
    return found[::-1]


def _inside(block: BlockCosts) -> Iterator[tuple[Policy, Cost]]:
    """The policies that a block behind the first of a segment may have."""
    return ((policy, cost) for policy, cost in block.options.items() if policy.save == "input" and not policy.offload)


def _last(block: BlockCosts, gradients: int, clock: Clock) -> Iterator[_Tail]:
    for policy, cost in _inside(block):
        time = clock.time(cost.seconds)
        yield _Tail((policy,), cost.forward, cost.backward + gradients, cost.saved - block.input, block.input + gradients, time)


def _longer(tails: list[_Tail], block: BlockCosts, gradients: int, clock: Clock) -> list[_Tail]:
    """The tails with one more block in front."""
    again = clock.time(block.forward_seconds)
    longer = [
        _Tail(
            (policy, *tail.policies),
            cost.saved - block.input + tail.forward,
            max(cost.backward + gradients, cost.forward + tail.kept + tail.end, cost.saved + tail.backward),
            cost.saved - block.input + tail.kept,
            tail.end,
            clock.time(cost.seconds) + again + tail.time,
        )
        for tail in tails
        for policy, cost in _inside(block)
    ]
    if len(longer) < 2:
        return longer
    best: list[_Tail] = []
    for tail in sorted(longer, key=lambda tail: (tail.time, tail.backward, tail.kept, tail.forward)):
        if not any(other.backward <= tail.backward and other.kept <= tail.kept and other.forward <= tail.forward for other in best):
            best.append(tail)
    return best


def _segments(block: BlockCosts, gradients: int, waiting: int, clock: Clock, stop: int, tails: list[_Tail]) -> Iterator[Move]:
    """The segments that begin with this block and end with one of the tails."""
    for policy, cost in block.options.items():
        if policy.save != "input":
            continue
        # In forward the last two offloaded inputs are still there; in backward this one, and one fetched ahead.
        ahead, back = (2 * waiting, block.input + waiting) if policy.offload else (0, 0)
        time = clock.time(cost.seconds, segments=1) + clock.time(block.forward_seconds)
        for tail in tails:
            forward = max(cost.forward, cost.saved + ahead + tail.forward)
            rebuild = cost.forward + tail.kept + tail.end
            backward = max(cost.backward + gradients, rebuild, cost.saved + back + tail.backward)
            yield Move(stop, (policy, *tail.policies), forward, backward, cost.saved + tail.kept, time + tail.time)


class Front(NamedTuple):
    """The ways from a position on that no other beats: by need, ascending, and so by time, descending."""

    need: Integers
    time: Integers
    move: Integers
    """Which of the position's moves a way begins with."""
    state: Integers
    """The state at that move's stop."""
    rest: Integers
    """Which way of the front there it goes on with."""


class Chain:
    """All ways through a chain of blocks before a head, which takes `head` bytes beside what they keep."""

    def __init__(self, blocks: Sequence[BlockCosts], head: int) -> None:
        self.clock = Clock(blocks)
        self._moves = moves(blocks, self.clock)
        self._waiting = waiting_input(blocks)
        offloads = any(policy.offload for block in blocks for policy in block.options)
        self._states = tuple(State) if offloads else (State.NONE_BEFORE,)
        self._ends = {State.NONE_BEFORE: head, State.SOME_BEFORE: head + 2 * self._waiting}

    def least_need(self) -> int:
        """The least need of all ways."""
        least: list[dict[State, float]] = [{state: self._ends.get(state, math.inf) for state in State}]
        for steps in reversed(self._moves):
            here = {
                state: min(
                    (
                        max(need, move.kept + least[len(self._moves) - move.stop][after])
                        for move in steps
                        for after, need in move.through(state, self._waiting)
                    ),
                    default=math.inf,
                )
                for state in self._states
            }
            least.append(here)
        return int(least[-1][State.NONE_BEFORE])

    def fronts(self, most: int | None = None) -> list[dict[State, Front]]:
        """The fronts of each position and state, of what may be part of a way of a need up to `most`, or of any useful need."""
        useful = self._need_of_fastest()
        limits = self._limits(useful if most is None else min(most, useful))
        found = [{state: _end(self._ends.get(state)) for state in self._states}]
        for position in range(len(self._moves) - 1, -1, -1):
            here: dict[State, list[Front]] = {state: [] for state in self._states}
            for index, move in enumerate(self._moves[position]):
                behind = found[len(self._moves) - move.stop]
                for state in self._states:
                    for after, need in move.through(state, self._waiting):
                        if need <= limits[position]:
                            here[state].append(_with(index, move, need, after, behind[after], limits[position]))
            found.append({state: _pareto(candidates) for state, candidates in here.items()})
        return found[::-1]

    def way(self, found: Sequence[dict[State, Front]], index: int) -> tuple[list[Policy], list[int]]:
        """The blocks' policies and the segments' lengths of a way of the first front."""
        policies: list[Policy] = []
        lengths: list[int] = []
        position, state = 0, State.NONE_BEFORE
        while position < len(self._moves):
            front = found[position][state]
            move = self._moves[position][front.move[index]]
            policies += move.policies
            lengths.append(move.stop - position)
            state, index, position = State(int(front.state[index])), int(front.rest[index]), move.stop
        return policies, lengths

    def _limits(self, most: int) -> list[int]:
        """The largest needs, by position, of what may be part of a way of need `most`: earlier blocks keep something in any case."""
        least_kept = [0] + [most] * len(self._moves)
        for position, steps in enumerate(self._moves):
            for move in steps:
                least_kept[move.stop] = min(least_kept[move.stop], least_kept[position] + move.kept)
        return [most - kept for kept in least_kept]

    def _need_of_fastest(self) -> int:
        """No less than the need of a way of the least time: what needs more is of no use. Segments only add to the time."""
        spare = 2 * self._waiting if len(self._states) > 1 else 0
        need = self._ends[State.NONE_BEFORE] + spare
        for steps in reversed(self._moves):
            _, need = min(
                (move.time, max(move.forward + spare, move.backward + spare, move.kept + need)) for move in steps if len(move.policies) == 1
            )
        return need


def _end(need: int | None) -> Front:
    """The front behind the last block: one way of no time, or none."""
    none = np.zeros(0 if need is None else 1, dtype=np.int64)
    return Front(none + (need or 0), none, none, none, none)


def _with(index: int, move: Move, need: int, after: State, behind: Front, limit: int) -> Front:
    """The ways within `limit` that begin with a move, which needs `need`; of equal ones the last."""
    # Of all the ways to go on that need less than the move itself, the fastest, which is the last, is as good as any.
    start = max(0, int(np.searchsorted(behind.need, need - move.kept, side="right")) - 1)
    stop = max(start, int(np.searchsorted(behind.need, limit - move.kept, side="right")))
    count = stop - start
    needs = np.maximum(behind.need[start:stop] + move.kept, need)
    return Front(needs, behind.time[start:stop] + move.time, np.full(count, index), np.full(count, int(after)), np.arange(start, stop))


def _pareto(candidates: Sequence[Front]) -> Front:
    """Those of all the candidates that no other beats; of equal ones the first."""
    if not candidates:
        return _end(None)
    columns = Front(*(np.concatenate(column) for column in zip(*candidates, strict=True)))
    order = np.lexsort((columns.time, columns.need))
    time = columns.time[order]
    keep = order[np.append(np.ones(min(1, time.size), dtype=bool), time[1:] < np.minimum.accumulate(time)[:-1])]
    return Front(*(column[keep] for column in columns))
