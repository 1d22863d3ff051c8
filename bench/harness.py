"""Runs what several providers make of one case, side by side: checks each against the truth, then times the right ones in turns.

A benchmark is a list of cases, most important first, handed to `main`. A provider prepares its inputs for a shape and returns its `Work`.
First it runs at the case's check shape, where its error against a truth in float64 decides whether it is timed at all; then at the full
shape, where its results must agree with the first right provider's. Every run builds its forward pass anew and leaves no `.grad`.
Results are written after each case, so that a run that is cut off leaves what it has measured.
"""

import argparse
import gc
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.clock import Work, ceilings, clock_for, header, rehearse
from bench.plot import draw
from ckpt_ext.memory import saved_bytes
from ckpt_ext.testing import assert_accurate

CPU_NOTE = "CPU (or interpreter): proves that the benchmark runs; not a GPU speed"
RUNS = {"cuda": (3, 50), "cpu": (2, 3)}
"""The fewest and the most timed runs of a provider."""
CASE_SECONDS = 2.0
"""What the timed runs of a case should take together."""
AGREEMENT = {torch.bfloat16: 1e-1, torch.float16: 3e-2, torch.float32: 1e-3, torch.float64: 1e-9}
"""How far results at the full shape may be from the first right provider's, in norm: well above rounding, well below a mistake."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to compute a case: `prepare(shape)`, or the reason why there is none here. `ours` is held to twice eager's error."""

    prepare: Callable[[Any], Work] | None
    absent: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to compute. `truth` and `eager` give the results by name at `check_shape`, in float64 and in the case's dtype."""

    name: str
    shape: Any
    check_shape: Any
    truth: Callable[[Any], dict[str, Tensor]]
    eager: Callable[[Any], dict[str, Tensor]]
    providers: dict[str, Provider]
    tolerance: float
    """What others may be wrong by, relative to the largest element: their rounding is theirs to choose."""
    terms: int = 1
    """Length of the longest sum, for the rounding that ours are allowed."""
    flops: float = 0.0
    """Floating-point operations that the result asks for, without any that a provider repeats; 0 where memory is the bound."""
    bytes: float = 0.0
    """Bytes that must be read and written; 0 where arithmetic is the bound."""
    tokens: int = 0
    checked: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda results: results
    """What of a run's results can be compared; by default all."""


class Budget:
    """Seconds to spend, from now on."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


def measure(case: Case, device: torch.device, budget: Budget) -> list[dict[str, Any]]:
    """A row for each provider of the case, timed or with the reason why not."""
    shared = {"case": case.name, "dtype": str(getattr(case.shape, "dtype", "")).removeprefix("torch.")}
    rows = {name: {**shared, "provider": name, "ours": provider.ours} for name, provider in case.providers.items()}
    timer = clock_for(device)
    works, estimate = _admit(case, rows, device, timer, budget)
    fewest, most = RUNS[device.type]
    rounds = max(fewest, min(most, int(min(CASE_SECONDS, budget.left) / estimate))) if works else 0
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds):
        for name in _rotated(list(works), turn):
            if rows[name]["status"] == "ok" and not _attempt(rows[name], lambda name=name: seconds[name].append(timer(works[name]))):
                seconds[name].clear()
    for name, samples in seconds.items():
        if samples:
            rows[name] |= _times(case, samples)
    works.clear()
    _collect(device)
    return list(rows.values())


def _admit(
    case: Case, rows: dict[str, dict[str, Any]], device: torch.device, timer: Callable[[Work], float], budget: Budget
) -> tuple[dict[str, Work], float]:
    """What the providers that are right have prepared for the full shape, warm, and how long a run of each takes in sum."""
    works: dict[str, Work] = {}
    expected: dict[str, Tensor] = {}
    estimates: dict[str, float] = {}

    def enter(name: str, row: dict[str, Any]) -> None:
        _check(row, case, case.providers[name], truth, eager)
        work = _warm_up(case, name, expected)
        row["peak_bytes"], estimates[name] = rehearse(work, device, timer)
        row |= _saved(work)
        works[name] = work

    truth, eager = (case.checked(make(case.check_shape)) for make in (case.truth, case.eager))
    for name, provider in case.providers.items():
        row = rows[name]
        if provider.prepare is None:
            row |= {"status": "absent", "detail": provider.absent}
        elif budget.left <= 0:
            row |= {"status": "not run", "detail": "the budget was spent"}
        else:
            _attempt(row, lambda name=name, row=row: enter(name, row))
    return works, sum(estimates[name] for name in works)


def _rotated(names: list[str], turn: int) -> list[str]:
    first = turn % len(names)
    return names[first:] + names[:first]


def _attempt(row: dict[str, Any], step: Callable[[], Any]) -> bool:
    """Carry out a step of a provider, whose own mistakes must not end the benchmark: they go into its row."""
    try:
        step()
    except torch.OutOfMemoryError:
        row |= {"status": "out of memory", "detail": ""}
    except AssertionError as error:
        row |= {"status": "wrong", "detail": str(error)}
    except Exception as error:  # what a competitor may raise is not ours to know
        row |= {"status": "failed", "detail": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:300]}
    else:
        row.setdefault("status", "ok")
        return True
    # The frames of the exception are gone only now, and with them what they held.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False


def _check(row: dict[str, Any], case: Case, provider: Provider, truth: dict[str, Tensor], eager: dict[str, Tensor]) -> None:
    """Raises AssertionError where a result at the check shape is wrong; notes the largest relative error."""
    assert provider.prepare is not None
    work = provider.prepare(case.check_shape)
    results = case.checked(work.run(work.before()))
    assert results.keys() == truth.keys(), f"results must be {', '.join(truth)}, got {', '.join(results)}"
    row["error"] = 0.0
    for name, exact in truth.items():
        assert results[name].shape == exact.shape, f"{name}: shape {tuple(results[name].shape)}, expected {tuple(exact.shape)}"
        error = ((results[name].double() - exact).abs().max() / exact.abs().max().clamp_min(1e-300)).item()
        row["error"] = max(error, row["error"])  # NaN stays, as the first argument
        if provider.ours:
            try:
                assert_accurate(results[name], eager[name], exact, terms=case.terms)
            except AssertionError as refusal:
                raise AssertionError(f"{name}: {refusal}") from None
        else:
            assert error <= case.tolerance, f"{name}: relative error {error:.3g} > {case.tolerance:.3g}"


def _warm_up(case: Case, name: str, expected: dict[str, Tensor]) -> Work:
    """Prepare the full shape and compare a run's results with the first provider's, which are kept in `expected`."""
    prepare = case.providers[name].prepare
    assert prepare is not None
    work = prepare(case.shape)
    results = case.checked(work.run(work.before()))
    if not expected:
        assert all(result.isfinite().all() for result in results.values()), "results at the full shape must be finite"
        expected |= results
    for key, result in results.items():
        reference = expected[key].float()
        distance = ((result.float() - reference).norm() / reference.norm().clamp_min(1e-30)).item()
        allowed = max(AGREEMENT[result.dtype], case.tolerance if result.dim() == 0 else 0)
        assert distance <= allowed, f"{key}: at the full shape {distance:.3g} away from the first provider, allowed {allowed:.3g}"
    return work


def _saved(work: Work) -> dict[str, Any]:
    if work.forward is None:
        return {}
    try:
        return {"saved_bytes": saved_bytes(work.forward, work.ignored)}
    except RuntimeError as error:  # compiled code may refuse the hooks that count; it can be timed all the same
        return {"detail": f"saved bytes not counted: {error}"[:300]}


def _times(case: Case, seconds: list[float]) -> dict[str, Any]:
    middle = statistics.median(seconds)
    low, *_, high = statistics.quantiles(seconds, n=5, method="inclusive")
    row: dict[str, Any] = {"ms": middle * 1e3, "p20_ms": low * 1e3, "p80_ms": high * 1e3, "runs": len(seconds)}
    if case.flops:
        row["tflops"] = case.flops / middle / 1e12
    if case.bytes:
        row["gb_per_s"] = case.bytes / middle / 1e9
    if case.tokens:
        row["tokens_per_s"] = case.tokens / middle
    return row


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def with_fractions(rows: list[dict[str, Any]], ceiling: dict[str, float]) -> list[dict[str, Any]]:
    """The rows with `fraction`: of the matrix product's rate where a row has one, else of the copy's."""
    for row in rows:
        for rate in ("tflops", "gb_per_s"):
            if rate in row and ceiling.get(rate):
                row.setdefault("fraction", row[rate] / ceiling[rate])
    return rows


def run(name: str, cases: Sequence[Case], device: torch.device, budget: Budget, out: Path) -> dict[str, Any]:
    """Measure the cases in order until the budget is spent; `out/name.json` is written anew after each. Returns what is in it."""
    report: dict[str, Any] = {
        "benchmark": name,
        "note": CPU_NOTE if device.type == "cpu" else "",
        "machine": header(device),
        "ceilings": ceilings(device),
        "complete": False,
        "rows": [],
    }
    _write(report, out)
    for case in cases:
        if budget.left <= 0:
            print(f"{case.name} and what follows: not run, the budget was spent", flush=True)
            return report
        start = time.monotonic()
        rows: list[dict[str, Any]] = []
        failure = {"case": case.name, "provider": "the case itself", "ours": True}
        if not _attempt(failure, lambda case=case, rows=rows: rows.extend(measure(case, device, budget))):
            rows = [failure]
        report["rows"] += with_fractions(rows, report["ceilings"])
        _write(report, out)
        show(rows, f"{case.name} {rows[0].get('dtype', '') if rows else ''}   ({time.monotonic() - start:.0f} s)")
    report["complete"] = True
    _write(report, out)
    return report


def _write(report: dict[str, Any], out: Path) -> None:
    """All or nothing: a kill in the middle leaves the file of before."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{report['benchmark']}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)


HEADER = ("provider", "ms", "p20", "p80", "TFLOP/s", "GB/s", "of ceiling", "tokens/s", "peak MiB", "saved MiB", "error")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table, in the order of `HEADER`; the reason instead of times where it was not timed."""
    if row["status"] != "ok":
        return row["provider"], f"{row['status']}: {row['detail']}".removesuffix(": ")

    def shown(key: str, form: str, unit: float = 1) -> str:
        return format(row[key] / unit, form) if row.get(key) is not None else "-"

    return (
        row["provider"], shown("ms", ".3f"), shown("p20_ms", ".3f"), shown("p80_ms", ".3f"), shown("tflops", ".1f"),
        shown("gb_per_s", ".0f"), shown("fraction", ".0%"), shown("tokens_per_s", ",.0f"), shown("peak_bytes", ",.1f", 2**20),
        shown("saved_bytes", ",.1f", 2**20), shown("error", ".1e"),
    )  # fmt: skip


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The rows on the terminal, by rich where it is installed."""
    lines = [cells(row) for row in rows]
    others = [line for line in lines if len(line) == 2]
    columns = zip(*(line for line in (HEADER, *lines) if len(line) > 2), strict=True)
    table = list(zip(*(column for column in columns if set(column[1:]) != {"-"}), strict=True))
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}")
        for line in table:
            print(f"{line[0]:<24}", *(f"{cell:>11}" for cell in line[1:]), flush=True)
    else:
        pretty = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for name in table[0]:
            pretty.add_column(name, justify="left" if name == "provider" else "right", no_wrap=True)
        for line in table[1:]:
            pretty.add_row(*line)
        console = Console()
        console.width = max(console.width, 140)
        console.print(pretty)
    for provider, reason in others:
        print(f"{provider:<24} {reason}", flush=True)


def main(
    name: str, summary: str, cases: Callable[[argparse.Namespace], Sequence[Case]], argv: Sequence[str] | None = None, **options: Any
) -> int:
    """The command line of a benchmark. `options` are further arguments, by name, with their `add_argument` keywords.

    The exit code is 1 where one of ours was wrong or failed.
    """
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="tiny shapes, as always on a CPU")
    parser.add_argument("--budget", type=float, default=600.0, metavar="SECONDS", help="begin no case after this time")
    parser.add_argument("--match", default="", help="only the cases whose name has this regular expression")
    parser.add_argument("--out", type=Path, default=Path("bench/results/latest"), metavar="FOLDER")
    parser.add_argument("--no-plot", action="store_true", help="leave the picture to `python -m bench.plot`")
    for option, keywords in options.items():
        parser.add_argument(f"--{option}", **keywords)
    args = parser.parse_args(argv)
    args.device = torch.device(args.device)
    args.small |= args.device.type == "cpu"
    args.dtype = torch.float32 if args.device.type == "cpu" else torch.bfloat16
    budget = Budget(args.budget)
    if args.device.type == "cpu":
        torch.set_num_threads(1)  # a second one has nothing to do in tiny shapes
        print(CPU_NOTE, flush=True)
    chosen = [case for case in cases(args) if re.search(args.match, case.name)]
    report = run(name, chosen, args.device, budget, args.out)
    print(f"{args.out / name}.json", ", ".join(f"{key} {value}" for key, value in report["machine"].items()), sep="\n")
    if not args.no_plot:
        draw_or_say_why([report], args.out / f"{name}.png")
    return int(any(row["ours"] and row["status"] in ("wrong", "failed", "out of memory") for row in report["rows"]))


def draw_or_say_why(reports: list[dict[str, Any]], path: Path) -> None:
    """The picture, where matplotlib is installed and there is something to draw."""
    try:
        draw(reports, path)
    except (ImportError, ValueError) as error:
        print(f"no {path.name}: {error}")
