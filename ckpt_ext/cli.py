"""The command `ckpt-ext`. Each subcommand is a row of `COMMANDS`; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import fit_cli, plan_cli, verify_cli

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 140
"""Columns where output goes to a file or a pipe, which have no width of their own."""


class Command(NamedTuple):
    """A subcommand: what it takes, and what it does with that. `run` returns the exit code: 0 well, 1 not, 2 for bad arguments."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` names and return its exit code. Raises SystemExit for --help, --version and bad usage."""
    parser = argparse.ArgumentParser(prog="ckpt-ext", description="Recompute engine for training transformers: tools and checks.")
    parser.add_argument("--version", action="version", version=f"ckpt-ext {_version()}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=command.summary, description=command.summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def _version() -> str:
    try:
        return metadata.version("ckpt_ext")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "not installed"


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def _refuse(command: str, error: Exception) -> int:
    """Says in one line what is wrong with the arguments."""
    print(f"ckpt-ext {command}: {error}", file=sys.stderr)
    return 2


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each new phase, `total` times after the first: a bar on a terminal, else a line a name."""
    console = _console(stderr=True)
    if not console.is_terminal:
        shown: list[str] = []

        def tell(phase: str) -> None:
            if shown[-1:] != [phase]:
                shown.append(phase)
                print(f"{phase} ...", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        started: list[str] = []

        def advance(phase: str) -> None:
            bar.update(task, description=phase, advance=1 if started else 0)
            started.append(phase)

        yield advance


def _add_compare(parser: argparse.ArgumentParser) -> None:
    from .compare_config import Config

    for field in dataclasses.fields(Config):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default,
            choices=field.metadata["choices"], help=field.metadata["help"],
        )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for report.json, report.md and memory.png")


def _run_compare(arguments: argparse.Namespace) -> int:
    from .compare import compare, phases, windows
    from .compare_config import Config
    from .compare_report import as_table, write

    try:
        config = Config(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Config)})
        batches = windows(config)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)  # said now, not after the training
    except (ValueError, RuntimeError, OSError) as error:
        return _refuse("compare", error)
    with _progress(phases(config)) as progress:
        comparison = compare(config, batches, progress)
    _console().print(as_table(comparison))
    if arguments.out is not None:
        write(comparison, arguments.out)
    return 0 if comparison.ok else 1


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")


def _run_doctor(arguments: argparse.Namespace) -> int:
    from . import doctor

    checks = doctor.examine()
    healthy = doctor.healthy(checks)
    if arguments.json:
        print(json.dumps({"healthy": healthy, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
        return 0 if healthy else 1
    from rich import box
    from rich.table import Table

    table = Table("", "what", "found", box=box.SIMPLE_HEAD)
    for check in checks:
        bad = "[bold red]MISSING[/]" if check.required else "[yellow]no[/]"
        table.add_row({True: "[green]ok[/]", None: "-", False: bad}[check.ok], check.name, check.detail)
    _console().print(table)
    return 0 if healthy else 1


def _run_fit(arguments: argparse.Namespace) -> int:
    return fit_cli.run_fit(arguments, _console(), _progress)


def _run_explain(arguments: argparse.Namespace) -> int:
    return fit_cli.run_explain(arguments, _console())


def _run_plan(arguments: argparse.Namespace) -> int:
    return plan_cli.run_plan(arguments, _console())


def _run_verify(arguments: argparse.Namespace) -> int:
    return verify_cli.run_verify(arguments, _console(), _progress)


COMMANDS = {
    "compare": Command("train with and without checkpointing, side by side, and say what differs", _add_compare, _run_compare),
    "verify": Command("prove on a model that recomputing its blocks changes no gradient", verify_cli.add_verify, _run_verify),
    "fit": Command("say which sequence length or batch fits a device's memory, and how", fit_cli.add_fit, _run_fit),
    "explain": Command("say where a training step's memory goes and what would help", fit_cli.add_explain, _run_explain),
    "plan": Command("say what each block should keep to fit a budget in the least time", plan_cli.add_plan, _run_plan),
    "doctor": Command("say what of ckpt_ext works on this machine", _add_doctor, _run_doctor),
}
