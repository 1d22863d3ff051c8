"""Public Triton kernels of the same jobs, compiled like ours where their package is installed.

Their launches are recorded on the meta device too, so what a package would decide by asking the GPU, such as Liger's narrower SwiGLU
tiles on Blackwell, it does not decide here. Liger's SwiGLU gradients take the places of its inputs, and a tensor counts once in the bound.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from bench.calls import BATCH, LENGTH, Call, meta
from ckpt_ext.kernels.launch import Launch


@contextlib.contextmanager
def record_started() -> Iterator[list[Launch]]:
    """Write down the kernels that a `with` body starts by Triton's own `kernel[grid](...)`, and run none of them."""
    launches: list[Launch] = []

    def run(kernel, *args, grid, warmup, **options):
        launches.append(Launch(kernel, tuple(grid), args, {"enable_fp_fusion": True} | options))  # Triton's default, which it warns about

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def _liger() -> dict[str, Call]:
    from liger_kernel.ops import rms_norm, rope, swiglu

    def multiply(hidden_dim: int) -> Call:
        gate, up = (meta(BATCH * LENGTH, hidden_dim) for _ in range(2))

        def run():
            _, _, hidden = swiglu.swiglu_forward(gate, up)
            swiglu.swiglu_backward(gate, up, hidden)

        return Call(run)

    def norm(cols: int) -> Call:
        x, weight = meta(BATCH, LENGTH, cols), meta(cols)

        def run():
            y, rows, stats, *settings, mode = rms_norm.rms_norm_forward(x, weight, 1e-5, 0.0, "llama", None)
            rms_norm.rms_norm_backward(y, rows, weight, stats, 0.0, mode, *settings, False, None)

        return Call(run)

    def rotate(head_dim: int) -> Call:
        q, k = (meta(BATCH, LENGTH, heads, head_dim).transpose(1, 2) for heads in (32, 8))
        angle = meta(1, LENGTH, head_dim, dtype=torch.float32)

        def run():
            rope.rope_forward(q, k, angle, angle)
            rope.rope_backward(q, k, angle, angle)

        return Call(run)

    return {
        "liger swiglu": multiply(14336),
        "liger rms norm 4096": norm(4096),
        "liger rms norm 8192": norm(8192),
        "liger rope d128": rotate(128),
    }


COMPETITORS: dict[str, Call] = {}
"""Calls by name; empty where nothing is installed."""

with contextlib.suppress(ImportError):
    COMPETITORS.update(_liger())
