"""Kernels on a GPU: real tiles, every dtype, against float64. The same bodies run small on the interpreter."""

import pytest
import torch
import torch.nn.functional as F

from ckpt_ext import functional, reference, rng
from ckpt_ext.backends import NormSpec, select
from ckpt_ext.kernels.mlp_backward import mlp_backward
from ckpt_ext.kernels.mlp_forward import mlp_forward
from ckpt_ext.rng import Dropout, Site
from ckpt_ext.testing import assert_accurate, draw, eager_attention, gradients, heads, on_both

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def full_precision_and_no_leftovers():
    """Products of float32 in float32, also those that we are compared with."""
    assert torch.get_float32_matmul_precision() == "highest"
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def assert_true(ours, written_out, inputs, grad, terms: int) -> None:
    """Every result is in the dtype of its input and as near to float64's as `written_out` is in that dtype, times two."""
    actual = gradients(ours, inputs, grad)
    for result, eager, truth in zip(actual, gradients(written_out, inputs, grad), gradients(written_out, inputs, grad, F64), strict=True):
        assert result.dtype == grad.dtype
        assert_accurate(result, eager, truth, terms=terms)


# --- attention ---


@pytest.mark.parametrize(
    "device, dtype, head_dim, causal, p, lengths",
    on_both(
        [(BF16, 16, True, 0.2, (18, 18)), (F32, 24, False, 0.0, (3, 17))],
        [
            *((dtype, head_dim, True, p, (300, 300)) for dtype in (BF16, F16) for head_dim in (64, 128) for p in (0.0, 0.2)),
            (F32, 64, True, 0.2, (300, 300)), (F32, 128, True, 0.0, (300, 300)), (F64, 64, True, 0.2, (130, 130)),
            (BF16, 80, False, 0.0, (300, 300)), (BF16, 256, True, 0.0, (300, 300)), (BF16, 16, True, 0.0, (70, 300)),
            (F16, 128, True, 0.0, (300, 70)), (F32, 256, True, 0.0, (70, 70)),
        ],
    ),
)  # fmt: skip
def test_attention(device, dtype, head_dim, causal, p, lengths):
    batch, count, kv_count = (1, 2, 1) if device == "cpu" else (2, 8, 2)
    inputs, grad = heads(device, dtype, batch, count, kv_count, *lengths, head_dim)
    assert_true(
        lambda q, k, v: functional.attention(q, k, v, causal=causal, dropout_p=p, backend="triton"),
        lambda q, k, v: eager_attention(q, k, v, causal=causal, p=p), inputs, grad, terms=count // kv_count * max(lengths) + head_dim,
    )  # fmt: skip


@pytest.mark.parametrize(
    "device, dtype, head_dim, length, options",
    on_both(
        [(F32, 16, 18, ("window", "softcap", "sinks", "segments", "padding"))],
        [(BF16, 128, 300, (option,)) for option in ("window", "softcap", "sinks", "segments", "padding")]
        + [(dtype, 64, 300, ("window", "softcap", "sinks", "segments", "padding")) for dtype in (BF16, F16, F32)],
    ),
)  # fmt: skip
def test_attention_options(device, dtype, head_dim, length, options):
    inputs, grad = heads(device, dtype, 1, 4, 2, length, length, head_dim)
    place = torch.arange(length, device=device)
    chosen = {
        "window": {"window": length // 4}, "softcap": {"softcap": 2.0}, "sinks": {},
        "segments": {"segment_ids": (place // (length // 3)).expand(1, -1)}, "padding": {"key_mask": (place % 5 != 1).expand(1, -1)},
    }  # fmt: skip
    keywords = {name: value for option in options for name, value in chosen[option].items()}
    if "sinks" in options:
        inputs.append(draw(4, device=device, dtype=dtype, seed=8))

    def ours(q, k, v, sinks=None):
        return functional.attention(q, k, v, sinks=sinks, backend="triton", **keywords)

    assert_true(ours, lambda *tensors: eager_attention(*tensors, **keywords), inputs, grad, terms=4 * length + head_dim)


# --- norms, elementwise ---


@pytest.mark.parametrize(
    "device, dtype, kind, width",
    on_both(
        [(BF16, "rms", 40), (F32, "layer", 70)],
        [(dtype, kind, 4096) for dtype in (BF16, F16, F32, F64) for kind in ("rms", "layer")]
        + [(BF16, "rms", width) for width in (128, 768, 8192, 40000)] + [(F32, "layer", 40000)],
    ),
)  # fmt: skip
def test_norm(device, dtype, kind, width):
    rows = 20 if device == "cpu" else 300
    inputs = [draw(rows, width, device=device, dtype=dtype), draw(width, device=device, dtype=dtype, seed=1)]
    if kind == "layer":
        inputs.append(draw(width, device=device, dtype=dtype, seed=2))
    assert_true(
        lambda *tensors: functional.norm(*tensors, kind=kind, backend="triton"),
        lambda *tensors: reference.norm(*tensors, kind=kind),
        inputs, draw(rows, width, device=device, dtype=dtype, seed=3), terms=max(rows, width),
    )  # fmt: skip


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize(
    "device, dtype, name, p",
    on_both(
        [(BF16, "silu", 0.2), (F32, "gelu_tanh", 0.0)],
        [(BF16, name, p) for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2") for p in (0.0, 0.2)]
        + [(dtype, "silu", 0.2) for dtype in (F16, F32, F64)] + [(F32, "gelu", 0.0)],
    ),
)  # fmt: skip
def test_activation(device, dtype, name, p, gated):
    backend = select("triton", torch.device(device))
    rows, width = (9, 70) if device == "cpu" else (300, 1408)
    gate, up, grad = (draw(rows, width, device=device, dtype=dtype, seed=seed) for seed in range(3))
    gate = gate if gated else None
    torch.manual_seed(7)  # as `gradients` does
    drop = Dropout(rng.reserve(device), p, Site.MLP) if p else None

    def plain(*tensors):
        return reference.hidden(*tensors, name, drop) if gated else reference.hidden(None, *tensors, name, drop)

    inputs = [gate, up] if gated else [up]
    hidden = backend.activation(gate, up, name, drop)
    grad_gate, grad_up, again = backend.activation_backward(grad, gate, up, name, drop)
    assert torch.equal(hidden, again)
    actual = [hidden, grad_gate, grad_up] if gated else [hidden, grad_up]
    for result, eager, truth in zip(actual, gradients(plain, inputs, grad), gradients(plain, inputs, grad, F64), strict=True):
        assert_accurate(result, eager, truth)


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize(
    "device, dtype, head_dim, rope_dim",
    on_both([(BF16, 16, 16)], [(BF16, 128, 128), (F16, 96, 80), (F32, 64, 64), (F64, 64, 64)]),
)  # fmt: skip
def test_rope(device, dtype, head_dim, rope_dim, inverse):
    length = 9 if device == "cpu" else 300
    x = draw(2, length, 4, head_dim, device=device, dtype=dtype).transpose(1, 2)
    wide = F64 if dtype == F64 else F32
    cos, sin = reference.rope_table(length, rope_dim, 1e4, dtype=wide, device=torch.device(device))
    turn = -sin if inverse else sin
    actual = select("triton", x.device).rotate(x, cos, sin, inverse=inverse)
    assert_accurate(actual, reference.rotate(x, cos, turn), reference.rotate(x.double(), cos.double(), turn.double()))


@pytest.mark.parametrize("device, dtype", on_both([(BF16,)], [(BF16,), (F16,), (F32,), (F64,)]))
def test_dropout_add(device, dtype):
    rows, width = (9, 70) if device == "cpu" else (300, 4099)
    x, residual = (draw(rows, width, device=device, dtype=dtype, seed=seed) for seed in range(2))
    drop = Dropout(rng.reserve(device), 0.3, Site.MLP_RESIDUAL)
    actual = select("triton", x.device).dropout_add(x, residual, drop)
    assert_accurate(actual, residual + rng.dropout(x, drop), residual.double() + rng.dropout(x.double(), drop))
    weight = draw(width, device=device, dtype=dtype, seed=2)
    total, y, _ = select("triton", x.device).add_norm(x, residual, weight, None, NormSpec("rms", 1e-5), drop)
    assert torch.equal(total, actual)
    assert_accurate(y, reference.norm(total, weight), reference.norm(total.double(), weight.double()), terms=width)
    # The mask is the CPU's.
    on_cpu = rng.dropout(torch.ones(rows, width), Dropout(drop.state.cpu(), 0.3, Site.MLP_RESIDUAL))
    assert torch.equal((rng.dropout(torch.ones_like(x), drop) != 0).cpu(), on_cpu != 0)


@pytest.mark.parametrize("device, dtype", on_both([(F32,)], [(BF16,), (F16,), (F32,), (F64,)]))
def test_mlp(device, dtype):
    rows, dim, hidden = (9, 16, 24) if device == "cpu" else (300, 512, 1408)
    shapes = [(rows, dim), (hidden, dim), (hidden, dim), (dim, hidden)]
    inputs = [draw(*shape, device=device, dtype=dtype, seed=seed) * shape[1] ** (-0.5 * (seed > 0)) for seed, shape in enumerate(shapes)]
    assert_true(
        lambda *tensors: functional.mlp(*tensors, backend="triton"),
        lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
        inputs, draw(rows, dim, device=device, dtype=dtype, seed=9), terms=hidden,
    )  # fmt: skip


@pytest.mark.parametrize("device, dtype", on_both([(F32,)], [(BF16,), (F16,), (F32,)]))
def test_fused_mlp(device, dtype):
    rows, dim, hidden = (9, 16, 24) if device == "cpu" else (300, 512, 1408)
    x, grad = draw(rows, dim, device=device, dtype=dtype), draw(rows, hidden, device=device, dtype=dtype, seed=9)
    w_gate, w_up = (draw(hidden, dim, device=device, dtype=dtype, seed=seed) * dim**-0.5 for seed in (1, 2))
    drop = Dropout(rng.reserve(device), 0.2, Site.MLP)

    def plain(gate, up):
        return reference.hidden(gate, up, "silu", drop)

    # The gradients of gate and up alone: products with a weight are torch's on both sides.
    gates = [[x.to(wide) @ weight.to(wide).mT for weight in (w_gate, w_up)] for wide in (dtype, F64)]
    eager, truth = (gradients(plain, inputs, grad.to(inputs[0].dtype)) for inputs in gates)
    made, *_ = mlp_forward(x, w_gate, w_up, pointwise="silu", dropout=drop)
    grad_gate, grad_up, again = mlp_backward(grad, x, w_gate, w_up, pointwise="silu", dropout=drop)
    assert torch.equal(made, again)
    for result, expected, exact in zip((made, grad_gate, grad_up), eager, truth, strict=True):
        assert_accurate(result, expected, exact, terms=dim)
