"""What a verification looks like: a table sorted by the worst, and `report.json` and `report.md` for a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .verification import FACTOR, Entry, Verification

if TYPE_CHECKING:
    from rich.console import Group

HEADER = ("tensor", "error", "original's error", "allowed", "share", "cosine", "")
LEGEND = (
    "error: largest difference from the truth, relative to the largest element of the gradients of the same module. allowed: "
    f"{FACTOR} x the original's error and the rounding of a sum over the tokens. share: error over allowed. cosine: of the angle to the "
    "truth."
)


def rows(verification: Verification, most: int | None = None) -> Iterator[tuple[str, ...]]:
    """The cells of the table, the worst first, in the order of `HEADER`."""
    for entry in verification.tensors[:most]:
        yield (
            entry.name, _small(entry.error), _small(entry.original_error), _small(entry.allowed), f"{entry.share:.2f}", _cosine(entry),
            "ok" if entry.ok else "WRONG",
        )  # fmt: skip


def _small(value: float) -> str:
    return "missing" if math.isinf(value) else f"{value:.1e}"


def _cosine(entry: Entry) -> str:
    return "-" if math.isnan(entry.cosine) else f"{entry.cosine:.9f}"


def as_table(verification: Verification, most: int | None = 12) -> Group:
    """For a terminal: the `most` worst tensors, and the verdicts."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in HEADER:
        table.add_column(name, justify="left" if name in ("tensor", "") else "right")
    for cells in rows(verification, most):
        table.add_row(*cells, style="bold red" if cells[-1] == "WRONG" else None)
    left = len(verification.tensors) - len(table.rows)
    verdicts = Table.grid(padding=(0, 2))
    for verdict in verification.verdicts:
        verdicts.add_row(f"[{verdict.style}]{verdict.mark}[/]", verdict.claim, verdict.detail)
    return Group(table, f"[dim]and {left} more, each at a smaller share[/]\n" if left > 0 else "", verdicts, f"\n[dim]{LEGEND}[/]")


def as_text(verification: Verification, width: int = 140) -> str:
    """The table without colours."""
    from rich.console import Console

    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(as_table(verification))
    return capture.get()


def as_json(verification: Verification, command: str) -> str:
    """Everything, for programs; errors that are infinite, of gradients missing on one side, are null."""
    tensors = [{**asdict(entry), "share": entry.share, "ok": entry.ok} for entry in verification.tensors]
    found = {
        "ok": verification.ok, "command": command, "policy": asdict(verification.policy), "swapped": verification.swap.swapped,
        "refused": verification.swap.refused, "verdicts": [asdict(verdict) for verdict in verification.verdicts], "tensors": tensors,
        "original_memory": _memory(verification.original_memory), "memory": _memory(verification.memory),
    }  # fmt: skip
    return json.dumps(_finite(found), indent=2, allow_nan=False)


def _memory(memory: object) -> object:
    return None if memory is None else asdict(memory)  # type: ignore[call-overload]


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_markdown(verification: Verification, command: str) -> str:
    """For a file: all tensors."""
    lines = ["# ckpt-ext verify", "", f"`{command}`", ""]
    lines += [f"- **{verdict.mark}**: {verdict.claim}: {verdict.detail}" for verdict in verification.verdicts]
    lines += ["", f"| {' | '.join(HEADER)} |", f"|---{'|--:' * (len(HEADER) - 2)}|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows(verification)]
    return "\n".join([*lines, "", LEGEND]) + "\n"


def write(verification: Verification, command: str, folder: Path) -> None:
    """Both reports, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(as_json(verification, command) + "\n")
    (folder / "report.md").write_text(as_markdown(verification, command))
