"""The same training several times, side by side: nothing checkpointed, `torch.utils.checkpoint`, and this engine in each policy.

All runs start from the same weights and see the same batches and dropout masks. They take turns step by step, in an order that moves on
every round, so that whatever slows the machine slows all alike. `ckpt_ext.compare_report` renders what `compare` returns.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import machine, rope, text
from .backends import interpreting, select
from .compare_config import Config
from .memory import Ledger
from .modules import EagerBlock, TransformerBlock
from .spec import Policy
from .training import LanguageModel, Run, Segments
from .verdicts import Verdict, hold

PLAIN, TORCH = "plain", "torch checkpoint"


class Scheme(NamedTuple):
    """How our blocks are run: the policy of each, or of all, and how they are cut into segments."""

    policies: Policy | Sequence[Policy]
    segments: Segments | None = None


OURS = {
    "ours: all": Scheme(Policy("all")),
    "ours: attention": Scheme(Policy("attention")),
    "ours: input": Scheme(Policy("input")),
    "ours: offload": Scheme(Policy("input", offload=True)),
    "ours: segments": Scheme(Policy("input"), "auto"),
}
ALL, INPUT, PLANNED = "ours: all", "ours: input", "ours: plan"

LOSS_STEPS = 10
"""The final loss is the mean over this many last steps."""
UNTIMED_ROUNDS = 5
"""Rounds at the start whose times are not used, where there are more."""
LOSS_TOLERANCE = 1e-4
TIME_TOLERANCE = 1.1


class Difference(NamedTuple):
    """The largest `max|a - b| / max|b|` over the parameters, and where it is."""

    value: float
    parameter: str


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one run. "First" gradients are those of the first batch at the initial weights, equal in all runs."""

    name: str
    final_loss: float
    losses: list[float]
    gradient_difference: Difference
    """First gradients against the plain run's."""
    gradient_error: Difference
    """First gradients against a plain run's in float64."""
    bit_equal: bool
    """First gradients and final weights equal those of "ours: all", bit for bit."""
    saved_bytes: int
    """What the blocks keep between forward and backward."""
    peak_bytes: int
    """The most that was alive in a forward and backward pass; parameters and their finished gradients apart."""
    step_seconds: float
    tokens_per_second: float
    step_ratio: float
    """Step time over that of torch checkpoint."""
    recomputed_flops: int | None
    """Matrix products of a step beyond those of the same blocks with nothing recomputed; None where kernels hide them."""
    ledger: Ledger
    """What the peak is made of, parameters and all their gradients included."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that `compare` found."""

    config: Config
    machine: dict[str, str | int]
    input_bytes: int
    runs: list[Figures]
    verdicts: list[Verdict]

    @property
    def ok(self) -> bool:
        """Whether no required verdict failed."""
        return hold(self.verdicts)


def compare(config: Config, windows: Tensor, progress: Callable[[str], None] = lambda phase: None) -> Comparison:
    """Train all runs on `windows`, int64 `[steps, batch, length + 1]`, and judge them.

    `progress` is called with the name of the phase at the start, and then after every of `phases(config)` phases.
    """
    with _threads(config.threads):
        device = torch.device(config.device)
        windows = windows.to(device)
        first = windows[0]
        shared = [t for t in rope.table(config.spec, config.length, config.torch_dtype, device) if t is not None]

        progress("gradients at equal weights")
        runs = _runs(config, device)
        ours = [name for name in runs if name not in (PLAIN, TORCH)]
        gradients = {name: run.gradients(first) for name, run in runs.items()}
        truth = _truth(config, runs[PLAIN]).gradients(first)
        progress("memory")
        saved = {name: run.saved_bytes(first, shared) for name, run in runs.items()}
        peak = {name: run.peak_bytes(first, shared) for name, run in runs.items()}
        ledgers = {name: run.ledger(first) for name, run in runs.items()}
        flops = {name: run.flops(first) for name, run in runs.items()}
        seen = {name: select(config.backend, device).name == "aten" if name in ours else device.type == "cpu" for name in runs}
        for turn, batch in enumerate(windows):
            progress("training")
            _round(runs, turn, batch)
        progress("judging")

        seconds = {name: statistics.median(run.seconds[UNTIMED_ROUNDS:] or run.seconds) for name, run in runs.items()}
        weights = {name: run.weights() for name, run in runs.items()}
        figures = [
            Figures(
                name=name,
                final_loss=statistics.fmean(run.losses[-LOSS_STEPS:]),
                losses=run.losses,
                gradient_difference=difference(gradients[name], gradients[PLAIN]),
                gradient_error=difference(gradients[name], truth),
                bit_equal=_equal(gradients[name], gradients[ALL]) and _equal(weights[name], weights[ALL]),
                saved_bytes=saved[name],
                peak_bytes=peak[name],
                step_seconds=seconds[name],
                tokens_per_second=config.batch * config.length / seconds[name],
                step_ratio=seconds[name] / seconds[TORCH],
                recomputed_flops=flops[name] - flops[ALL if name in ours else PLAIN] if seen[name] else None,
                ledger=ledgers[name],
            )
            for name, run in runs.items()
        ]
        where = machine.describe(device)
    right = _gradients_are_right(config, {name: gradients[name] for name in ours}, gradients[PLAIN], truth)
    verdicts = [right, *judge(config, {run.name: run for run in figures})]
    return Comparison(config, where, config.input_bytes, figures, verdicts)


def phases(config: Config) -> int:
    """How many phases `compare` goes through."""
    return config.steps + 2


def _runs(config: Config, device: torch.device) -> dict[str, Run]:
    """The runs, by name, at equal weights."""
    spec, dtype = config.spec, config.torch_dtype

    def run(scheme: Scheme | None = None, *, checkpointed: bool = False) -> Run:
        kind = TransformerBlock if scheme else EagerBlock
        policies = [None] * config.blocks if scheme is None else _each(scheme.policies, config.blocks)
        segments = None if scheme is None else scheme.segments
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(config.seed)
            blocks = (kind(spec, policy=policy, backend=config.backend, dtype=dtype, device=device) for policy in policies)
            model = LanguageModel(blocks, config.dim, checkpointed=checkpointed, segments=segments, dtype=dtype, device=device)
        return Run(model, lr=config.lr, warmup=config.warmup, seed=config.seed)

    schemes = dict(OURS)
    plan = config.planned
    if plan is not None:
        schemes[PLANNED] = Scheme(plan.policies, plan.segments)
    return {PLAIN: run(), TORCH: run(checkpointed=True), **{name: run(scheme) for name, scheme in schemes.items()}}


def _each(policies: Policy | Sequence[Policy], blocks: int) -> Sequence[Policy]:
    return [policies] * blocks if isinstance(policies, Policy) else policies


def _truth(config: Config, plain: Run) -> Run:
    """The plain run in float64, from the same weights and with the same masks."""
    return Run(copy.deepcopy(plain.model).double(), lr=config.lr, warmup=config.warmup, seed=config.seed)


def _round(runs: dict[str, Run], turn: int, batch: Tensor) -> None:
    """One step of each run, beginning with another one each turn."""
    order = list(runs.values())
    first = turn % len(order)
    for run in order[first:] + order[:first]:
        run.step(batch)


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> Difference:
    """The largest relative difference, over all parameters."""
    return max(Difference(_relative(actual[name], expected[name]), name) for name in expected)


def _relative(actual: Tensor, expected: Tensor) -> float:
    """`max|actual - expected| / max|expected|`; infinite, so that it is above every bound, where that is no number."""
    actual, expected = actual.double(), expected.double()
    error, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    if error == 0:
        return 0.0
    return error / scale if scale > 0 and math.isfinite(error) else math.inf


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


def _gradients_are_right(
    config: Config, ours: dict[str, dict[str, Tensor]], plain: dict[str, Tensor], truth: dict[str, Tensor]
) -> Verdict:
    """Per parameter: error of ours against float64 <= 2 * error of the plain run + eps * sqrt(tokens), relative to the largest element.

    The last term is the expected rounding of a sum over the tokens, for a parameter where the plain run happens to be exact.
    """
    rounding = torch.finfo(config.torch_dtype).eps * (config.batch * config.length) ** 0.5
    worst, where = 0.0, "none"
    for name, gradients in ours.items():
        for parameter, exact in truth.items():
            allowed = 2 * _relative(plain[parameter], exact) + rounding
            share = _relative(gradients[parameter], exact) / allowed
            if share > worst:
                worst, where = share, f"{name}, {parameter}"
    return Verdict(
        "gradients are as near to float64's as plain PyTorch's", worst <= 1,
        f"at most {worst:.2f} of (2 x plain's error + {rounding:.0e}): {where}", required=True,
    )  # fmt: skip


def judge(config: Config, runs: dict[str, Figures]) -> list[Verdict]:
    """The verdicts that the figures of the runs, by name, allow."""
    losses = [run.final_loss for run in runs.values()]
    spread = max(losses) - min(losses) if all(map(math.isfinite, losses)) else math.nan
    # A dtype whose own rounding is above the tolerance cannot be held to it.
    tolerance = max(LOSS_TOLERANCE, 4 * torch.finfo(config.torch_dtype).eps)
    unequal = [name for name, run in runs.items() if name not in (PLAIN, TORCH) and not run.bit_equal]
    beside_input = runs[INPUT].saved_bytes / config.blocks - config.input_bytes
    ratio = runs[INPUT].step_ratio
    return [
        Verdict(
            "ours give the same bits, whatever is kept", not unequal,
            f"{', '.join(unequal)} differ from {ALL}" if unequal else "first gradients and final weights", required=True,
        ),
        Verdict("all runs end at the same loss", spread <= tolerance, f"they differ by {spread:.1e}; allowed {tolerance:.0e}"),
        Verdict(
            f"{INPUT} saves the input of each block and at most 64 bytes", 0 <= beside_input <= 64,
            f"{config.input_bytes:,} {beside_input:+,.0f} bytes a block",
        ),
        Verdict(
            f"{INPUT} peaks below {TORCH}", runs[INPUT].peak_bytes < runs[TORCH].peak_bytes,
            f"{runs[INPUT].peak_bytes / runs[TORCH].peak_bytes:.2f} of it",
        ),
        Verdict(
            f"{INPUT} takes at most {TIME_TOLERANCE} of {TORCH}'s step time",
            None if _interpreted(config) else ratio <= TIME_TOLERANCE,
            f"{ratio:.2f} of it" + (", under Triton's interpreter" if _interpreted(config) else ""),
        ),
    ]  # fmt: skip


def _interpreted(config: Config) -> bool:
    return config.backend == "triton" and interpreting()


@contextmanager
def _threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def windows(config: Config) -> Tensor:
    """The batches of `config`, `[steps, batch, length + 1]`. Raises OSError or ValueError for a text that cannot be used."""
    return text.batches(text.read(config.text), config.steps, config.batch, config.length, config.seed)
