"""The costs of a chain of blocks and of what surrounds them: what `ckpt-ext plan` solves, and a JSON file for costs measured elsewhere."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .costs import BlockCosts, Cost
from .records import policy_of, record, size
from .spec import Policy
from .validate import instance, number, positive_int

VERSION = 1
"""Of the file format."""


class Mark(NamedTuple):
    """Another way to run the chain, to compare with."""

    peak: int
    """Bytes, everything included."""
    seconds: float


@dataclass(frozen=True)
class CostChain:
    """Blocks, and the bytes around them. Raises ValueError, naming the field, for figures that no chain has."""

    blocks: tuple[BlockCosts, ...]
    fixed: int = 0
    """Bytes that are there all the time."""
    head: int = 0
    """Bytes at the peak of what follows the blocks, beside what they keep."""
    floor: int = 0
    """The most bytes at moments when no block keeps or does anything, everything included: the optimizer's step, say."""
    marks: Mapping[str, Mark] = field(default_factory=dict)
    """Other ways by name."""

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("blocks must not be empty, got none")
        for name in ("fixed", "head", "floor"):
            size(name, getattr(self, name))
        for index, block in enumerate(self.blocks):
            check_costs(f"blocks[{index}]", block)
        for name, mark in self.marks.items():
            size(f"marks.{name}.peak", mark.peak)
            _seconds(f"marks.{name}.seconds", mark.seconds)

    def to_json(self) -> str:
        """The chain as a JSON object, which `from_json` reads; runs of equal blocks are one entry with a count."""
        runs = [(block, len(list(run))) for block, run in itertools.groupby(self.blocks)]
        blocks = [
            {
                **block._asdict(), "count": count,
                "options": [{"policy": dataclasses.asdict(policy), **cost._asdict()} for policy, cost in block.options.items()],
            }
            for block, count in runs
        ]  # fmt: skip
        marks = {name: mark._asdict() for name, mark in self.marks.items()}
        sizes = {"fixed": self.fixed, "head": self.head, "floor": self.floor}
        return json.dumps({"version": VERSION, **sizes, "marks": marks, "blocks": blocks}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> CostChain:
        """The chain of a JSON object. Raises ValueError, naming the field, for anything that `to_json` did not write."""
        entries = record("costs", text, ("version", "fixed", "head", "floor", "marks", "blocks"))
        if entries["version"] != VERSION:
            raise ValueError(f"version must be {VERSION}, got {entries['version']!r}")
        instance("marks", entries["marks"], dict)
        instance("blocks", entries["blocks"], list)
        blocks: list[BlockCosts] = []
        for index, entry in enumerate(entries["blocks"]):
            block = record(f"blocks[{index}]", entry, (*BlockCosts._fields, "count"))
            positive_int(f"blocks[{index}].count", block["count"])
            instance(f"blocks[{index}].options", block["options"], list)
            options = _options(f"blocks[{index}].options", block.pop("options"))
            count = block.pop("count")
            blocks += [BlockCosts(options=options, **block)] * count
        marks = {name: Mark(**record(f"marks.{name}", mark, Mark._fields)) for name, mark in entries["marks"].items()}
        return cls(tuple(blocks), entries["fixed"], entries["head"], entries["floor"], marks)

    def save(self, path: Path | str) -> None:
        """Write the chain to a file, as JSON."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: Path | str) -> CostChain:
        """The chain of a file. Raises as `from_json` does, and OSError."""
        return cls.from_json(Path(path).read_text())


def _options(name: str, entries: list[Any]) -> dict[Policy, Cost]:
    options: dict[Policy, Cost] = {}
    for index, entry in enumerate(entries):
        cost = record(f"{name}[{index}]", entry, ("policy", *Cost._fields))
        policy = policy_of(f"{name}[{index}].policy", cost.pop("policy"))
        if policy in options:
            raise ValueError(f"{name}[{index}].policy must be given once, got {policy} again")
        options[policy] = Cost(**cost)
    return options


def check_costs(name: str, block: BlockCosts) -> None:
    """Refuse costs that no block has, naming the field: negative ones, and an option that keeps less than the input it has to."""
    size(f"{name}.input", block.input)
    size(f"{name}.gradients", block.gradients)
    _seconds(f"{name}.forward_seconds", block.forward_seconds)
    if not block.options:
        raise ValueError(f"{name}.options must not be empty, got none")
    for policy, cost in block.options.items():
        option = f"{name}.options[{policy}]"
        for figure in ("saved", "forward", "backward"):
            size(f"{option}.{figure}", getattr(cost, figure))
        _seconds(f"{option}.seconds", cost.seconds)
        if not policy.offload and cost.saved < block.input:
            raise ValueError(f"{option}.saved must be at least the input's {block.input}, got {cost.saved}")


def _seconds(name: str, value: Any) -> None:
    number(name, value)
    if value < 0:
        raise ValueError(f"{name} must be non-negative, got {value}")
