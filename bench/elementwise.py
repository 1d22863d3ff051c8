"""Norms and elementwise kernels, which memory bounds: part of `python -m bench.kernels`."""

from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import peers
from bench.clock import Work
from bench.functions import Tensors, case, differentiated, draw, raw, raw_case
from bench.harness import Case
from ckpt_ext import functional, reference, rng
from ckpt_ext.backends import select
from ckpt_ext.rng import Dropout, Site

DROPPED = 0.1


class Rows(NamedTuple):
    rows: int
    width: int
    dtype: torch.dtype
    device: torch.device

    def traffic(self, tensors: int) -> int:
        """Bytes of that many tensors of this shape."""
        return tensors * self.rows * self.width * self.dtype.itemsize


def norm_case(kind: str, shape: Rows, only: str) -> Case:
    """An RMSNorm or LayerNorm, forward or backward."""
    device = shape.device

    def make(shape: Rows) -> tuple[Tensors, Tensor]:
        inputs = {"x": draw(shape.rows, shape.width, like=shape, seed=0), "weight": draw(shape.width, like=shape, seed=1)}
        if kind == "layer":
            inputs["bias"] = draw(shape.width, like=shape, seed=2)
        return inputs, draw(shape.rows, shape.width, like=shape, seed=3)

    def of_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias) if kind == "layer" else F.rms_norm(x, weight.shape, weight, 1e-5)

    def of_liger(module: ModuleType, shape: Rows) -> Work:
        if kind == "layer":
            return differentiated(lambda x, weight, bias: module.LigerLayerNormFunction.apply(x, weight, bias, 1e-5), *make(shape), only)
        # Not in place: it would write into the gradient that all runs share.
        return differentiated(lambda x, weight: module.LigerRMSNormFunction.apply(x, weight, 1e-5, 0.0, "llama", False), *make(shape), only)

    backend, written_out = peers.backend_for(device), partial(reference.norm, kind=kind)
    function = partial(functional.norm, kind=kind, backend=backend)
    return case(
        f"{kind} norm {only} {shape.rows} x {shape.width}", shape, shape, make, written_out,
        {
            f"ours: {backend}": peers.ours(backend, device, lambda shape: differentiated(function, *make(shape), only)),
            "torch": lambda shape: of_torch,
            "torch.compile": lambda shape: peers.compiled(written_out, device),
            "Liger": peers.liger(device, of_liger),
        },
        only, terms=max(shape.rows, shape.width), bytes=shape.traffic(2 if only == "forward" else 3),
    )  # fmt: skip


def activation_cases(shape: Rows) -> list[Case]:
    """SwiGLU's elementwise middle, and its gradients with hidden made again, as a backward that keeps no hidden needs them."""
    device = shape.device
    kernels = select(peers.backend_for(device), device)

    def make(names: tuple[str, ...], shape: Rows) -> Tensors:
        return {name: draw(shape.rows, shape.width, like=shape, seed=seed) for seed, name in enumerate(names)}

    def forward(gate: Tensor, up: Tensor) -> Tensors:
        return {"hidden": F.silu(gate) * up}

    def backward(gate: Tensor, up: Tensor, grad: Tensor) -> Tensors:
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        return {"dgate": grad * up * (sigmoid + silu * (1 - sigmoid)), "dup": grad * silu, "hidden": silu * up}

    def our_backward(gate: Tensor, up: Tensor, grad: Tensor) -> Tensors:
        return dict(zip(("dgate", "dup", "hidden"), kernels.activation_backward(grad, gate, up, "silu", None), strict=True))

    inputs, with_grad = partial(make, ("gate", "up")), partial(make, ("gate", "up", "grad"))

    def of_liger(module: ModuleType, shape: Rows) -> Work:
        return raw(inputs, lambda gate, up: {"hidden": module.LigerSiLUMulFunction.apply(gate, up)}, shape)

    return [
        raw_case(
            f"swiglu forward {shape.rows} x {shape.width}", shape, inputs, forward,
            lambda gate, up: {"hidden": kernels.activation(gate, up, "silu", None)}, {"Liger": peers.liger(device, of_liger)},
            bytes=shape.traffic(3),
        ),
        raw_case(
            f"swiglu backward {shape.rows} x {shape.width}", shape, with_grad, backward, our_backward, {}, bytes=shape.traffic(6)
        ),
    ]  # fmt: skip


def residual_case(shape: Rows) -> Case:
    """`residual + drop(x)`. Masks of different generators differ, so what is checked is the share of elements that are kept."""
    device = shape.device
    kernels = select(peers.backend_for(device), device)
    dropout = Dropout(rng.reserve(device), DROPPED, Site.FUNCTIONAL)

    def make(shape: Rows) -> Tensors:
        """x is never so small that adding it goes unseen."""
        x = draw(shape.rows, shape.width, like=shape, seed=0).abs() + 1
        return {"x": x, "residual": draw(shape.rows, shape.width, like=shape, seed=1)}

    def ours(x: Tensor, residual: Tensor) -> Tensors:
        return {"y": kernels.dropout_add(x, residual, dropout), "residual": residual}

    def written_out(x: Tensor, residual: Tensor) -> Tensors:
        return {"y": residual + rng.dropout(x, dropout), "residual": residual}

    def of_torch(x: Tensor, residual: Tensor) -> Tensors:
        return {"y": residual + F.dropout(x, DROPPED), "residual": residual}

    def kept(results: Tensors) -> Tensors:
        return {"kept": (results["y"] != results["residual"]).double().mean()}

    return raw_case(
        f"dropout + residual {shape.rows} x {shape.width}", shape, make, written_out, ours, {}, of_torch,
        bytes=shape.traffic(3), checked=kept, tolerance=5e-2,
    )  # fmt: skip


class Heads(NamedTuple):
    batch: int
    length: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def rope_case(shape: Heads) -> Case:
    """Rotary embedding of all heads; the gradient is the same work."""
    kernels = select(peers.backend_for(shape.device), shape.device)

    def make(shape: Heads) -> Tensors:
        cos, sin = reference.rope_table(shape.length, shape.head_dim, 5e5, dtype=torch.float32, device=shape.device)
        x = draw(shape.batch, shape.length, shape.heads, shape.head_dim, like=shape, seed=0).transpose(1, 2)
        return {"x": x, "cos": cos, "sin": sin}

    def written_out(x: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
        return {"y": reference.rotate(x, cos, sin)}

    return raw_case(
        f"rope {shape.batch} x {shape.length} x {shape.heads} x {shape.head_dim}", shape, make, written_out,
        lambda x, cos, sin: {"y": kernels.rotate(x, cos, sin)}, {},
        bytes=2 * shape.batch * shape.length * shape.heads * shape.head_dim * shape.dtype.itemsize,
    )  # fmt: skip


def cases(small: bool, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Shapes of Llama-8B's blocks at 16k tokens, or tiny ones."""
    narrow, wide = (Rows(40, width, dtype, device) if small else Rows(16384, 128 * width, dtype, device) for width in (32, 112))
    heads = Heads(1, 24, 2, 16, dtype, device) if small else Heads(2, 8192, 32, 128, dtype, device)
    passes = ("forward", "backward")
    return [
        *(norm_case("rms", narrow, only) for only in passes), *activation_cases(wide), residual_case(narrow), rope_case(heads),
        *(norm_case("layer", narrow, only) for only in passes),
    ]  # fmt: skip
