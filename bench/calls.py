"""The calls of launchers that `bench.aot` compiles: shapes of real models on tensors without memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ckpt_ext.kernels.activation import activation_backward, activation_forward
from ckpt_ext.kernels.add_norm import add_norm as fused_add_norm
from ckpt_ext.kernels.attention_backward import attention_backward
from ckpt_ext.kernels.attention_forward import attention_forward
from ckpt_ext.kernels.mlp_backward import mlp_backward
from ckpt_ext.kernels.mlp_forward import mlp_forward
from ckpt_ext.kernels.mlp_tile import Norm
from ckpt_ext.kernels.norm import norm_backward, norm_forward
from ckpt_ext.kernels.norm_stats import norm_stats
from ckpt_ext.kernels.residual import dropout as drop
from ckpt_ext.kernels.residual import dropout_add
from ckpt_ext.kernels.rope import rotate
from ckpt_ext.masks import Mask
from ckpt_ext.rng import Dropout

BATCH, LENGTH = 2, 4096


@dataclass(frozen=True, slots=True)
class Call:
    """A call of launchers on the meta device, and the operations in matrix products of each kernel that has some."""

    run: Callable[[], object]
    dtype: torch.dtype = torch.bfloat16
    operations: Mapping[str, float] = field(default_factory=dict)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of a shape and a dtype, without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


DROPOUT = Dropout(meta(2, dtype=torch.int64), p=0.1, site=1)


def attention(
    head_dim: int, dtype: torch.dtype = torch.bfloat16, causal: bool = True, dropout=None, *,
    window: int | None = None, documents: int = 0, dense: bool = False, softcap: float | None = None, sinks: bool = False,
) -> Call:  # fmt: skip
    """Forward and backward of a grouped-query attention."""
    heads, kv_heads = 32, 8
    q, kv = (meta(BATCH, LENGTH, count, head_dim, dtype=dtype).transpose(1, 2) for count in (heads, kv_heads))
    ids = meta(BATCH, LENGTH, dtype=torch.int32) if documents else None
    allowed = meta(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).expand(-1, heads, -1, -1) if dense else None
    sink = meta(heads, dtype=torch.float32) if sinks else None
    options = {
        "mask": Mask(causal, window, ids, ids, allowed), "scale": head_dim**-0.5, "softcap": softcap, "sinks": sink, "dropout": dropout,
    }  # fmt: skip

    def run():
        out, lse = attention_forward(q, kv, kv, **options)
        attention_backward(out, q, kv, kv, out, lse, **options)

    length = LENGTH // max(1, documents)  # documents of equal length
    reach = min(window or length, length)
    pairs = BATCH * heads * (LENGTH // length) * (reach * (reach + 1) // 2 + (length - reach) * reach if causal else length**2)
    products = {"_attention_forward": 2, "_attention_backward_keys": 4, "_attention_backward_queries": 3}
    return Call(run, dtype, {kernel: count * 2 * pairs * head_dim for kernel, count in products.items()})


def norm(kind: str, cols: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    """Forward and backward of a norm, with a bias where it is a layer norm."""
    x, weight = meta(BATCH, LENGTH, cols, dtype=dtype), meta(cols, dtype=dtype)
    bias = weight if kind == "layer" else None

    def run():
        y, stats = norm_forward(x, weight, bias, kind=kind, eps=1e-5)
        norm_backward(y, x, weight, bias, stats, kind=kind, params=True)

    return Call(run, dtype)


def rope(head_dim: int, rope_dim: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    """A rotary embedding and its gradient, angles in float32."""
    x, angle = meta(BATCH, LENGTH, 32, head_dim, dtype=dtype).transpose(1, 2), meta(LENGTH, rope_dim // 2, dtype=torch.float32)

    def run():
        rotate(x, angle, angle)
        rotate(x, angle, angle, inverse=True)

    return Call(run, dtype)


def activation(pointwise: str, gated: bool = True, dropout=None, dtype: torch.dtype = torch.bfloat16, hidden_dim: int = 14336) -> Call:
    """Forward and backward of an MLP's elementwise middle."""
    up = meta(BATCH * LENGTH, hidden_dim, dtype=dtype)
    gate = meta(BATCH * LENGTH, hidden_dim, dtype=dtype) if gated else None

    def run():
        hidden = activation_forward(gate, up, pointwise=pointwise, dropout=dropout)
        activation_backward(hidden, gate, up, pointwise=pointwise, dropout=dropout)

    return Call(run, dtype)


def residual(dropout=None, dtype: torch.dtype = torch.bfloat16) -> Call:
    """A sum with the residual stream, and where there is dropout, dropout alone."""
    x, y = (meta(BATCH, LENGTH, 4096, dtype=dtype) for _ in range(2))

    def run():
        dropout_add(x, y, dropout)
        if dropout is not None:
            drop(x, dropout)

    return Call(run, dtype)


def add_norm(kind: str, cols: int, dropout=None, dtype: torch.dtype = torch.bfloat16) -> Call:
    """A sum with the residual stream and its norm."""
    x, residual, weight = (meta(*shape, dtype=dtype) for shape in ((BATCH, LENGTH, cols), (BATCH, LENGTH, cols), (cols,)))
    bias = weight if kind == "layer" else None
    return Call(lambda: fused_add_norm(x, residual, weight, bias, kind=kind, eps=1e-5, dropout=dropout), dtype)


def mlp(
    pointwise: str, gated: bool = True, dropout=None, dtype: torch.dtype = torch.bfloat16, normed: bool = True, kind: str = "rms"
) -> Call:
    """A fused MLP's hidden layer, forward and backward, from rows that it normalises itself where `normed`."""
    rows, dim, hidden_dim = BATCH * LENGTH, 4096, 14336
    x, grad, norm_weight = meta(rows, dim, dtype=dtype), meta(rows, hidden_dim, dtype=dtype), meta(dim, dtype=dtype)
    w_gate, w_up = meta(hidden_dim, dim, dtype=dtype) if gated else None, meta(hidden_dim, dim, dtype=dtype)

    def run():
        bias = norm_weight if kind == "layer" else None
        norm = {"norm": Norm(kind, norm_weight, bias), "stats": norm_stats(x, kind=kind, eps=1e-5)} if normed else {}
        mlp_forward(x, w_gate, w_up, **norm, pointwise=pointwise, dropout=dropout)
        mlp_backward(grad, x, w_gate, w_up, **norm, pointwise=pointwise, dropout=dropout)

    operations = 2 * rows * dim * hidden_dim * (2 if gated else 1)
    return Call(run, dtype, {"_mlp_fwd": operations, "_mlp_bwd": operations})


# A kernel that is bound by memory has the same binary in float16 as in bfloat16 but for the conversions, so only products have both.
CALLS: dict[str, Call] = {
    "attention d64": attention(64),
    "attention d64 bidirectional": attention(64, causal=False),
    "attention d64 dropout": attention(64, dropout=DROPOUT),
    "attention d64 window sinks": attention(64, window=128, sinks=True),
    "attention d80": attention(80),
    "attention d96": attention(96),
    "attention d96 dropout": attention(96, dropout=DROPOUT),
    "attention d128": attention(128),
    "attention d128 bidirectional": attention(128, causal=False),
    "attention d128 dropout": attention(128, dropout=DROPOUT),
    "attention d128 documents": attention(128, documents=8),
    "attention d128 documents dropout": attention(128, documents=8, dropout=DROPOUT),
    "attention d64 documents dropout": attention(64, documents=8, dropout=DROPOUT),
    "attention d64 everything": attention(64, documents=8, dense=True, softcap=50.0, sinks=True, dropout=DROPOUT),
    "attention d128 everything": attention(128, documents=8, dense=True, softcap=50.0, sinks=True, dropout=DROPOUT),
    "attention d128 dense": attention(128, causal=False, dense=True),
    "attention d128 softcap": attention(128, softcap=50.0),
    "attention d256": attention(256),
    "attention d256 window softcap": attention(256, window=1024, softcap=50.0),
    "attention d256 dropout": attention(256, dropout=DROPOUT),
    "attention d64 float16": attention(64, torch.float16),
    "attention d128 float16": attention(128, torch.float16),
    "attention d256 float16": attention(256, torch.float16),
    "attention d64 float32": attention(64, torch.float32),
    "attention d128 float32": attention(128, torch.float32),
    "attention d128 float32 dropout": attention(128, torch.float32, dropout=DROPOUT),
    "attention d256 float32": attention(256, torch.float32),
    "attention d64 float64": attention(64, torch.float64),
    "attention d128 float64": attention(128, torch.float64),
    "attention d256 float64": attention(256, torch.float64),
    "mlp swiglu": mlp("silu"),
    "mlp swiglu dropout": mlp("silu", dropout=DROPOUT),
    "mlp swiglu without norm": mlp("silu", normed=False),
    "mlp swiglu float16": mlp("silu", dtype=torch.float16),
    "mlp swiglu float32": mlp("silu", dtype=torch.float32),
    "mlp swiglu float64": mlp("silu", dtype=torch.float64),
    "mlp geglu_tanh": mlp("gelu_tanh"),
    "mlp gelu": mlp("gelu", gated=False),
    "mlp geglu layer norm dropout": mlp("gelu", kind="layer", dropout=DROPOUT),
    "rms norm 128": norm("rms", 128),
    "rms norm 4096": norm("rms", 4096),
    "rms norm 8192": norm("rms", 8192),
    "rms norm 16384": norm("rms", 16384),
    "rms norm 65536": norm("rms", 65536),
    "rms norm 4096 float32": norm("rms", 4096, torch.float32),
    "rms norm 8192 float64": norm("rms", 8192, torch.float64),
    "layer norm 768": norm("layer", 768),
    "layer norm 4096": norm("layer", 4096),
    "layer norm 8192": norm("layer", 8192),
    "layer norm 16384": norm("layer", 16384),
    "layer norm 8192 float32": norm("layer", 8192, torch.float32),
    "rope d64": rope(64, 64),
    "rope d128": rope(128, 128),
    "rope d80 of 96": rope(96, 80),
    "rope d128 float32": rope(128, 128, torch.float32),
    "swiglu": activation("silu"),
    "swiglu dropout": activation("silu", dropout=DROPOUT),
    "swiglu float32": activation("silu", dtype=torch.float32),
    "geglu dropout": activation("gelu", dropout=DROPOUT),
    "geglu_tanh dropout": activation("gelu_tanh", dropout=DROPOUT),
    "gelu": activation("gelu", gated=False),
    "gelu_tanh dropout float32": activation("gelu_tanh", gated=False, dropout=DROPOUT, dtype=torch.float32),
    "relu": activation("relu", gated=False),
    "relu2 dropout": activation("relu2", gated=False, dropout=DROPOUT),
    "add rms norm 4096": add_norm("rms", 4096),
    "add rms norm 4096 dropout": add_norm("rms", 4096, DROPOUT),
    "add rms norm 16384": add_norm("rms", 16384),
    "add layer norm 4096": add_norm("layer", 4096),
    "residual": residual(),
    "residual dropout": residual(DROPOUT),
    "residual dropout float32": residual(DROPOUT, torch.float32),
}
"""What to compile, by name. One line each."""
