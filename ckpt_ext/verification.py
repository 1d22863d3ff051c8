"""Proof on a user's own model that recomputing its blocks changes nothing: outputs, loss, every gradient, buffers, generators, hooks.

The errors of the model as it is and of the swapped model are both measured against a run in float64 (`ckpt_ext.truth`), and the swapped
model's may be at most twice the other's, plus the rounding of a sum over the tokens. Dropout's masks cannot agree with PyTorch's: a model
that draws random numbers is compared in eval mode, where it does not; and in training mode the swapped model is compared, bit for bit, with
itself keeping everything, which replays nothing; and the same layers must draw. `ckpt_ext.verify_report` renders what `verify` returns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from . import rng
from .integrations import Segments, SwapReport, swap, unswap
from .memory import activation_peak, saved_bytes
from .spec import BackendName, Policy
from .truth import Float64Throughout
from .validate import instance, is_floating, one_of
from .validate import widened as widened_dtype
from .verdicts import Verdict, hold
from .verify_run import Loss, Step, call, default_loss, drawing, is_random, run, tokens, undisturbed, widened

FACTOR = 2
"""Errors may be this many times those of the model as it is."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's errors: the largest difference from the truth, relative to the scale of the tensor."""

    name: str
    error: float
    """Of the swapped model; infinite where it has a gradient and the truth has none, or the other way round."""
    original_error: float
    allowed: float
    cosine: float
    """Of the angle to the truth; NaN where either is zero or missing."""

    @property
    def share(self) -> float:
        """Of what is allowed; above 1 is a failure."""
        return self.error / self.allowed if self.error else 0.0

    @property
    def ok(self) -> bool:
        return self.share <= 1


@dataclass(frozen=True, slots=True)
class Memory:
    """A step's memory in bytes: kept by forward for backward, and the peak, without parameters and finished gradients."""

    saved: int
    peak: int


@dataclass(frozen=True, slots=True)
class Verification:
    """Everything that `verify` found."""

    policy: Policy
    swap: SwapReport
    tensors: list[Entry]
    """Outputs, the loss and every gradient, the worst first."""
    verdicts: list[Verdict]
    original_memory: Memory | None
    memory: Memory | None

    @property
    def ok(self) -> bool:
        """Whether no required verdict failed."""
        return hold(self.verdicts)

    def __str__(self) -> str:
        from .verify_report import as_text

        return as_text(self)


def verify(
    model: nn.Module, batch: Any, policy: Policy | None = None, *, loss: Loss | None = None, backend: BackendName = "auto",
    segments: Segments = None, fallback: Literal["checkpoint", "none"] = "checkpoint",
    truth: Literal["float64", "float32", "original"] = "float64",
    memory: bool = True, progress: Callable[[str], None] = lambda phase: None,
) -> Verification:  # fmt: skip
    """Runs a step of `model` on `batch` as it is and swapped with `policy`, and compares. The model is left as it was.

    Args:
        batch: keyword arguments of the model as a mapping, positional ones as a tuple, or the only argument.
        loss: of the output, a scalar; by default the output's own loss, or a weighted mean of its elements where it has none.
        truth: what a copy of the model is run in to measure errors against; "original" makes no copy and takes the model as it is, whose
            errors then count as none.
        segments, backend, fallback: as `swap` takes them.
        memory: whether to measure the saved bytes and the peak, too, which runs each step once more.

    Raises ValueError where nothing can be differentiated, and what `swap` raises.
    """
    instance("model", model, nn.Module)
    one_of("truth", truth, ("float64", "float32", "original"))
    policy, loss = policy or Policy(), loss or default_loss
    start = rng.capture()

    def swapped(policy: Policy, segments: Segments, fallback: Literal["checkpoint", "none"]) -> tuple[SwapReport, Step]:
        report = swap(model, policy=policy, segments=segments, backend=backend, fallback=fallback)
        return report, run(model, batch, loss, start)

    with _as_it_was(model):
        random = model.training and is_random(model, batch, start)
        replayed = None
        silent: list[str] | None = None
        if random:
            names = swap(model, policy=policy, segments=segments, backend=backend, fallback=fallback).swapped
            ours_draw = drawing(model, names, batch, start)
            unswap(model)
            silent = sorted(set(drawing(model, names, batch, start)) ^ set(ours_draw))
        if random and policy.save != "all":
            progress("replay of dropout")
            _, kept = swapped(replace(policy, save="all", offload=False), None, "none")
            _, made_again = swapped(policy, segments, fallback)
            replayed = kept, made_again
            unswap(model)
        model.train(model.training and not random)
        progress("as it is")
        original = run(model, batch, loss, start)
        if all(gradient is None for gradient in original.gradients.values()):
            raise ValueError("the loss must depend on a parameter that requires grad, got none that does")
        progress("truth")
        exact = original if truth == "original" else _truth(model, batch, loss, start, getattr(torch, truth))
        original_memory = _memory(model, batch, loss, start) if memory else None
        progress("swapped")
        report, ours = swapped(policy, segments, fallback)
        our_memory = _memory(model, batch, loss, start) if memory else None
    coarsest = max((torch.finfo(p.dtype).eps for p in model.parameters() if is_floating(p)), default=0.0)
    rounding = _Rounding(coarsest, tokens(batch))
    entries = sorted(_entries(ours, original, exact, rounding), key=lambda entry: -entry.share)
    verdicts = [
        _swapped(report), *_within(entries), *_same(ours, original), _replayed(replayed, random, policy),
        _drawn(silent, len(report.swapped)), *_saves(our_memory, original_memory),
    ]  # fmt: skip
    return Verification(policy, report, entries, verdicts, original_memory, our_memory)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """The model without swapped layers inside, whatever it was, in its own mode; afterwards as it was, caches and all."""
    modes = [(module, module.training) for module in model.modules()]
    before = [(module, type(module), dict(vars(module))) for module in model.modules()]
    config = getattr(model, "config", None)
    uses_cache = getattr(config, "use_cache", None)
    unswap(model)
    try:
        if uses_cache:  # what blocks that recompute do not fill
            config.use_cache = False  # type: ignore[union-attr]
        yield
    finally:
        unswap(model)
        for module, kind, state in before:
            if type(module) is not kind:
                module.__class__ = kind
                vars(module).update(state)
        for module, mode in modes:
            module.training = mode
        if uses_cache:
            config.use_cache = uses_cache  # type: ignore[union-attr]


def _truth(model: nn.Module, batch: Any, loss: Loss, start: rng.RngState, dtype: torch.dtype) -> Step:
    exact = copy.deepcopy(model).to(dtype)
    if dtype != torch.float64:
        return run(exact, batch, loss, start)
    with Float64Throughout():
        return run(exact, widened(batch), loss, start)


def _memory(model: nn.Module, batch: Any, loss: Loss, start: rng.RngState) -> Memory:
    given = [leaf for leaf in tree_iter(batch) if isinstance(leaf, Tensor)]
    with undisturbed(model), start.replay():
        saved = saved_bytes(lambda: loss(call(model, batch)), [*model.parameters(), *model.buffers(), *given])
    with undisturbed(model), start.replay():
        return Memory(saved, activation_peak(lambda: loss(call(model, batch)).backward(), model, given))


class _Rounding(NamedTuple):
    """What an error may be where the original happens to have none, relative to a tensor's scale."""

    eps: float
    """Of the coarsest dtype that the model's parameters have: its activations may have it, too."""
    rows: int
    """That are summed, in float32 or wider."""

    def of(self, dtype: torch.dtype) -> float:
        return max(self.eps, torch.finfo(dtype).eps) + self.rows**0.5 * torch.finfo(widened_dtype(dtype)).eps


def _entries(ours: Step, original: Step, exact: Step, rounding: _Rounding) -> Iterator[Entry]:
    """Errors of outputs, loss and gradients."""
    scales = _scales(exact.gradients)
    for name in exact.outputs.keys() & original.outputs.keys():
        title = name if name == "output" else f"output{name}"
        yield _entry(title, ours.outputs.get(name), original.outputs[name], exact.outputs[name], rounding)
    yield _entry("loss", ours.loss, original.loss, exact.loss, rounding)
    for name, gradient in exact.gradients.items():
        yield _entry(name, ours.gradients[name], original.gradients[name], gradient, rounding, scales.get(name))


def _scales(gradients: dict[str, Tensor | None]) -> dict[str, float]:
    """The largest element of the gradients of each parameter's module: a bias whose gradient cancels is as inexact as its weight's is."""
    largest: dict[str, float] = {}
    for name, gradient in gradients.items():
        if gradient is not None and gradient.numel():
            module = name.rpartition(".")[0]
            largest[module] = max(largest.get(module, 0.0), gradient.abs().max().item())
    return {name: largest.get(name.rpartition(".")[0], 0.0) for name in gradients}


def _entry(
    name: str, ours: Tensor | None, original: Tensor | None, exact: Tensor | None, rounding: _Rounding, scale: float | None = None
) -> Entry:
    if exact is None or ours is None or original is None:
        missing = (ours is None) != (original is None)
        return Entry(name, float("inf") if missing else 0.0, 0.0, 1.0, float("nan"))
    truth, a, b = (t.detach().double().flatten() for t in (exact, ours, original))
    scale = scale or (truth.abs().max().item() if truth.numel() else 0.0) or 1.0
    error, original_error = (((t - truth).abs().max().item() if t.numel() else 0.0) / scale for t in (a, b))
    norm = (a.norm() * truth.norm()).item()
    cosine = (a @ truth).item() / norm if norm else float("nan")
    return Entry(name, error if error == error else float("inf"), original_error, FACTOR * original_error + rounding.of(ours.dtype), cosine)


def _swapped(report: SwapReport) -> Verdict:
    refused = "; ".join(f"{name}: {reason}" for name, reason in report.refused.items())
    detail = f"{len(report.swapped)}{'; refused: ' if refused else ''}{refused}"
    return Verdict("layers are swapped", bool(report.swapped), detail, required=True)


def _within(entries: list[Entry]) -> Iterator[Verdict]:
    groups = {
        "outputs and loss": [entry for entry in entries if entry.name.startswith("output") or entry.name == "loss"],
        "gradients": [entry for entry in entries if not (entry.name.startswith("output") or entry.name == "loss")],
    }
    for what, group in groups.items():
        worst = max(group, key=lambda entry: entry.share, default=None)
        detail = "there are none" if worst is None else f"at most {worst.share:.2f} of what is allowed: {worst.name}"
        yield Verdict(f"{what} are as near to the truth as the original's", worst is not None and worst.ok, detail, required=True)


def _same(ours: Step, original: Step) -> Iterator[Verdict]:
    """What must be the same, not near."""
    missing = [name for name, gradient in original.gradients.items() if (gradient is None) != (ours.gradients[name] is None)]
    yield Verdict("the same parameters get gradients", not missing, _names(missing, len(original.gradients)), required=True)
    odd = [name for name, count in original.hooks.items() if ours.hooks[name] != count]
    yield Verdict("each gradient is handed over as often", not odd, _names(odd, len(original.hooks)), required=True)
    changed = [name for name, buffer in original.buffers.items() if not _near(ours.buffers.get(name), buffer)]
    yield Verdict("buffers end the same", not changed, _names(changed, len(original.buffers)), required=True)
    same = all(torch.equal(a, b) for a, b in zip(ours.generators, original.generators, strict=True))
    yield Verdict("random generators end in the same state", same, f"{len(original.generators)}", required=True)


def _near(actual: Tensor | None, expected: Tensor) -> bool:
    return actual is not None and torch.allclose(actual.double(), expected.double(), rtol=1e-5, atol=1e-6, equal_nan=True)


def _names(wrong: list[str], total: int) -> str:
    return f"not so: {', '.join(wrong[:5])}{' ...' if len(wrong) > 5 else ''}" if wrong else f"all {total}"


def _replayed(steps: tuple[Step, Step] | None, random: bool, policy: Policy) -> Verdict:
    claim = "in training, dropout's replay gives the bits of a run that keeps everything"
    if steps is None:
        return Verdict(claim, None, 'save="all" replays nothing' if random else "the model draws no random numbers", required=True)
    kept, replayed = steps
    wrong = [name for name, gradient in kept.gradients.items() if not _equal(gradient, replayed.gradients[name])]
    if not torch.equal(kept.loss, replayed.loss):
        wrong.insert(0, "loss")
    if not all(torch.equal(a, b) for a, b in zip(kept.generators, replayed.generators, strict=True)):
        wrong.insert(0, "random generators")
    return Verdict(claim, not wrong, _names(wrong, len(kept.gradients)), required=True)


def _drawn(wrong: list[str] | None, total: int) -> Verdict:
    claim = "in training, the same layers draw random numbers"
    if wrong is None:
        return Verdict(claim, None, "the model draws no random numbers", required=True)
    return Verdict(claim, not wrong, _names(wrong, total), required=True)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _saves(ours: Memory | None, original: Memory | None) -> Iterator[Verdict]:
    if ours is None or original is None:
        return
    for what in ("saved", "peak"):
        a, b = getattr(ours, what), getattr(original, what)
        detail = f"{a:,} bytes, {a / b:.2f} of the original's" if b else f"{a:,} bytes"
        yield Verdict("less is saved for backward" if what == "saved" else "the peak of activations is lower", a < b, detail)
