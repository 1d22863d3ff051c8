"""Where dropout's randomness comes from: mask states, the operators that use them, and capture and replay of generators.

A mask is a pure function of 16 bytes, (seed, offset), and of the site that drops; ckpt_ext/philox.py says which. What is kept for
backward is that state alone. `capture` is for code that draws from generators by itself: it remembers and puts back their states.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.fx import traceback
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy

from . import extension, philox


class Site(IntEnum):
    """Which dropout of a block a mask belongs to. Sites of one state have independent masks. 16 to 255 are left to adapters."""

    ATTENTION = 1
    ATTENTION_RESIDUAL = 2
    MLP = 3
    MLP_RESIDUAL = 4
    FUNCTIONAL = 5


@dataclass(frozen=True, slots=True)
class Dropout:
    """One dropout: the state of its masks (int64 `[2]`: seed, offset; on the device of the data), its probability, its site.

    A slice of the data takes the same rows of the mask: its first row is `row_start`. Attention has a row for each batch entry, head and
    query, in this order; a slice of heads is `batch_rows` rows from one entry to the next, None where it has all heads.
    """

    state: Tensor
    p: float
    site: int
    row_start: int = 0
    batch_rows: int | None = None

    def rows_from(self, row: int) -> "Dropout":
        """The same dropout of a slice of the data that begins at `row`."""
        return replace(self, row_start=self.row_start + row)


def reserve(device: torch.device | str, generator: torch.Generator | None = None) -> Tensor:
    """A new mask state, int64 `[2]` = (seed, offset) on `device`, drawn from `generator` or the device's default one.

    On the CPU the seed is 63 random bits and the offset is 0. Elsewhere the seed is the generator's own and the offset moves on; on CUDA
    with the extension's CUDA part that holds inside graph capture too, each replay getting new masks.

    Raises NotImplementedError where the device has no generator, ValueError where `generator` is another device's.
    """
    draw = torch.ops.ckpt_ext.reserve_once if torch.compiler.is_compiling() else torch.ops.ckpt_ext.reserve
    return draw(generator, torch.device(device))


def dropout(x: Tensor, dropout: Dropout) -> Tensor:
    """Rows of `x` (any shape, floating) with elements dropped and the rest scaled by 1 / (1 - p): new, contiguous, x's dtype.

    Any number of times differentiable in x. A window of a bigger mask is had from `torch.ops.ckpt_ext.dropout`, where `cols` is the
    width of the mask, element `(*i, j)` of x lies in column `col_start + j` and row `row_start + sum(i * row_strides)`.
    """
    return torch.ops.ckpt_ext.dropout(x, dropout.state, dropout.p, int(dropout.site), row_start=dropout.row_start)


@dataclass(frozen=True, slots=True)
class RngState:
    """The states of some generators at one moment; made by `capture`."""

    generators: tuple[tuple[torch.Generator, Tensor], ...]
    python: tuple[Any, ...] | None = None
    numpy: dict[str, Any] | None = None

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run the body with every captured generator as it was; afterwards, also by exception, each is as it was before the body."""
        present = _read([generator for generator, _ in self.generators], self.python is not None, self.numpy is not None)
        try:
            self._restore()
            yield
        finally:
            present._restore()

    def _restore(self) -> None:
        for generator, state in self.generators:
            _set_state(generator, state)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)


def capture(
    devices: Sequence[torch.device | str] | None = None,
    generators: Sequence[torch.Generator] = (),
    *,
    python: bool = False,
    numpy: bool = False,
) -> RngState:
    """The present states of the CPU's generator, of the default generators of `devices`, and of `generators`.

    `devices` None means all devices of every accelerator that the process has initialised; none is initialised for this. `python` and
    `numpy` add the module `random` and NumPy's legacy global generator.

    Raises NotImplementedError where a device has no generator.
    """
    named = initialised_devices() if devices is None else [torch.device(device) for device in devices]
    defaults = [_default_generator(device) for device in named if device.type != "cpu"]
    return _read([torch.default_generator, *defaults, *generators], python, numpy)


def _read(generators: Sequence[torch.Generator], python: bool, numpy: bool) -> RngState:
    states = tuple((generator, _get_state(generator)) for generator in dict.fromkeys(generators))
    legacy = None
    if numpy:
        import numpy as np

        legacy = np.random.get_state(legacy=False)
    return RngState(states, random.getstate() if python else None, legacy)


def initialised_devices() -> list[torch.device]:
    """All devices of every accelerator that the process has initialised, whether it uses them or not."""
    kinds = [kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_initialized()]
    return [torch.device(kind, index) for kind in kinds for index in range(getattr(torch, kind).device_count())]


_C = extension.module()
_default_generator = philox.default_generator if _C is None else _C.default_generator
_get_state = torch.Generator.get_state if _C is None else _C.get_state
_set_state = torch.Generator.set_state if _C is None else _C.set_state
_library = torch.library.Library("ckpt_ext", "DEF" if _C is None else "FRAGMENT")
if _C is None:
    for _name, _schema in philox.SCHEMAS.items():
        _library.define(_schema, tags=philox.TAGS[_name])
    _library.impl("dropout", philox.dropout, "CPU")
    _library.impl("reserve", philox.reserve, "CompositeExplicitAutograd")


def _dropout_cuda(x: Tensor, state: Tensor, p: float, site: int, **window: Any) -> Tensor:
    row_start = window.pop("row_start", 0)
    if window:  # the dispatcher leaves out arguments that have their defaults
        raise NotImplementedError(f"dropout on a GPU takes whole rows of a mask only, got {', '.join(window)}")
    from .kernels.residual import dropout as launch

    return launch(x, Dropout(state, p, site, row_start))


_library.impl("dropout", _dropout_cuda, "CUDA")

# torch.compile would merge two equal calls into one, and give two layers one mask: its pass spares only torch's own random operators.
_library._register_effectful_op("ckpt_ext::reserve", EffectType.ORDERED)

_library.define("reserve_once(Generator? generator, Device device) -> Tensor")


@torch.library.impl(_library, "reserve_once", "CompositeImplicitAutograd")
def _reserve_once(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """`reserve` in a graph that is compiled. Whoever divides the graph is told to keep its result: drawn again it would be another."""
    from torch._functorch import config

    meta = traceback.get_current_meta()
    if meta.get("custom", {}).get("_region_activation_memory_budget", config.activation_memory_budget) == 0:
        raise NotImplementedError("activation_memory_budget must be above 0 around dropout, got 0: it keeps no state of the masks")
    around = meta.get("recompute")
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        return torch.ops.ckpt_ext.reserve(generator, device)
    finally:
        meta["recompute"] = around


# Within torch.utils.checkpoint a compiler marks all else to be run again.
SAC_IGNORED_OPS.add(torch.ops.ckpt_ext.reserve_once.default)


@torch.library.register_fake("ckpt_ext::dropout", lib=_library)
def _dropout_fake(x: Tensor, state: Tensor, p: float, site: int, **window: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("ckpt_ext::reserve", lib=_library)
def _reserve_fake(generator: torch.Generator | None, device: torch.device) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device=device)


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    _, state, ctx.p, ctx.site = inputs
    ctx.window = keyword_only_inputs
    ctx.save_for_backward(state)


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (state,) = ctx.saved_tensors
    return torch.ops.ckpt_ext.dropout(grad, state, ctx.p, ctx.site, **ctx.window), None, None, None


torch.library.register_autograd("ckpt_ext::dropout", _dropout_backward, setup_context=_keep_arguments, lib=_library)
