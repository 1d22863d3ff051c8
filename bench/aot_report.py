"""The table of `bench.aot` as text, JSON and Markdown."""

import contextlib
import json
import platform
from importlib import metadata
from pathlib import Path

import torch
import triton

from bench.roofline import CARDS

COLUMNS = {
    "call": lambda row: row["call"],
    "kernel": lambda row: row["kernel"],
    "tile": lambda row: "x".join(str(size) for size in row["tile"][:3] if size),
    "warps": lambda row: str(row["warps"]),
    "stages": lambda row: str(row["tile"][3] or ""),
    "registers": lambda row: str(row["registers"]),
    "spill": lambda row: str(row["spill"]),
    "local": lambda row: str(row["local"]),
    "shared": lambda row: str(row["shared"]),
    "matrix": lambda row: str(row["matrix"]),
    "wide loads": lambda row: f"{row['wide_loads']}/{row['loads']}",
    "wide stores": lambda row: f"{row['wide_stores']}/{row['stores']}",
    "resident": lambda row: f"{row['programs']} ({row['resident_warps']} warps)",
    "limit": lambda row: row["limit"],
    "bound": lambda row: f"{row['bound_us']:.1f} us, {row['bound_by']}",
    "fit": lambda row: "; ".join(row["faults"]),
}
_WIDTHS = dict(zip(COLUMNS, (31, 29, 11, 5, 6, 9, 6, 6, 7, 6, 10, 11, 14, 13, 22, 0), strict=True))
HEADER = f"{'arch':<7} " + " ".join(f"{name:<{width}}" for name, width in _WIDTHS.items())

_LEGEND = """Nothing here was measured on a GPU. Registers and bytes spilled (stack) are a thread's, shared memory (bytes) a program's.
`local` counts instructions on the stack, `matrix` those on matrix units, `wide` those of 16 bytes a thread of all that go to or from
memory; each stands in the machine code once, however often it runs. `resident` is how many programs, and warps, a multiprocessor holds at
once, `limit` what keeps it from more. `bound` is the least time that the datasheet of the named card allows this launch: each tensor moved
once at peak bandwidth, or the operations of the matrix products at peak rate, whichever takes longer. It is computed, and no kernel
reaches it; arithmetic outside of matrix products is left out.
"""


def line(row: dict) -> str:
    """A row as one line of text."""
    return f"{row['arch']:<7} " + " ".join(f"{show(row):<{_WIDTHS[name]}}" for name, show in COLUMNS.items()).rstrip()


def write(folder: Path, table: list[dict], command: str) -> None:
    """Write `report.json` and `report.md` to `folder`."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["liger-kernel"] = metadata.version("liger-kernel")
    folder.mkdir(parents=True, exist_ok=True)
    head = {"command": command, "versions": versions, "columns": list(table[0]) if table else []}
    rows = ",\n".join(json.dumps(list(row.values())) for row in table)  # a line a row, so that a difference can be read
    (folder / "report.json").write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n]}}\n')
    (folder / "report.md").write_text(_markdown(table, command, versions))


def _markdown(table: list[dict], command: str, versions: dict[str, str]) -> str:
    parts = ["# Kernels compiled ahead of time\n", f"`{command}`, " + ", ".join(f"{name} {version}" for name, version in versions.items())]
    parts += ["", _LEGEND]
    for arch, card in CARDS.items():
        rows = [row for row in table if row["arch"] == arch]
        if not rows:
            continue
        ours = [row for row in rows if row["ours"]]
        unfit = sum(bool(row["faults"]) for row in ours)
        parts += [f"## {arch} ({card.name})", "", f"{len(ours)} binaries of ours, {unfit} unfit.", ""]
        parts += ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
        parts += ["| " + " | ".join(show(row) for show in COLUMNS.values()) + " |" for row in rows]
        parts += [""]
    return "\n".join(parts)
