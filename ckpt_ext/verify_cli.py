"""The subcommand `verify`: its arguments, and what it prints and writes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from .fit_cli import Progress, command_line, make, refuse
from .spec import BackendName, Policy, Save

if TYPE_CHECKING:
    from rich.console import Console

PHASES = 4


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Arguments of `verify`."""
    from .verify_models import names

    parser.add_argument(
        "model",
        help="a Hugging Face directory (config.json, with weights or without), a module:function that returns a model and a batch, "
        f"or one of {', '.join(names())}",
    )
    parser.add_argument("--save", default="input", choices=get_args(Save), help="what swapped blocks keep")
    parser.add_argument("--slices", default="auto", help="of a block's backward: a number or auto")
    parser.add_argument("--offload", action="store_true", help="inputs wait in the host's memory")
    parser.add_argument("--segments", help="in which only the first layer keeps its input: a number or auto; none if not given")
    parser.add_argument("--backend", default="auto", choices=get_args(BackendName), help="what swapped blocks run on")
    parser.add_argument("--fallback", default="checkpoint", choices=("checkpoint", "none"), help="how layers run that are refused")
    parser.add_argument("--truth", default="float64", choices=("float64", "float32", "original"), help="what errors are measured against")
    parser.add_argument("--batch", type=int, default=2, help="sequences or images")
    parser.add_argument("--length", type=int, default=48, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, help="as many as are used of the model's")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64"), help="of the model")
    parser.add_argument("--device", default="cpu", help="where it runs: cpu or cuda")
    parser.add_argument("--seed", type=int, default=0, help="of weights that are drawn, the text and dropout")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for report.json and report.md")


def run_verify(arguments: argparse.Namespace, console: Console, progress: Progress) -> int:
    """Verify, print, write. Returns 1 where something is not as it must be."""
    import torch
    from torch.utils._pytree import tree_map

    from .validate import positive_int
    from .verification import verify
    from .verify_models import load
    from .verify_report import as_json, as_table, write

    try:
        policy = Policy(arguments.save, slices=_number("slices", arguments.slices), offload=arguments.offload)
        segments = None if arguments.segments is None else _number("segments", arguments.segments)
        positive_int("batch", arguments.batch)
        positive_int("length", arguments.length)
        if arguments.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device must be there, got {arguments.device} and a PyTorch without a GPU that it can use")
        make(arguments.out)
        model, batch = load(
            arguments.model, batch=arguments.batch, length=arguments.length, layers=arguments.layers,
            dtype=getattr(torch, arguments.dtype), seed=arguments.seed,
        )  # fmt: skip
        batch = tree_map(lambda leaf: leaf.to(arguments.device) if isinstance(leaf, torch.Tensor) else leaf, batch)
        with progress(PHASES) as tell:
            found = verify(
                model.to(arguments.device), batch, policy, backend=arguments.backend, fallback=arguments.fallback, truth=arguments.truth,
                segments=segments, progress=tell,
            )  # fmt: skip
    except (ValueError, NotImplementedError, OSError, RuntimeError) as error:
        return refuse("verify", error)
    command = command_line()
    print(as_json(found, command)) if arguments.json else console.print(as_table(found))
    if arguments.out is not None:
        write(found, command, arguments.out)
    return 0 if found.ok else 1


def _number(name: str, text: str) -> int | Literal["auto"]:
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"{name} must be a number or auto, got {text}")
    return "auto" if text == "auto" else int(text)
