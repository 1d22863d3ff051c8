"""The subcommands `fit` and `explain`: their arguments, and what they print and write."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from rich.console import Console

    from .budget import Training

Progress = Callable[[int], AbstractContextManager[Callable[[str], None]]]
DTYPES = ("bfloat16", "float16", "float32")


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fit`."""
    add_model(parser)
    parser.add_argument("--memory", nargs="+", required=True, metavar="SIZE", help="of the device, one column each: 24GB, 80GiB")
    parser.add_argument("--batch", type=int, default=1, help="sequences, where the longest sequence is looked for")
    parser.add_argument("--length", type=int, help="tokens, where the largest batch is looked for instead")
    parser.add_argument("--train", nargs="+", default=["all", "adapters"], choices=("all", "adapters"), help="what, one table each")
    parser.add_argument("--step", type=int, default=1024, help="lengths are multiples of it, or of a sixteenth where fewer than 16 fit")
    parser.add_argument("--reserve", default="5%", help="left for the CUDA context and fragmentation: 5%%, 0.05 or a size; 5%% is a guess")
    parser.add_argument("--host-memory", metavar="SIZE", help="that may be used; no bound if not given")
    parser.add_argument("--ladder", action="store_true", help="show published lengths of Llama-8B on an H200 beside what is counted")
    _add_output(parser)


def run_fit(arguments: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Search, print, write."""
    from .budget import parse_bytes
    from .fit import METHODS, Search, fit
    from .fit_report import as_json, as_table, write
    from .ladder import ladder
    from .shapes import load

    try:
        shape, memories = load(arguments.model), [parse_bytes(size) for size in arguments.memory]
        trainings = [training_of(arguments, arguments.rank if what == "adapters" else 0) for what in dict.fromkeys(arguments.train)]
        host = None if arguments.host_memory is None else parse_bytes(arguments.host_memory)
        search = Search(arguments.batch, arguments.length, arguments.step, reserved(arguments.reserve), host)
        make(arguments.out)
    except (ValueError, NotImplementedError, OSError) as error:
        return refuse("fit", error)
    with progress(len(trainings) * len(METHODS)) as tell:
        table = fit(shape, memories, trainings, search, progress=tell)
        rungs = ladder() if arguments.ladder else []
    command = command_line()
    print(as_json(table, command, rungs)) if arguments.json else console.print(as_table(table, rungs))
    if arguments.out is not None:
        write(table, command, arguments.out, rungs)
    return 0


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Arguments of `explain`."""
    add_model(parser)
    parser.add_argument("--length", type=int, required=True, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--memory", metavar="SIZE", help="of the device: 24GB, 80GiB")
    parser.add_argument(
        "--policy", default="torch checkpoint", choices=("plain", "torch checkpoint", "input", "attention", "all"),
        help="how blocks are run: as they are, under torch.utils.checkpoint, or ours and what they save",
    )  # fmt: skip
    parser.add_argument("--offload", action="store_true", help="inputs wait in the host's memory")
    parser.add_argument("--segments", action="store_true", help="only the first block of a segment keeps its input")
    parser.add_argument("--loss", choices=("logits", "tiled"), help="whole logits, or linear_cross_entropy; chosen by policy if not given")
    parser.add_argument("--train", default="all", choices=("all", "adapters"), help="what is trained")
    _add_output(parser)


def run_explain(arguments: argparse.Namespace, console: Console) -> int:
    """Estimate, print, write. Returns 1 where a memory is given that does not do."""
    from .budget import parse_bytes
    from .explain import as_json, as_table, explain, write
    from .fit import Method
    from .shapes import load
    from .spec import Policy
    from .stock import Stock
    from .validate import positive_int

    try:
        shape, stock = load(arguments.model), arguments.policy in get_args(Stock)
        memory = None if arguments.memory is None else parse_bytes(arguments.memory)
        positive_int("length", arguments.length)
        positive_int("batch", arguments.batch)
        policy = Policy("input" if stock else arguments.policy, offload=arguments.offload)
        method = Method(
            f"{'' if stock else 'ours: '}{arguments.policy}{', segments' * arguments.segments}{', offload' * arguments.offload}",
            arguments.policy if stock else "ours", policy, arguments.segments, arguments.loss or ("logits" if stock else "tiled"),
        )  # fmt: skip
        training = training_of(arguments, arguments.rank if arguments.train == "adapters" else 0)
        explanation = explain(shape, method, training, arguments.batch, arguments.length, memory)
        make(arguments.out)
    except (ValueError, NotImplementedError, OSError) as error:
        return refuse("explain", error)
    command = command_line()
    print(as_json(explanation, command)) if arguments.json else console.print(as_table(explanation))
    if arguments.out is not None:
        write(explanation, command, arguments.out)
    return 0 if memory is None or explanation.now.peak <= memory else 1


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The model and how it is trained."""
    from .budget import Optimizer
    from .shapes import SHAPES

    help = f"a directory with a Hugging Face config.json, or one of {', '.join(sorted(SHAPES))}"
    parser.add_argument("model", nargs="?" if optional else None, help=help)
    parser.add_argument("--optimizer", default="adamw", choices=get_args(Optimizer), help="whose state is held")
    parser.add_argument("--rank", type=int, default=16, help="of adapters")
    parser.add_argument("--shards", type=int, default=1, help="devices that parameters, gradients and optimizer state are divided among")
    parser.add_argument("--offload-weights", action="store_true", help="parameters wait in the host's memory")
    parser.add_argument("--accumulate", action="store_true", help="a step has several backward passes")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of parameters, gradients and activations")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for report.json and report.md")


def training_of(arguments: argparse.Namespace, rank: int) -> Training:
    """How the arguments of `add_model` say that the model is trained."""
    import torch

    from .budget import Training

    dtype = getattr(torch, arguments.dtype)
    return Training(arguments.optimizer, rank, arguments.shards, arguments.offload_weights, arguments.accumulate, dtype)


def reserved(text: str) -> float | int:
    """A share of the memory, "5%" or "0.05", or a size in bytes."""
    from .budget import parse_bytes

    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return parse_bytes(text)
    return share if share < 1 else int(share)


def make(folder: Path | None) -> None:
    """Make the folder for reports."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)  # said now, not after the work


def command_line() -> str:
    """As it was typed, the folder for reports left out."""
    words = sys.argv[1:]
    if "--out" in words:
        place = words.index("--out")
        words = words[:place] + words[place + 2 :]
    return shlex.join(["ckpt-ext", *words])


def refuse(command: str, error: Exception) -> int:
    """Say in one line what is wrong with the arguments."""
    print(f"ckpt-ext {command}: {error}", file=sys.stderr)
    return 2
