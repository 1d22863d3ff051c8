"""What a table of what fits looks like: for the terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .budget import Training, format_bytes
from .fit import Fit, Table
from .ladder import MEMORY, Rung

if TYPE_CHECKING:
    from rich.console import Group

NOTE = (
    "Counted from tensors without data, at the very size that is shown; nothing has been run. Attention holds no scores and no mask, of "
    "blocks that are not ours either. What nothing is counted for is in the reserve, a guess: the CUDA context, fragmentation, scratch "
    "memory of libraries."
)


def describe(training: Training) -> str:
    """A kind of training in a few words."""
    what = f"adapters of rank {training.rank} on all linear layers" if training.rank else "all weights trained"
    more = [f"{training.optimizer} optimizer", str(training.dtype).removeprefix("torch.")]
    more += [f"{training.shards} shards"] * (training.shards > 1) + ["weights in the host's memory"] * training.offload_weights
    more += ["gradients accumulated"] * training.accumulate
    return ", ".join((what, *more))


def cell(found: Fit) -> str:
    """What fits, and the host's memory that it needs; a dash where nothing does."""
    if not found.found:
        return "-"
    assert found.estimate is not None
    host = found.estimate.host
    return f"{found.found:,}" + (f" (+{format_bytes(host)} of host)" if host else "")


def rows(table: Table, training: Training) -> Iterator[tuple[str, list[Fit]]]:
    """Each method with its cells, one a memory."""
    cells = [found for found in table.cells if found.training == training]
    for method in dict.fromkeys(found.method for found in cells):
        yield method, [found for found in cells if found.method == method]


def trainings(table: Table) -> list[Training]:
    """The kinds of training in the table."""
    return list(dict.fromkeys(found.training for found in table.cells))


def limits(table: Table, training: Training) -> list[str]:
    """Why nothing fits where nothing does, a line for each memory and cause."""
    lines: dict[str, list[str]] = {}
    for method, cells in rows(table, training):
        for found in cells:
            if found.found or found.estimate is None:
                continue
            parts, usable = found.estimate.parts, table.search.usable(found.memory)
            fixed = sum(parts[part] for part in ("parameters", "optimizer state", "gradients"))
            least = f"the least that was tried takes {format_bytes(found.estimate.peak)} ({found.estimate.moment})"
            if fixed > usable:
                least = f"parameters, gradients and optimizer state alone take {format_bytes(fixed)}"
            elif table.search.host_memory is not None and found.estimate.host > table.search.host_memory:
                least = f"the least that was tried takes {format_bytes(found.estimate.host)} of the host's memory"
            lines.setdefault(f"{format_bytes(found.memory)}: {least}", []).append(method)
    every = len(list(rows(table, training)))
    return [line if len(methods) == every else f"{line}: {', '.join(methods)}" for line, methods in lines.items()]


def heading(table: Table) -> str:
    """What the figures are."""
    search = table.search
    reserve = f"{search.reserve:.0%}" if search.reserve < 1 else format_bytes(int(search.reserve))
    if search.length:
        what = f"largest batch of {search.length:,} tokens"
    else:
        fine = max(1, search.step // 16)
        what = f"longest sequence at batch {search.batch}, in tokens, a multiple of {search.step} (of {fine} where short)"
    limit = "" if search.host_memory is None else f", {format_bytes(search.host_memory)} of host memory"
    shape = table.shape
    return f"{shape.name} ({shape.parameters / 1e9:.2f}e9 parameters, {len(shape.layers)} layers): {what}; {reserve} reserved{limit}"


def memories(table: Table) -> list[int]:
    """The sizes of the columns."""
    return list(dict.fromkeys(found.memory for found in table.cells))


def as_table(table: Table, rungs: Sequence[Rung] = ()) -> Group:
    """For a terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable

    parts: list[Any] = [heading(table)]
    for training in trainings(table):
        shown = RichTable(title=describe(training), title_justify="left", box=box.SIMPLE_HEAD)
        shown.add_column("")
        for memory in memories(table):
            shown.add_column(format_bytes(memory), justify="right")
        for method, cells in rows(table, training):
            shown.add_row(method, *map(cell, cells))
        parts += [shown, *(f"nothing fits in {line}" for line in limits(table, training))]
    parts += [f"\n[dim]{NOTE}[/]", *ladder_lines(rungs)]
    return Group(*parts)


def as_markdown(table: Table, command: str, rungs: Sequence[Rung] = ()) -> str:
    """For a file."""
    lines = [f"# What fits: {table.shape.name}", "", heading(table) + ".", "", f"`{command}`", ""]
    for training in trainings(table):
        lines += [f"## {describe(training)}", "", "| | " + " | ".join(map(format_bytes, memories(table))) + " |"]
        lines.append("|---|" + "--:|" * len(memories(table)))
        lines += [f"| {method} | " + " | ".join(map(cell, cells)) + " |" for method, cells in rows(table, training)]
        lines += ["", *(f"- nothing fits in {line}" for line in limits(table, training)), ""]
    return "\n".join([*lines, NOTE, "", *ladder_lines(rungs)]) + "\n"


def ladder_lines(rungs: Sequence[Rung]) -> list[str]:
    """The published runs beside ours, a line each."""
    if not rungs:
        return []
    lines = [f"\nPublished for Llama-8B on one H200 (arXiv:2506.13996), beside the count for {MEMORY // 2**30} GiB without a reserve:"]
    for rung in rungs:
        published = f"published {rung.published:,} tokens at {rung.published_gib} GiB" if rung.published else "nothing published"
        counted = "not counted" if rung.found is None else f"counted {rung.found:,} tokens, {rung.counted_gib:.1f} GiB at that length"
        lines.append(f"- {rung.name}: {published}; {counted if rung.published else f'counted {rung.found:,} tokens'}")
    return lines


def as_json(table: Table, command: str, rungs: Sequence[Rung] = ()) -> str:
    """All figures; bytes and tokens."""
    return json.dumps({
        "command": command, "model": table.shape.name, "parameters": table.shape.parameters, "search": asdict(table.search), "note": NOTE,
        "cells": [
            {
                "method": found.method, "training": {**asdict(found.training), "dtype": str(found.training.dtype)}, "memory": found.memory,
                "found": found.found, "estimate": None if found.estimate is None else found.estimate._asdict(),
            } for found in table.cells
        ],
        "ladder": [rung._asdict() for rung in rungs],
    }, indent=2)  # fmt: skip


def write(table: Table, command: str, folder: Path, rungs: Sequence[Rung] = ()) -> None:
    """`report.json` and `report.md`, into `folder`, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(as_json(table, command, rungs) + "\n")
    (folder / "report.md").write_text(as_markdown(table, command, rungs))
