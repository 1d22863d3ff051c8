"""Attention, MLP, norms and elementwise work, ours beside PyTorch's and others': `python -m bench.kernels`.

TFLOP/s count what the result asks for: an MLP that runs gate and up again is not credited with it. GB/s count each input and output once.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from bench import elementwise, peers
from bench.clock import Work
from bench.functions import Tensors, case, differentiated, draw
from bench.harness import Case, Provider, main
from ckpt_ext import functional, reference
from ckpt_ext.masks import Mask

SDPA = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}  # fmt: skip
DENSE_LENGTH = 4096
"""The longest at which attention that holds or walks over all weights in PyTorch operators takes part on a GPU."""

# --- attention ---


class Heads(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def heads_inputs(shape: Heads) -> tuple[Tensors, Tensor]:
    """q, k and v and the output's gradient, lying in memory as a projection leaves them."""

    def one(count: int, seed: int) -> Tensor:
        return draw(shape.batch, shape.length, count, shape.head_dim, like=shape, seed=seed).transpose(1, 2)

    return {"q": one(shape.heads, 0), "k": one(shape.kv_heads, 1), "v": one(shape.kv_heads, 2)}, one(shape.heads, 3)


def attention_case(shape: Heads, check_shape: Heads, only: str) -> Case:
    """Causal attention, forward or backward."""
    grouped = shape.heads != shape.kv_heads
    device = shape.device

    def our(backend: str) -> Provider:
        function = partial(functional.attention, causal=True, backend=backend)
        return peers.ours(backend, device, lambda shape: differentiated(function, *heads_inputs(shape), only))

    functions: dict[str, Callable[[Heads], Callable[..., Tensor]] | Provider] = {"ours: triton": our("triton")}
    for name, backend in SDPA.items():
        if device.type == "cuda" and (name != "SDPA math" or shape.length <= DENSE_LENGTH) or name in ("SDPA flash", "SDPA math"):
            functions[name] = lambda shape, backend=backend: peers.sdpa(backend, causal=True, grouped=grouped)
    functions["FlexAttention"] = (
        (lambda shape: peers.flex(device, shape.length, causal=True, grouped=grouped)) if device.type == "cuda"
        else Provider(None, "its backward needs a GPU")
    )  # fmt: skip
    if device.type == "cpu" or shape.length <= DENSE_LENGTH:
        functions["ours: aten"] = our("aten")
    products = 2 if only == "forward" else 5
    return case(
        f"attention {only} D={shape.head_dim} T={shape.length} B={shape.batch} heads {shape.heads}/{shape.kv_heads}", shape, check_shape,
        heads_inputs, partial(reference.attention, mask=Mask(causal=True)), functions, only,
        terms=shape.head_dim + check_shape.length * (shape.heads // shape.kv_heads),
        flops=products * shape.batch * shape.heads * shape.length**2 * shape.head_dim,
    )  # fmt: skip


def attention_cases(small: bool, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """The most telling first: Llama's heads at 8k, then the rest of lengths, head sizes and groupings."""
    if small:
        tiny = Heads(1, 2, 1, 20, 16, dtype, device)
        return [attention_case(tiny, tiny._replace(length=18), only) for only in ("forward", "backward")]
    shapes = [
        Heads(max(1, 16384 // length), 32 * 128 // head_dim, kv * 128 // head_dim, length, head_dim, dtype, device)
        for head_dim, kv, length in [
            (128, 8, 8192), (64, 8, 8192), (128, 32, 8192), (128, 8, 32768), (128, 8, 4096), (64, 32, 8192), (128, 8, 16384),
            (64, 8, 32768), (64, 8, 4096), (64, 8, 16384), (128, 32, 32768), (64, 32, 32768),
        ]
    ]  # fmt: skip
    return [attention_case(shape, shape._replace(batch=1, length=520), only) for shape in shapes for only in ("forward", "backward")]


# --- MLP ---


class Mlp(NamedTuple):
    rows: int
    dim: int
    hidden: int
    dtype: torch.dtype
    device: torch.device


def eager_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def mlp_case(shape: Mlp) -> Case:
    """A SwiGLU MLP, forward and backward, all weights trained."""
    device = shape.device

    def make(shape: Mlp) -> tuple[Tensors, Tensor]:
        up, down = shape.dim**-0.5, shape.hidden**-0.5
        weights = {"gate": (shape.hidden, shape.dim, up), "up": (shape.hidden, shape.dim, up), "down": (shape.dim, shape.hidden, down)}
        inputs = {"x": draw(shape.rows, shape.dim, like=shape, seed=0)}
        for seed, (name, (rows, cols, scale)) in enumerate(weights.items(), 1):
            inputs[name] = draw(rows, cols, like=shape, seed=seed, scale=scale)
        return inputs, draw(shape.rows, shape.dim, like=shape, seed=9)

    backend = peers.backend_for(device)
    function = partial(functional.mlp, backend=backend)

    def of_liger(module, shape: Mlp) -> Work:
        silu_mul = module.LigerSiLUMulFunction.apply
        return differentiated(lambda x, gate, up, down: F.linear(silu_mul(F.linear(x, gate), F.linear(x, up)), down), *make(shape))

    return case(
        f"SwiGLU MLP forward+backward {shape.rows} x {shape.dim} x {shape.hidden}", shape, shape, make, eager_mlp,
        {
            f"ours: {backend}": peers.ours(backend, device, lambda shape: differentiated(function, *make(shape))),
            "eager": lambda shape: eager_mlp,
            "torch checkpoint": lambda shape: partial(checkpoint, eager_mlp, use_reentrant=False),
            "torch.compile": lambda shape: peers.compiled(eager_mlp, device),
            "Liger SwiGLU": peers.liger(device, of_liger),
        },
        terms=max(shape.hidden, shape.rows), flops=18 * shape.rows * shape.dim * shape.hidden,
    )  # fmt: skip


def cases(args: argparse.Namespace) -> list[Case]:
    """The most telling first: Llama's attention at 8k, one of each other kind, then the rest of attention."""
    dtype, device = args.dtype, args.device
    attention = attention_cases(args.small, dtype, device)
    mlp = mlp_case(Mlp(24, 16, 40, dtype, device) if args.small else Mlp(8192, 4096, 14336, dtype, device))
    return [*attention[:4], mlp, *elementwise.cases(args.small, dtype, device), *attention[4:]]


if __name__ == "__main__":
    sys.exit(main("kernels", "Kernels beside PyTorch's and others'.", cases))
