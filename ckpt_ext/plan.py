"""What each block of a chain should keep, so that a training step fits a memory budget and takes the least time: exact, for unequal blocks.

The choice is a policy for every block (`Policy`: what it saves, whether its input waits in the host's memory) and where to cut the chain
into segments, whose blocks but the first keep nothing (`ckpt_ext.segments`). What is alive, in bytes, in the turn of a block i, where
`saved`, `forward`, `backward`, `input` and `gradients` are those of `ckpt_ext.costs`:

    S(i)  what the blocks before i keep: `saved` of each; of a block inside a segment, behind its first, only what is not its input
    G(i)  the gradients of the parameters of the blocks after i
    R(i)  in a segment, what was rebuilt and fetched for it before i: the inputs of the blocks between its first and i, and that of the
          first if it was offloaded. Nothing outside of segments, and for the first block itself
    W(i)  offloaded inputs of other blocks that are on the device, each as large as the largest input there is. In forward the last two have
          not left: 2 behind the first offloaded block. In backward, where i stands before an offloaded block and behind another: 1, fetched
          ahead; behind the last one: 2. For an offloaded block itself none, as its costs have them; inside its segment 2, and 1 in backward

    forward of i     fixed + S(i) + W(i) + forward
    backward of i    fixed + S(i) + W(i) + R(i) + backward + G(i)
    rebuild of k     fixed + S(k) + W(k) + R(k) + forward of k + what blocks behind k in its segment keep + gradient of the segment's output
                     + G of its last block; for each block k of a segment but its last, when the turn of the last one comes in backward. The
                     output is as large as the last block's input
    head             fixed + S(end) + W(end) + head

`fixed` is there all the time: parameters, optimizer state, tables that blocks share, and gradients of parameters outside of the chain. The
seconds are those of the options; in a segment, all blocks but the last have their forward pass once more. `ckpt_ext.fronts` has the search.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .cost_chain import check_costs
from .costs import BlockCosts
from .fronts import Chain, State, later_gradients, waiting_input
from .modules import TransformerBlock
from .partition import check_lengths
from .records import policy_of, record, size
from .spec import Policy
from .validate import instance, number, positive_int

VERSION = 1
"""Of the file format."""


class PlannedBlock(NamedTuple):
    """What a plan does with a block, and what is predicted of it."""

    policy: Policy
    kept: int
    """Bytes that it keeps from forward to backward."""
    gradients: int
    """Bytes of its parameters' gradients."""
    forward_peak: int
    """The most bytes alive in its forward pass, everything included."""
    backward_peak: int
    """The most bytes alive when its turn in backward comes, everything included; a segment is rebuilt in the turn of its last block."""
    seconds: float
    """Its forward and backward pass, and what it takes to run it again."""


class Split(NamedTuple):
    """What the bytes at the peak are."""

    fixed: int
    kept: int
    """By earlier blocks, between their forward and backward."""
    gradients: int
    """Of the parameters of later blocks."""
    working: int
    """Of the block, or head, whose turn it is: what it kept included."""


@dataclass(frozen=True)
class Plan:
    """A policy for each block of a chain, its segments, and the prediction: what `solve` returns and a file holds.

    Raises ValueError, naming the field, where the segments do not match the blocks or an entry is out of range.
    """

    blocks: tuple[PlannedBlock, ...]
    segments: tuple[int, ...]
    """Their lengths, 1 for a lone block."""
    budget: int
    """Bytes."""
    fixed: int
    """Bytes that are there all the time."""
    head: int
    """Bytes at the peak of what follows the chain, offloaded inputs that have not left included, beside `fixed` and what blocks keep."""

    def __post_init__(self) -> None:
        for name in ("budget", "fixed", "head"):
            size(name, getattr(self, name))
        for index, block in enumerate(self.blocks):
            name = f"blocks[{index}]"
            instance(f"{name}.policy", block.policy, Policy)
            for field in ("kept", "gradients", "forward_peak", "backward_peak"):
                size(f"{name}.{field}", getattr(block, field))
            number(f"{name}.seconds", block.seconds)
            if block.seconds < 0:
                raise ValueError(f"{name}.seconds must be non-negative, got {block.seconds}")
        if not self.blocks:
            raise ValueError("blocks must not be empty, got none")
        check_segments(self.segments, self.policies)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policy of each block."""
        return tuple(block.policy for block in self.blocks)

    @property
    def kept(self) -> int:
        """Bytes that all blocks keep between forward and backward."""
        return sum(block.kept for block in self.blocks)

    @property
    def head_peak(self) -> int:
        """The most bytes alive in what follows the chain, everything included."""
        return self.fixed + self.kept + self.head

    @property
    def peak(self) -> int:
        """The most bytes alive in a step, everything included."""
        return max(self.head_peak, *(max(block.forward_peak, block.backward_peak) for block in self.blocks))

    @property
    def seconds(self) -> float:
        """The blocks' part of a step."""
        return math.fsum(block.seconds for block in self.blocks)

    @property
    def split(self) -> Split:
        """What the bytes at the peak are, of its last time in a step."""
        for index, block in enumerate(self.blocks):
            kept = sum(earlier.kept for earlier in self.blocks[:index])
            if block.backward_peak == self.peak:
                gradients = sum(later.gradients for later in self.blocks[index + 1 :])
                return Split(self.fixed, kept, gradients, self.peak - self.fixed - kept - gradients)
        if self.head_peak == self.peak:
            return Split(self.fixed, self.kept, 0, self.head)
        index = next(index for index, block in enumerate(self.blocks) if block.forward_peak == self.peak)
        kept = sum(earlier.kept for earlier in self.blocks[:index])
        return Split(self.fixed, kept, 0, self.peak - self.fixed - kept)

    def apply(self, blocks: Iterable[TransformerBlock]) -> None:
        """Set the policy of each of the blocks, which `checkpoint_sequential(blocks, x, segments=plan.segments)` then runs.

        Raises ValueError, and changes nothing, where they are not as many as the plan's, or not blocks.
        """
        chain = list(blocks)
        if len(chain) != len(self.blocks):
            raise ValueError(f"blocks must be the plan's {len(self.blocks)}, got {len(chain)}")
        for index, block in enumerate(chain):
            instance(f"blocks[{index}]", block, TransformerBlock)
        for block, policy in zip(chain, self.policies, strict=True):
            block.policy = policy

    def to_json(self) -> str:
        """The plan as a JSON object, which `from_json` reads."""
        blocks = [{**block._asdict(), "policy": dataclasses.asdict(block.policy)} for block in self.blocks]
        sums = {"peak": self.peak, "kept": self.kept, "seconds": self.seconds}
        sizes = {"budget": self.budget, "fixed": self.fixed, "head": self.head}
        return json.dumps({"version": VERSION, **sizes, **sums, "segments": self.segments, "blocks": blocks}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan of `to_json`. Raises ValueError, naming the field, for anything that this did not write."""
        entries = record("plan", text, ("version", "budget", "fixed", "head", "peak", "kept", "seconds", "segments", "blocks"))
        if entries["version"] != VERSION:
            raise ValueError(f"version must be {VERSION}, got {entries['version']!r}")
        for name in ("segments", "blocks"):
            instance(name, entries[name], list)
        plan = cls(
            tuple(_planned_block(f"blocks[{index}]", block) for index, block in enumerate(entries["blocks"])),
            tuple(entries["segments"]), entries["budget"], entries["fixed"], entries["head"],
        )  # fmt: skip
        for name in ("peak", "kept", "seconds"):
            if entries[name] != getattr(plan, name):
                raise ValueError(f"{name} must be {getattr(plan, name)}, as the blocks have it, got {entries[name]!r}")
        return plan

    def save(self, path: Path | str) -> None:
        """Write the plan to a file, as JSON."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """The plan of a file. Raises as `from_json` does, and OSError."""
        return cls.from_json(Path(path).read_text())


def _planned_block(name: str, value: object) -> PlannedBlock:
    entries = record(name, value, PlannedBlock._fields)
    return PlannedBlock(**{**entries, "policy": policy_of(f"{name}.policy", entries["policy"])})


def check_segments(lengths: Sequence[int], policies: Sequence[Policy]) -> None:
    """Refuse lengths that do not sum to the number of blocks, and in a segment what it cannot have: blocks that keep more than their input
    or, behind the first, offload it."""
    check_lengths(lengths, len(policies))
    start = 0
    for length in lengths:
        for index in range(start, start + length) if length > 1 else ():
            if policies[index].save != "input":
                raise ValueError(f'blocks[{index}].policy.save must be "input" in a segment, got {policies[index].save!r}')
            if index > start and policies[index].offload:
                raise ValueError(f"blocks[{index}].policy.offload must be False behind the first of a segment, got True")
        start += length


class Point(NamedTuple):
    """A step of the frontier: with `budget` bytes or more, a step takes `seconds` or less."""

    budget: int
    seconds: float


def solve(blocks: Sequence[BlockCosts], budget: int, *, fixed: int = 0, head: int = 0) -> Plan:
    """The plan of the least time of all whose peak is within `budget` bytes.

    Of several as fast, the one of the least peak; of those, one with the fewest segments of more than one block. Times are compared after
    rounding to some 1e-15 of the slowest plan's. Raises ValueError that names the least budget that works, where this one does not.
    """
    size("budget", budget)
    chain = _chain(blocks, fixed, head)
    least = fixed + chain.least_need()
    if budget < least:
        raise ValueError(f"budget must be at least {least} bytes for this chain, got {budget}")
    found = chain.fronts(budget - fixed)
    front = found[0][State.NONE_BEFORE]
    seconds = [chain.clock.seconds(time) for time in front.time.tolist()]
    best = seconds.index(seconds[-1])
    policies, lengths = chain.way(found, best)
    plan = predict(blocks, policies, lengths, budget=budget, fixed=fixed, head=head)
    assert plan.peak == fixed + front.need[best], "the search and the prediction count alike"
    return plan


def least_budget(blocks: Sequence[BlockCosts], *, fixed: int = 0, head: int = 0) -> int:
    """The least bytes for which `solve` finds a plan."""
    return fixed + _chain(blocks, fixed, head).least_need()


def frontier(blocks: Sequence[BlockCosts], *, fixed: int = 0, head: int = 0, points: int | None = None) -> list[Point]:
    """The least seconds for each budget, from the least budget to where more memory saves no time: the steps of an exact step function.

    With `points`, at most so many of the steps: those in force at budgets of equal distances, the first and the last among them.
    """
    chain = _chain(blocks, fixed, head)
    front = chain.fronts()[0][State.NONE_BEFORE]
    steps: list[Point] = []
    for need, time in zip(front.need.tolist(), front.time.tolist(), strict=True):
        seconds = chain.clock.seconds(time)
        if not steps or seconds < steps[-1].seconds:
            steps.append(Point(fixed + need, seconds))
    if points is None:
        return steps
    positive_int("points", points)
    if len(steps) <= points:
        return steps
    first, last = steps[0].budget, steps[-1].budget
    budgets = [first + (last - first) * index // (points - 1) for index in range(points)] if points > 1 else [last]
    return list(dict.fromkeys(max(step for step in steps if step.budget <= budget) for budget in budgets))


def _chain(blocks: Sequence[BlockCosts], fixed: int, head: int) -> Chain:
    if not blocks:
        raise ValueError("blocks must not be empty, got none")
    size("fixed", fixed)
    size("head", head)
    for index, block in enumerate(blocks):
        check_costs(f"blocks[{index}]", block)
    return Chain(blocks, head)


def predict(
    blocks: Sequence[BlockCosts], policies: Sequence[Policy], segments: Sequence[int] | None = None, *,
    budget: int = 0, fixed: int = 0, head: int = 0,
) -> Plan:  # fmt: skip
    """The plan that gives the blocks these policies and segments of these lengths, all 1 if not given, whatever the budget says to it.

    Raises ValueError for a policy that is not among a block's options, and for segments that `Plan` refuses.
    """
    lengths = [1] * len(blocks) if segments is None else list(segments)
    if len(policies) != len(blocks):
        raise ValueError(f"policies must be one for each of the {len(blocks)} blocks, got {len(policies)}")
    check_segments(lengths, policies)
    for index, (block, policy) in enumerate(zip(blocks, policies, strict=True)):
        if policy not in block.options:
            raise ValueError(f"policies[{index}] must be among the block's options, got {policy}")
    later, waiting = later_gradients(blocks), waiting_input(blocks)
    planned: list[PlannedBlock] = []
    before = fixed
    for length in lengths:
        span = range(len(planned), len(planned) + length)
        offloaded = policies[span.start].offload
        if offloaded:
            forward_waits, backward_waits = 2 * waiting, waiting
        else:
            around = any(policy.offload for policy in policies[: span.start]), any(policy.offload for policy in policies[span.stop :])
            forward_waits, backward_waits = (count * waiting for count in State.between(*around).waiting)
        costs = [blocks[index].options[policies[index]] for index in span]
        kept = [cost.saved - (blocks[index].input if index > span.start else 0) for index, cost in zip(span, costs, strict=True)]
        end = blocks[span[-1]].input + later[span[-1]]
        rebuilt = rebuild = 0
        for place, (index, cost) in enumerate(zip(span, costs, strict=True)):
            own = offloaded and place == 0  # its costs count what waits
            in_forward = before + sum(kept[:place]) + (0 if own else forward_waits)
            in_backward = before + sum(kept[:place]) + (0 if own else backward_waits) + rebuilt
            backward = in_backward + cost.backward + later[index]
            again = place < length - 1
            if again:
                rebuild = max(rebuild, in_backward + cost.forward + sum(kept[place + 1 :]) + end)
            elif place:
                backward = max(backward, rebuild)
            seconds = cost.seconds + (blocks[index].forward_seconds if again else 0.0)
            planned.append(
                PlannedBlock(policies[index], kept[place], blocks[index].gradients, in_forward + cost.forward, backward, seconds)
            )
            rebuilt += blocks[index].input if place or offloaded else 0
        before += sum(kept)
    at_head = head + (2 * waiting if any(policy.offload for policy in policies) else 0)
    return Plan(tuple(planned), tuple(lengths), budget, fixed, at_head)
