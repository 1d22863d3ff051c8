"""Where a training step's memory goes: the peak of a real or a fake step, split by what the bytes are for.

A step is watched operator by operator. Of every storage it is noted when it is born and when it dies; what it was for is told afterwards,
when it is known whether it lived on into backward, became a parameter's gradient, or was the optimizer's.
"""

from __future__ import annotations

import math
import warnings
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from . import host
from .storages import storages

Purpose = Literal["parameters", "gradients", "optimizer", "saved", "working", "logits", "other"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """The bytes that are alive at the peak of a step, by what they are for."""

    parameters: int
    """Of the model, with its buffers."""
    gradients: int
    """Of parameters, finished or on their way."""
    optimizer: int
    """State of the optimizer, and what its step makes."""
    saved: int
    """Made by the forward pass and kept for backward."""
    working: int
    """Everything else that a pass makes: in backward what is computed again, and gradients of activations."""
    logits: int
    """As wide as the vocabulary: logits, their probabilities and gradients, whole or in slices."""
    other: int
    """What was there before and is none of these: the batch, tables that are shared between steps."""
    host: int = 0
    """The most that was alive in the host's memory of what was offloaded; apart from the peak."""
    phase: str = ""
    """Where the peak was: "forward", "backward", or "optimizer" (all that runs outside both)."""

    @property
    def peak(self) -> int:
        """The most bytes alive at the end of an operator, its operands included."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name not in ("host", "phase"))

    @property
    def activations(self) -> int:
        """The part of the peak that depends on the batch and its length."""
        return self.saved + self.working + self.logits

    def as_dict(self) -> dict[str, int | str]:
        """For JSON: every field, and the peak."""
        return {**asdict(self), "peak": self.peak}


def measure(
    step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
    vocab: int | None = None, warmup: int = 1,
) -> Ledger:  # fmt: skip
    """The ledger of `step()`, a training step of `model`: forward, backward and, if there is one, `optimizer`'s step and `zero_grad`.

    The step is run `warmup` times before it is measured, so that the optimizer's state is there. `vocab` is the width that tells logits
    from other tensors; not given, it is that of the model's output embeddings where it has such (`get_output_embeddings`), else nothing
    counts as logits. Scratch memory inside one operator is not seen. On a GPU memory of the device alone counts.

    Raises ValueError for a negative `warmup`.
    """
    if warmup < 0:
        raise ValueError(f"warmup must not be negative, got {warmup}")
    trace = _Trace(model, optimizer, _vocab(model) if vocab is None else vocab)
    with trace:
        for _ in range(warmup):
            step()
        trace.start()
        step()
    return trace.ledger()


def estimate(
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer | None]], step: Callable[[Any, Any], object], *, vocab: int | None = None
) -> Ledger:
    """The ledger of a step that this machine could not run: on fake tensors, which have shapes and no data.

    `make()` gives the model and its optimizer, or None; `step(model, optimizer)` makes its batch and runs a step. Both are called where
    tensors are fake, so neither may load or look at values (`loss.item()`).
    """
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        # torch's checkpoint asks the devices of fake tensors for states of generators.
        warnings.simplefilter("ignore")
        model, optimizer = make()
        return measure(lambda: step(model, optimizer), model, optimizer, vocab=vocab)


def _vocab(model: nn.Module) -> int | None:
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    weight = getattr(head, "weight", None)
    return weight.size(0) if isinstance(weight, Tensor) else None


@dataclass(slots=True)
class _Life:
    """Of one storage: its size, the operators that ended when it was born and before it died, in which phase, and what it is for."""

    size: int
    born: int
    phase: str
    purpose: Purpose | None = None
    died: float = math.inf


class _Trace(TorchDispatchMode):
    """Notes the lives of all storages of the model's device."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, vocab: int | None) -> None:
        super().__init__()
        self._model, self._optimizer, self._vocab = model, optimizer, vocab
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        self._now = self._live = self._peak = self._peak_at = self._host = self._host_peak = 0
        self._phase = self._peak_phase = "forward"
        self._in_step = False
        self._lives: dict[int, _Life] = {}
        self._ended: list[_Life] = []
        self._backwards: list[int] = []
        self._hooks: list[Any] = []
        for tensor in (*model.parameters(), *model.buffers()):
            self._adopt(tensor, "parameters")
        self._adopt_held()

    def start(self) -> None:
        """What comes now is the step to tell of; what is there already and nobody's stays from step to step."""
        self._adopt_held()
        for life in self._lives.values():
            life.purpose = life.purpose or "other"
        self._peak, self._peak_at, self._host_peak = self._live, self._now, self._host

    def _adopt_held(self) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self._adopt(parameter.grad, "gradients")
        if self._optimizer is not None:
            self._adopt(list(self._optimizer.state.values()), "optimizer")

    def _adopt(self, tree: object, purpose: Purpose) -> None:
        for storage in self._of_device(tree):
            self._meet(storage, storage.nbytes()).purpose = purpose

    def __enter__(self):
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda p: self._adopt(p.grad, "gradients")))
        if self._optimizer is not None:
            self._hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._set_in_step(True)))
            self._hooks.append(self._optimizer.register_step_post_hook(lambda *_: self._set_in_step(False)))
        return super().__enter__()

    def __exit__(self, *exception):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*exception)

    def _set_in_step(self, value: bool) -> None:
        self._in_step = value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for storage in self._of_device((args, kwargs)):
            self._meet(storage, storage.nbytes(), purpose="other")
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and self._phase != "backward":
            self._backwards.append(self._now)
        self._phase = "backward" if in_backward else "optimizer" if self._in_step else "forward"
        result = func(*args, **kwargs)
        self._now += 1
        if host.is_buffer(func):
            self._meet_on_host(result)
        else:
            for storage in self._of_device(result):
                self._meet(storage, storage.nbytes())
            self._name_logits(result)
        if self._live > self._peak:
            self._peak, self._peak_at, self._peak_phase = self._live, self._now, self._phase
        return result

    def _of_device(self, tree: object) -> Iterator[UntypedStorage]:
        # A fake tensor's storage is a meta one, so the tensor is asked.
        return storages([leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.device.type == self._device])

    def _meet(self, storage: UntypedStorage, size: int, purpose: Purpose | None = None) -> _Life:
        """The storage's life, begun now where it was not known."""
        key = storage._cdata
        if key not in self._lives:
            self._lives[key] = _Life(size, self._now, self._phase, purpose)
            self._live += size
            weakref.finalize(storage, self._end, key).atexit = False
        return self._lives[key]

    def _end(self, key: int) -> None:
        life = self._lives.pop(key)
        life.died = self._now
        self._live -= life.size
        self._ended.append(life)

    def _meet_on_host(self, buffer: Tensor) -> None:
        storage, size = buffer.untyped_storage(), buffer.untyped_storage().nbytes()
        self._meet(storage, 0, purpose="other")
        self._host += size
        self._host_peak = max(self._host_peak, self._host)
        weakref.finalize(storage, self._end_on_host, size).atexit = False

    def _end_on_host(self, size: int) -> None:
        self._host -= size

    def _name_logits(self, result: object) -> None:
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1 and leaf.size(-1) == self._vocab:
                for storage in self._of_device(leaf):
                    life = self._lives[storage._cdata]
                    life.purpose = life.purpose or "logits"

    def ledger(self) -> Ledger:
        """What was alive at the peak."""
        totals: dict[str, int] = dict.fromkeys(get_args(Purpose), 0)
        for life in (*self._ended, *self._lives.values()):
            if life.born <= self._peak_at <= life.died:
                totals[self._purpose(life)] += life.size
        return Ledger(**totals, host=self._host_peak, phase=self._peak_phase)

    def _purpose(self, life: _Life) -> Purpose:
        if life.purpose is not None:
            return life.purpose
        if life.phase != "forward":
            return "working" if life.phase == "backward" else "optimizer"
        following = bisect_left(self._backwards, life.born)
        lives_on = following < len(self._backwards) and life.died > self._backwards[following]
        return "saved" if lives_on else "working"
