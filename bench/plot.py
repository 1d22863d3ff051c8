"""Draw what benchmarks wrote: `python -m bench.plot FOLDER` makes FOLDER/report.png of its JSON files."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS_COLOUR, OTHERS_COLOUR = "#0072B2", "#999999"
MIB = 2**20


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """Bars of each provider's time and peak, case by case, relative to the case's first provider, labelled with the figures themselves.

    Raises ImportError without matplotlib and ValueError where nothing was timed.
    """
    rows = [row for report in reports for row in report["rows"] if row.get("ms")]
    if not rows:
        raise ValueError("nothing was timed")
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(13, 1.6 + 0.22 * (len(rows) + 2 * len(cases))), layout="constrained")
    time, peak = figure.subplots(1, 2, sharey=True)
    figure.suptitle(_title(reports), fontsize=10)
    _bars(time, rows, cases, "ms", _time_label, "time, the first of each case = 1")
    _bars(peak, rows, cases, "peak_bytes", _peak_label, "peak memory, the first of each case = 1")
    time.set_yticks([place for place, _ in _places(rows, cases)], [row["provider"] for _, row in _places(rows, cases)], fontsize=7)
    time.invert_yaxis()
    figure.savefig(path, dpi=130)


def _title(reports: list[dict[str, Any]]) -> str:
    machine = reports[0]["machine"]
    where = f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, commit {machine['commit']}, {machine['date'][:10]}"
    note = next((report["note"] for report in reports if report["note"]), "")
    names = ", ".join(report["benchmark"] + ("" if report["complete"] else " (cut off)") for report in reports)
    return "\n".join(line for line in (f"{names}: {where}", note) if line)


def _places(rows: list[dict[str, Any]], cases: list[str]) -> list[tuple[float, dict[str, Any]]]:
    """Where each row stands: a case takes a line for its name, and a gap follows it."""
    order = sorted(rows, key=lambda row: cases.index(row["case"]))
    return [(place + 2 * cases.index(row["case"]) + 1, row) for place, row in enumerate(order)]


def _bars(axes: "Axes", rows: list[dict[str, Any]], cases: list[str], key: str, label, title: str) -> None:
    first: dict[str, float] = {}
    for place, row in _places(rows, cases):
        value = row.get(key) or 0
        if row["case"] not in first:
            first[row["case"]] = value
            axes.text(0, place - 1, row["case"], fontsize=8, fontweight="bold", va="center")
        share = value / first[row["case"]] if first[row["case"]] else 0
        axes.barh(place, share, height=0.8, color=OURS_COLOUR if row["ours"] else OTHERS_COLOUR)
        axes.text(share, place, f" {label(row)}", fontsize=7, va="center")
    axes.margins(x=0.25, y=0.01)
    axes.set_xlabel(title, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _time_label(row: dict[str, Any]) -> str:
    parts = [f"{row['ms']:.3g} ms"]
    parts += [f"{row[key]:.3g} {unit}" for key, unit in (("tflops", "TFLOP/s"), ("gb_per_s", "GB/s")) if key in row]
    parts += [f"{row['fraction']:.0%}"] if "fraction" in row else []
    return ", ".join(parts)


def _peak_label(row: dict[str, Any]) -> str:
    if row.get("peak_bytes") is None:
        return "not measured"
    saved = f", {row['saved_bytes'] / MIB:,.4g} saved" if row.get("saved_bytes") is not None else ""
    return f"{row['peak_bytes'] / MIB:,.4g} MiB{saved}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*.json"))]
    draw(reports, args.folder / "report.png")


if __name__ == "__main__":
    main()
