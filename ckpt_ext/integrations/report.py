"""What a swap did, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SwapReport:
    """Names of the layers that are blocks now, and of those that are not, with the reason; prints as a table."""

    swapped: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    fallback: str = "checkpoint"
    """What refused layers do: run inside `ckpt_ext.checkpoint`, or stay as they were ("none")."""

    def __str__(self) -> str:
        instead = "checkpoint" if self.fallback == "checkpoint" else "as it was"
        rows = [(name, "block", "") for name in self.swapped] + [(name, instead, why) for name, why in self.refused.items()]
        lines = [("layer", "runs as", "why"), *((name or "(the model)", how, why) for name, how, why in rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(2)]
        table = [f"{name:<{widths[0]}}  {how:<{widths[1]}}  {why}".rstrip() for name, how, why in lines]
        return "\n".join((*table, f"{len(self.swapped)} swapped, {len(self.refused)} refused"))
