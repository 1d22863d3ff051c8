"""Where the memory of a training step goes, and what would help: each piece of advice is another estimate, computed and compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .budget import Training, format_bytes
from .fit import Estimate, Method, estimate
from .fit_report import describe
from .shapes import ModelShape
from .spec import Policy

if TYPE_CHECKING:
    from rich.console import Group

BAR = 30
"""Characters of a whole bar."""
SHARDS = 8
SHARDED = "parameters, gradients and state sharded"


class Alternative(NamedTuple):
    """A change, and what a step takes with it."""

    name: str
    estimate: Estimate
    saved: int
    """Bytes less than now."""


class Explanation(NamedTuple):
    """Where a step's memory goes, and what would change that, the most helpful first."""

    shape: ModelShape
    method: Method
    training: Training
    batch: int
    length: int
    memory: int | None
    now: Estimate
    alternatives: list[Alternative]

    @property
    def helpful(self) -> list[Alternative]:
        """What saves a hundredth of the peak or more."""
        return [alternative for alternative in self.alternatives if alternative.saved >= self.now.peak / 100]

    @property
    def verdict(self) -> str:
        """What dominates and what helps most against it, in a sentence or two."""
        part, size = max(self.now.parts.items(), key=lambda item: item[1])
        lines = [f"Most of it, {size / self.now.peak:.0%}, is {part}, at the peak: {self.now.moment}."]
        recompute = [a for a in self.alternatives if a.name in RECOMPUTE]
        best = max(recompute, key=lambda a: a.saved, default=None)
        if best is not None and best.saved >= self.now.peak / 100:
            lines.append(f"Recompute helps: with {best.name} the total falls from {_gb(self.now.peak)} to {_gb(best.estimate.peak)}.")
        else:
            lines.append("Recompute does not help any further.")
        alone = [change for change in self.helpful if not change.name.startswith(SHARDED)]
        if alone and alone[0] is not best:
            lines.append(f"On one device most helps {alone[0].name}: to {_gb(alone[0].estimate.peak)}.")
        lines += [f"On more, {a.name}: to {_gb(a.estimate.peak)}." for a in self.helpful if a.name.startswith(SHARDED)]
        if not self.helpful:
            lines.append("None of the changes that were tried helps.")
        if self.memory is not None:
            fits = self.now.peak <= self.memory
            enough = [a.name for a in self.helpful if a.estimate.peak <= self.memory]
            end = "" if fits else f" Any of these changes makes it so: {'; '.join(enough)}." if enough else " No change alone makes it so."
            lines.append(f"{_gb(self.memory)} {'is' if fits else 'is not'} enough.{end}")
        return " ".join(lines)


RECOMPUTE = ("ours: input", "ours: input, segments", "ours: input, offload", "ours: input, 4 times the slices", "torch checkpoint")


def explain(
    shape: ModelShape, method: Method, training: Training, batch: int, length: int, memory: int | None = None
) -> Explanation:  # fmt: skip
    """Estimates a step as it is and with each change that applies."""
    now = estimate(shape, method, training, batch, length)
    alternatives = []
    for name, other_method, other_training in _changes(method, training):
        other = estimate(shape, other_method, other_training, batch, length)
        alternatives.append(Alternative(name, other, now.peak - other.peak))
    alternatives.sort(key=lambda alternative: -alternative.saved)
    return Explanation(shape, method, training, batch, length, memory, now, alternatives)


def _changes(method: Method, training: Training) -> Iterator[tuple[str, Method, Training]]:
    """A change at a time: of what is kept, of the loss, and of what is trained how."""
    ours = replace(method, blocks="ours", policy=Policy(), segments=False)
    if method.blocks == "plain":
        yield "torch checkpoint", replace(method, blocks="torch checkpoint"), training
    if (method.blocks, method.policy) != (ours.blocks, ours.policy) or method.segments:
        yield "ours: input", ours, training
    if not method.segments:
        yield "ours: input, segments", replace(ours, segments=True), training
    if not method.policy.offload:
        yield "ours: input, offload", replace(ours, policy=Policy(offload=True)), training
    if method.blocks == "ours" and method.policy.save == "input":
        more = replace(method.policy, slices=64 if method.policy.slices == "auto" else 4 * method.policy.slices)
        yield "ours: input, 4 times the slices", replace(method, policy=more), training
    if method.loss == "logits":
        yield "linear_cross_entropy, whose logits are never whole", replace(method, loss="tiled"), training
        if method.blocks != "ours":
            yield "linear_cross_entropy and ours: input", replace(ours, loss="tiled"), training
    if training.optimizer in ("adamw", "adamw-fp32"):
        yield "8-bit optimizer state", method, replace(training, optimizer="adamw-8bit")
    if training.optimizer not in ("offloaded", "none"):
        yield "optimizer state in the host's memory", method, replace(training, optimizer="offloaded")
    if training.shards == 1:
        yield f"{SHARDED} over {SHARDS} devices", method, replace(training, shards=SHARDS)
    if not training.rank:
        yield "adapters of rank 16", method, replace(training, rank=16)
    if training.accumulate:
        yield "no accumulated gradients", method, replace(training, accumulate=False)


def _gb(size: int) -> str:
    return format_bytes(size)


def parts(explanation: Explanation) -> Iterator[tuple[str, int, float, str]]:
    """Name, bytes, share and bar of each part that there is."""
    for part, size in explanation.now.parts.items():
        if size:
            share = size / explanation.now.peak
            yield part, size, share, "#" * max(1, round(BAR * share))


def title(explanation: Explanation) -> str:
    """What is explained, in a line."""
    method = explanation.method
    loss = "loss with whole logits" if method.loss == "logits" else "loss without logits"
    what = f"{method.name}, {loss}; {describe(explanation.training)}"
    return f"{explanation.shape.name}, {explanation.batch} x {explanation.length:,} tokens: {what}"


def as_table(explanation: Explanation) -> Group:
    """For a terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    now = Table("at the peak", box=box.SIMPLE_HEAD)
    for name in ("bytes", "share"):
        now.add_column(name, justify="right")
    now.add_column("")
    for part, size, share, bar in parts(explanation):
        now.add_row(part, _gb(size), f"{share:.0%}", f"[cyan]{bar}[/]")
    now.add_row("[bold]in all[/]", _gb(explanation.now.peak), "", explanation.now.moment)
    if explanation.now.host:
        now.add_row("in the host's memory", _gb(explanation.now.host), "", "")
    what = Table("with", box=box.SIMPLE_HEAD)
    for name in ("in all", "less", "host"):
        what.add_column(name, justify="right")
    for change in explanation.alternatives:
        host = _gb(change.estimate.host) if change.estimate.host else ""
        what.add_row(change.name, _gb(change.estimate.peak), f"{change.saved / explanation.now.peak:.0%}", host)
    return Group(title(explanation), now, what, explanation.verdict)


def as_markdown(explanation: Explanation, command: str) -> str:
    """For a file."""
    lines = [f"# Where the memory goes\n\n{title(explanation)}\n\n`{command}`\n", "| at the peak | bytes | share | |", "|---|--:|--:|---|"]
    lines += [f"| {part} | {_gb(size)} | {share:.0%} | `{bar}` |" for part, size, share, bar in parts(explanation)]
    lines += [f"| in all | {_gb(explanation.now.peak)} | | {explanation.now.moment} |", "", "| with | in all | less |", "|---|--:|--:|"]
    lines += [f"| {a.name} | {_gb(a.estimate.peak)} | {a.saved / explanation.now.peak:.0%} |" for a in explanation.alternatives]
    return "\n".join([*lines, "", explanation.verdict]) + "\n"


def as_json(explanation: Explanation, command: str) -> str:
    """All figures, in bytes."""
    now, alternatives = explanation.now, explanation.alternatives
    return json.dumps({
        "command": command, "title": title(explanation), "memory": explanation.memory, "peak": now.peak, **now._asdict(),
        "alternatives": [{"name": a.name, "peak": a.estimate.peak, "saved": a.saved, "host": a.estimate.host} for a in alternatives],
        "verdict": explanation.verdict,
    }, indent=2)  # fmt: skip


def write(explanation: Explanation, command: str, folder: Path) -> None:
    """`report.json` and `report.md`, into `folder`, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(as_json(explanation, command) + "\n")
    (folder / "report.md").write_text(as_markdown(explanation, command))
