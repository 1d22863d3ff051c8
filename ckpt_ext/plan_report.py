"""What a plan looks like: a table for the terminal, and `plan.json`, `report.md` and `frontier.png` for a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from .budget import format_bytes
from .cost_chain import CostChain
from .plan import Plan, Point
from .spec import Policy, Save

if TYPE_CHECKING:
    from rich.console import Group

HEADER = ("blocks", "each keeps", "input", "segments of", "kept", "highest peak")
NOTE = (
    "Bytes are counted from tensors without data. Times follow from floating-point operations and bytes at assumed rates, or from the file "
    "of costs; none was measured here."
)
LINE_COLOUR, CHOSEN_COLOUR, MARK_COLOUR = "#0072B2", "#D55E00", "#595959"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it was made from."""

    title: str
    command: str
    chain: CostChain
    plan: Plan
    usable: int
    """Bytes of the budget that the plan may take."""
    frontier: Sequence[Point]

    @property
    def peak(self) -> int:
        """Of the whole step."""
        return max(self.plan.peak, self.chain.floor)

    @property
    def least_seconds(self) -> float:
        """With nothing recomputed, as far as the costs tell."""
        return min([self.frontier[-1].seconds, *(mark.seconds for mark in self.chain.marks.values())])


def rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """The cells of the table, runs of equal blocks or of equal segments in one row, in the order of `HEADER`."""
    starts = [sum(plan.segments[:index]) for index in range(len(plan.segments))]
    segments = [(start, length, _policies(plan, start, length)) for start, length in zip(starts, plan.segments, strict=True)]
    for (length, policies), run in groupby(segments, key=lambda segment: segment[1:]):
        members = list(run)
        first, last = members[0][0], members[-1][0] + length
        blocks = plan.blocks[first:last]
        yield (
            f"{first}" if last - first == 1 else f"{first}-{last - 1}",
            policies[0].save,
            "in the host's memory" if policies[0].offload else "on the device",
            f"{length}" if length > 1 else "-",
            format_bytes(sum(block.kept for block in blocks)),
            format_bytes(max(max(block.forward_peak, block.backward_peak) for block in blocks)),
        )


def _policies(plan: Plan, start: int, length: int) -> tuple[Policy, ...]:
    return plan.policies[start : start + length]


def summary(planned: Planned) -> list[str]:
    """What the peak is made of, and the time."""
    plan, split = planned.plan, planned.plan.split
    more = plan.seconds / planned.least_seconds - 1 if planned.least_seconds else 0.0
    lines = [
        f"peak {format_bytes(planned.peak)} of {format_bytes(planned.usable)}: {format_bytes(split.fixed)} always there, "
        f"{format_bytes(split.kept)} kept by blocks, {format_bytes(split.gradients)} gradients, {format_bytes(split.working)} at work",
        f"blocks' time {more:+.1%} over that with nothing recomputed",
    ]
    host = sum(
        block.input for block, policy in zip(planned.chain.blocks, plan.policies, strict=True) if policy.offload
    )
    return lines + [f"{format_bytes(host)} of the host's memory"] * bool(host)


def as_table(planned: Planned) -> Group:
    """For the terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    table = Table(title=planned.title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in HEADER:
        table.add_column(name, justify="right" if name in ("kept", "highest peak") else "left")
    for cells in rows(planned.plan):
        table.add_row(*cells)
    return Group(table, *summary(planned), f"\n[dim]{NOTE}[/]")


def as_markdown(planned: Planned) -> str:
    """The same, and how to get it again."""
    lines = [
        f"# ckpt-ext plan: {planned.title}", "",
        f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}", *(f"| {' | '.join(cells)} |" for cells in rows(planned.plan)), "",
        *(f"- {line}" for line in summary(planned)), "", NOTE, "", "To plan again:", "", f"    {planned.command}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def draw(planned: Planned, path: Path) -> None:
    """The least time for each budget, with the plan on it. Raises RuntimeError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("frontier.png must have matplotlib, which is not installed: pip install 'ckpt_ext[plot]'") from error
    gigabyte, least = 1e9, planned.least_seconds or 1.0
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    bytes_ = [max(point.budget, planned.chain.floor) / gigabyte for point in planned.frontier]
    times = [100 * (point.seconds / least - 1) for point in planned.frontier]
    right = max([bytes_[-1], planned.usable / gigabyte, *(mark.peak / gigabyte for mark in planned.chain.marks.values())])
    right += 0.04 * (right - bytes_[0])
    axes.step([*bytes_, right], [*times, times[-1]], where="post", color=LINE_COLOUR, label="least time for a budget")
    for (name, mark), shape in zip(planned.chain.marks.items(), cycle("os^vPX")):
        label = f'"{name}" everywhere' if name in get_args(Save) else name
        axes.plot(mark.peak / gigabyte, 100 * (mark.seconds / least - 1), shape, color=MARK_COLOUR, markersize=7, label=label)
    axes.axvline(planned.usable / gigabyte, color="black", linewidth=0.8, linestyle=":", label=f"budget, {format_bytes(planned.usable)}")
    axes.plot(planned.peak / gigabyte, 100 * (planned.plan.seconds / least - 1), "D", color=CHOSEN_COLOUR, markersize=9, label="the plan")
    axes.margins(x=0.03, y=0.15)
    axes.set_xlim(right=right)
    axes.set_xlabel("peak memory of a step, GB (1e9 bytes)")
    axes.set_ylabel("time of the blocks over nothing recomputed, %")
    axes.set_title(planned.title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    # Below, since labels at the marks would cover one another and the line.
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def write(planned: Planned, folder: Path) -> None:
    """All of it, into `folder`. The picture comes last: the rest needs no matplotlib."""
    planned.plan.save(folder / "plan.json")
    planned.chain.save(folder / "costs.json")
    (folder / "report.md").write_text(as_markdown(planned))
    draw(planned, folder / "frontier.png")
