"""What a comparison looks like: a table for the terminal, and `report.json`, `report.md` and `memory.png` for a folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .compare import PLAIN, TORCH, Comparison, Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Group

MIB = 2**20
NOTE = "Times of a CPU, and of Triton's interpreter all the more, say nothing about a GPU. Bytes, bits and losses hold anywhere."
HEADER = ("run", "final loss", "gradients vs plain", "bits of ours: all", "saved MiB", "peak MiB", "tokens/s", "step time", "recomputed")
LEGEND = (
    "final loss: mean of the last steps. gradients: largest difference from the plain run at equal weights, relative to a parameter's "
    "largest. saved: by the blocks, between forward and backward. peak: in a step, without parameters and their finished gradients. "
    f"step time: relative to {TORCH}. recomputed: matrix products of a step beyond those with nothing recomputed, in GFLOP."
)
SPLIT_HEADER = ("run", "parameters", "gradients", "saved", "working", "logits", "other", "peak", "host")
SPLIT_TITLE = (
    "What the peak of a step without its optimizer is made of, MiB, all gradients included. saved: by the forward pass for backward. "
    "working: what else a pass makes. logits: 0 where the model is as wide as they are, which counts them among the rest. host: offloaded, "
    "beside the peak."
)
SAVED_COLOUR, WORKING_COLOUR, TIME_COLOUR = "#0072B2", "#E69F00", "#595959"
"""Blue and orange of Okabe and Ito's palette, which colour-blind readers tell apart, and a grey."""


def rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """The cells of the table, one row a run, in the order of `HEADER`."""
    for run in comparison.runs:
        yield (
            run.name,
            f"{run.final_loss:.5f}",
            "-" if run.name == PLAIN else f"{run.gradient_difference.value:.1e}",
            "yes" if run.bit_equal else "no",
            f"{run.saved_bytes / MIB:.2f}",
            f"{run.peak_bytes / MIB:.2f}",
            f"{run.tokens_per_second:,.0f}",
            f"{run.step_ratio:.2f}x",
            "?" if run.recomputed_flops is None else f"{run.recomputed_flops / 1e9:.2f}",
        )


def splits(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """The cells of the table of what each peak is made of, in MiB, in the order of `SPLIT_HEADER`."""
    for run in comparison.runs:
        yield run.name, *(f"{getattr(run.ledger, name) / MIB:.2f}" for name in SPLIT_HEADER[1:])


def title(comparison: Comparison) -> str:
    """The configuration in a line."""
    config, spec = comparison.config, comparison.config.spec
    return (
        f"{config.blocks} blocks, dim {spec.dim} / {spec.hidden_dim}, {spec.heads} heads ({spec.kv_heads} key heads), "
        f"{config.batch} x {config.length} symbols, {config.dtype}, {comparison.machine['device']}"
    )


def as_table(comparison: Comparison) -> Group:
    """The runs as a table, and the verdicts below."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    table = Table(title=title(comparison), title_justify="left", box=box.SIMPLE_HEAD)
    for name in HEADER:
        table.add_column(name, justify="left" if name == "run" else "right")
    for cells in rows(comparison):
        table.add_row(*cells)
    split = Table(title=SPLIT_TITLE, title_justify="left", box=box.SIMPLE_HEAD)
    for name in SPLIT_HEADER:
        split.add_column(name, justify="left" if name == "run" else "right")
    for cells in splits(comparison):
        split.add_row(*cells)
    verdicts = Table.grid(padding=(0, 2))
    for verdict in comparison.verdicts:
        verdicts.add_row(f"[{verdict.style}]{verdict.mark}[/]", verdict.claim, verdict.detail)
    return Group(table, split, verdicts, f"\n[dim]{LEGEND}\n{NOTE}[/]")


def as_json(comparison: Comparison) -> str:
    """Everything, for programs."""
    return json.dumps({"ok": comparison.ok, "command": command(comparison), **asdict(comparison), "note": NOTE}, indent=2)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, its first column to the left, the others to the right."""
    return [f"| {' | '.join(header)} |", f"|---{'|--:' * (len(header) - 1)}|", *(f"| {' | '.join(cells)} |" for cells in rows)]


def as_markdown(comparison: Comparison) -> str:
    """The table, the verdicts, and how to get them again."""
    machine = ", ".join(f"{name} {value}" for name, value in comparison.machine.items())
    lines = [
        f"# ckpt-ext compare: {title(comparison)}", "",
        *markdown_table(HEADER, rows(comparison)), "",
        SPLIT_TITLE, "", *markdown_table(SPLIT_HEADER, splits(comparison)), "",
        *(f"- **{verdict.mark}**: {verdict.claim}: {verdict.detail}" for verdict in comparison.verdicts), "",
        LEGEND, "", NOTE, "",
        f"Measured with {machine}. To measure again:", "",
        f"    {command(comparison)}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def command(comparison: Comparison) -> str:
    """The command line of this comparison."""
    return shlex.join(["ckpt-ext", "compare", *comparison.config.arguments()])


def draw(comparison: Comparison, path: Path) -> None:
    """Bars of each run's memory and step time. Raises RuntimeError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("memory.png must have matplotlib, which is not installed: pip install 'ckpt_ext[plot]'") from error
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    memory, speed = figure.subplots(1, 2, width_ratios=(2.4, 1), sharey=True)
    figure.suptitle(f"Activation memory and step time of one training step\n{title(comparison)}", fontsize=11)
    _draw_memory(memory, comparison.runs)
    _draw_speed(speed, comparison.runs)
    for axes in (memory, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=150)


def _draw_memory(axes: Axes, runs: list[Figures]) -> None:
    names = [run.name for run in runs]
    saved = [run.saved_bytes / MIB for run in runs]
    working = [(run.peak_bytes - run.saved_bytes) / MIB for run in runs]
    axes.barh(names, saved, color=SAVED_COLOUR, label="saved by the blocks from forward to backward")
    bars = axes.barh(names, working, left=saved, color=WORKING_COLOUR, label="on top of that at the peak")
    labels = [f"{run.peak_bytes / MIB:.3g}  ({run.saved_bytes / MIB:.2f} saved)" for run in runs]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("peak, MiB (without parameters and their finished gradients)")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=9, borderaxespad=0)


def _draw_speed(axes: Axes, runs: list[Figures]) -> None:
    bars = axes.barh([run.name for run in runs], [run.step_ratio for run in runs], color=TIME_COLOUR)
    axes.bar_label(bars, fmt="%.2f", label_type="center", color="white", fontsize=9)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"step time, {TORCH} = 1")


def write(comparison: Comparison, folder: Path) -> None:
    """All reports, into `folder`, which is made if it is not there. The picture comes last: the rest needs no matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(as_json(comparison) + "\n")
    (folder / "report.md").write_text(as_markdown(comparison))
    draw(comparison, folder / "memory.png")
