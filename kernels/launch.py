"""The one place where a kernel is started: on the right device, within the grid's limits, one at a time under the interpreter."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .architecture import assume_architecture

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels of this process run under Triton's interpreter (fixed when they are decorated, hence at import)."""

# Triton's interpreter keeps the grid position in module state, so two threads must not run it at once.
_interpreter_lock = threading.Lock() if INTERPRETED else contextlib.nullcontext()

_TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
_MAX_GRID = (2**31 - 1, 65535, 65535)


def accumulate_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype of sums, softmax state and norm statistics: float64 for float64 tensors, float32 for all others."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def operand_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype in which a matrix product reads tensors of `dtype`.

    It is `dtype` itself, so that the tensor cores are used, but for bfloat16 under the interpreter, whose arithmetic on that
    type is wrong; there operands are widened on load, which is exact.
    """
    return tl.float32 if INTERPRETED and dtype == torch.bfloat16 else _TRITON_DTYPES[dtype]


class Launch(NamedTuple):
    """A call of `launch` that was written down instead of carried out."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    constexprs: dict[str, Any]


_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def record_launches(arch: str = "sm_80") -> Iterator[list[Launch]]:
    """Write down the launches of a `with` body, with the tiles of `arch`, and run none; its tensors may then be on the meta device."""
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        with assume_architecture(arch):
            yield launches
    finally:
        _recorded.reset(token)


def launch(kernel, grid: Sequence[int], *args, **constexprs) -> None:
    """Run `kernel[grid](*args, **constexprs)` on the device of its first tensor argument; an empty grid launches nothing."""
    if 0 in grid:
        return
    # Said outright, since Triton 3.10 changes the default, and bits with it.
    constexprs.setdefault("enable_fp_fusion", True)
    if (launches := _recorded.get()) is not None:
        launches.append(Launch(kernel, tuple(grid), args, constexprs))
        return
    for size, limit in zip(grid, _MAX_GRID, strict=False):
        if size > limit:
            raise ValueError(f"grid must fit {_MAX_GRID}, got {tuple(grid)}")
    tensor = next(arg for arg in args if isinstance(arg, Tensor))
    device = torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
    with device, _interpreter_lock:
        kernel[tuple(grid)](*args, **constexprs)
