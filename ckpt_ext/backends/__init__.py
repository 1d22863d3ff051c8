"""The operations that a block is made of, behind one small interface, and the choice of who runs them.

A backend is a module or object with the functions of `Backend`: plain tensors in, new tensors out, no autograd, no state. Everything
but matrix products with a weight is here; those are the projections' (`ckpt_ext.projections`).
"""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from ..rng import Dropout
from ..scoring import Scoring
from ..spec import BackendName
from ..validate import one_of


class NormSpec(NamedTuple):
    """Static properties of a norm: "rms" or "layer", epsilon, and what is added to its weight before it scales."""

    kind: str
    eps: float
    offset: float = 0.0


class HiddenSpec(NamedTuple):
    """What makes a hidden layer out of rows: `f(gate) * up`, or `f(up)` where there is no gate, of the rows or of their norm."""

    pointwise: str
    w_gate: Tensor | None
    b_gate: Tensor | None
    w_up: Tensor
    b_up: Tensor | None
    norm: NormSpec | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None


class FusedMlp(Protocol):
    """The hidden layer of an MLP in one kernel, rows `[N, dim]` to `[N, hidden]`, and its backward, which runs gate and up again."""

    def pays(self, dim: int, hidden_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this is thought faster than matrix products and elementwise kernels; the same at every call with the same arguments."""
        ...

    def statistics(self, x: Tensor, spec: NormSpec) -> Tensor:
        """Those that `Backend.norm` returns."""
        ...

    def forward(
        self, x: Tensor, stats: Tensor | None, spec: HiddenSpec, dropout: Dropout | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`(hidden, gate, up)`; the latter two are None unless `keep`. They are rounded on the way, so keeping them changes no bit."""
        ...

    def backward(
        self, grad: Tensor, x: Tensor, stats: Tensor | None, spec: HiddenSpec, dropout: Dropout | None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """`(grad_gate, grad_up, hidden)` with the bits of `Backend.activation_backward`; may write to grad."""
        ...


class Backend(Protocol):
    """Shapes: rows `[..., C]`; heads `[B, H, T, D]` with any strides; statistics are float32, or float64 for float64 tensors."""

    name: str
    fused_mlp: FusedMlp | None
    """None where the backend has no such kernels."""

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec) -> tuple[Tensor, Tensor]:
        """Normalised and scaled rows in x's dtype, and their statistics `[rows, 1]` (rms: rstd) or `[rows, 2]` (layer: mean, rstd)."""
        ...

    def norm_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor, spec: NormSpec, *, params: bool,
        onto: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of x, weight and bias; the latter two are None unless `params`, in the dtype of their parameter.

        `onto`, x's gradient on its residual path, is added before the gradient of x is rounded; it has x's shape, and any dtype.
        """
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, spec: NormSpec, dropout: Dropout | None,
        *, into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`(total, y, stats)`: `dropout_add(x, residual, dropout)`, and `norm(total)` with y in x's dtype.

        Total is written to `into` where that is given: contiguous, of residual's shape and dtype; x may lie there.
        """
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotary embedding of `x [B, H, T, D]` by the angles of `cos`, `sin`, R <= D; `inverse` rotates back (the gradient).

        They are `[T, R / 2]`, or `[B or 1, T, R / 2]` where batch entries have angles of their own, of any strides and floating dtype.
        """
        ...

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`(out [B, H, Tq, D], lse [B, H, Tq])`, `H % KV == 0`; out lies in memory as `[B, Tq, H, D]`; sinks are counted in lse.

        A query that sees no key gets zeros, and -inf, or its sink, for lse.
        """
        ...

    def attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k and v, each lying in memory as `[B, T, H, D]`, and of the sinks, if any; P is rebuilt from q, k and lse."""
        ...

    def activation(
        self, gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None, *, overwrite: bool = False
    ) -> Tensor:
        """`drop(f(gate) * up)`, or `drop(f(up))` where gate is None; rows `[N, hidden]`.

        With `overwrite` the result may take the place of up, which is contiguous and of no further use.
        """
        ...

    def activation_backward(
        self, grad: Tensor, gate: Tensor | None, up: Tensor, pointwise: str, dropout: Dropout | None, *, overwrite: bool = False
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """`(grad_gate, grad_up, hidden)`; hidden is the activation's output, made again beside its derivative.

        With `overwrite` the results may take the places of grad, gate and up, in any order; those are contiguous and of no further use.
        """
        ...

    def dropout(self, x: Tensor, dropout: Dropout) -> Tensor:
        """Rows of x with elements dropped and the rest scaled by 1 / (1 - p); its own backward."""
        ...

    def dropout_add(self, x: Tensor, residual: Tensor, dropout: Dropout | None) -> Tensor:
        """`residual + drop(x)` in residual's dtype."""
        ...


def select(name: BackendName, device: torch.device) -> Backend:
    """The backend of that name for tensors on `device`; "auto" is Triton on a GPU, allocations alone for meta tensors, ATen elsewhere.

    Raises ValueError for an unknown name, RuntimeError where an explicit "triton" cannot run: it never falls back.
    """
    one_of("backend", name, get_args(BackendName))
    if name == "auto" and device.type == "meta":
        from . import outline

        return outline
    if name == "aten" or (name == "auto" and device.type != "cuda"):
        from . import aten

        return aten
    if device.type != "cuda" and not interpreting():
        raise RuntimeError(
            f"backend 'triton' must have its tensors on a GPU, got {device}; on a CPU it runs under Triton's interpreter, with "
            "TRITON_INTERPRET=1 set before triton is imported"
        )
    try:
        from . import triton
    except ImportError as error:
        raise RuntimeError(f"backend 'triton' must be able to import triton, got: {error}; backend='aten' needs none") from error
    return triton


def interpreting() -> bool:
    """Whether kernels of this process run under Triton's interpreter. Imports triton only where the environment asks for it."""
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return False
    from ..kernels.launch import INTERPRETED

    return INTERPRETED
