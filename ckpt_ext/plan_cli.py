"""The subcommand `plan`: its arguments, and what it prints and writes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .fit_cli import add_model, command_line, make, refuse, reserved, training_of

if TYPE_CHECKING:
    from rich.console import Console

    from .cost_chain import CostChain

_FRONTIER_POINTS = 400


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Arguments of `plan`."""
    from .costs import Rates

    add_model(parser, optional=True)
    parser.add_argument("--budget", required=True, metavar="SIZE", help="memory of the device: 24GB, 80GiB")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--train", default="all", choices=("all", "adapters"), help="what is trained")
    parser.add_argument("--reserve", default="5%", help="of the budget, left for the CUDA context and fragmentation: 5%%, 0.05 or a size")
    parser.add_argument("--flops", type=float, default=Rates().flops, help="FLOP/s that times are made of: an assumption")
    parser.add_argument("--bandwidth", type=float, default=Rates().host, help="bytes/s between device and host, each way: an assumption")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="costs.json of another run, in place of a model; may hold measured ones")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for plan.json, costs.json, report.md and frontier.png")


def run_plan(arguments: argparse.Namespace, console: Console) -> int:
    """Count, solve, print, write. Returns 1 where nothing fits."""
    from .budget import format_bytes, parse_bytes
    from .plan import frontier, least_budget, solve
    from .plan_report import Planned, as_table, write

    try:
        budget, reserve = parse_bytes(arguments.budget), reserved(arguments.reserve)
        usable = int(budget * (1 - reserve)) if reserve < 1 else budget - int(reserve)
        if usable <= 0:
            raise ValueError(f"reserve must be less than the budget, got {arguments.reserve}")
        title, chain = _chain(arguments)
        make(arguments.out)
    except (ValueError, NotImplementedError, OSError) as error:
        return refuse("plan", error)
    around = {"fixed": chain.fixed, "head": chain.head}
    least = max(least_budget(chain.blocks, **around), chain.floor)
    if usable < least:
        why = "what is there without any block" if chain.floor == least else "the leanest plan"
        print(f"ckpt-ext plan: nothing fits in {format_bytes(usable)}: {why} takes {format_bytes(least)}", file=sys.stderr)
        return 1
    plan = solve(chain.blocks, usable, **around)
    planned = Planned(title, command_line(), chain, plan, usable, frontier(chain.blocks, **around, points=_FRONTIER_POINTS))
    console.print(as_table(planned))
    if arguments.out is not None:
        write(planned, arguments.out)
    return 0


def _chain(arguments: argparse.Namespace) -> tuple[str, CostChain]:
    """What the plan is for, and its costs."""
    from .cost_chain import CostChain
    from .costs import Rates
    from .fit_report import describe
    from .model_costs import model_costs
    from .shapes import load
    from .validate import positive_int

    if (arguments.model is None) == (arguments.costs is None):
        raise ValueError("either a model or --costs must be given, got both or neither")
    if arguments.costs is not None:
        chain = CostChain.load(arguments.costs)
        return f"{arguments.costs.name}, {len(chain.blocks)} blocks", chain
    if arguments.length is None:
        raise ValueError("--length must be given with a model")
    positive_int("length", arguments.length)
    positive_int("batch", arguments.batch)
    for name in ("flops", "bandwidth"):
        if not getattr(arguments, name) > 0:
            raise ValueError(f"{name} must be positive, got {getattr(arguments, name)}")
    shape, training = load(arguments.model), training_of(arguments, arguments.rank if arguments.train == "adapters" else 0)
    chain = model_costs(shape, training, arguments.batch, arguments.length, Rates(arguments.flops, arguments.bandwidth))
    return f"{shape.name}, {arguments.batch} x {arguments.length:,} tokens, {describe(training)}", chain
