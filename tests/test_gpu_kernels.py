"""Kernels on a GPU: real tiles, every dtype, offsets past 2^31, streams, a second device. The same bodies run small on the interpreter."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from ckpt_ext import functional, reference, rng
from ckpt_ext.backends import NormSpec, select
from ckpt_ext.kernels.launch import INTERPRETED
from ckpt_ext.kernels.mlp_backward import mlp_backward
from ckpt_ext.kernels.mlp_forward import mlp_forward
from ckpt_ext.rng import Dropout, Site
from ckpt_ext.testing import assert_accurate

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SEED = 7
GIB = 2**30


def on_both(cpu: list[tuple], gpu: list[tuple]):
    """Parameters of a test, device first: few and small ones for the interpreter, and those of a GPU."""
    usable = torch.cuda.is_available() and not INTERPRETED
    marks = [pytest.mark.gpu, pytest.mark.skipif(not usable, reason="needs a GPU, and Triton without its interpreter")]
    skip = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
    return [pytest.param("cpu", *case, marks=skip) for case in cpu] + [pytest.param("cuda", *case, marks=marks) for case in gpu]


def draw(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=F32 if dtype != F64 else F64).to(dtype)


def needs(device: str, gib: int) -> None:
    """Skip where the GPU has not that much memory left."""
    if device != "cpu" and torch.cuda.mem_get_info()[0] < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


@pytest.fixture(autouse=True)
def full_precision_and_no_leftovers():
    """Products of float32 in float32, also those that we are compared with."""
    assert torch.get_float32_matmul_precision() == "highest"
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def gradients(function, inputs, grad, dtype=None):
    """The output of `function` and the gradients of all inputs, computed in `dtype`; masks as after one seed."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    torch.manual_seed(SEED)
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))


def assert_true(ours, written_out, inputs, grad, terms: int) -> None:
    """Every result is in the dtype of its input and as near to float64's as `written_out` is in that dtype, times two."""
    actual = gradients(ours, inputs, grad)
    for result, eager, truth in zip(actual, gradients(written_out, inputs, grad), gradients(written_out, inputs, grad, F64), strict=True):
        assert result.dtype == grad.dtype
        assert_accurate(result, eager, truth, terms=terms)


# --- attention ---


def written_out(q, k, v, sinks=None, *, causal: bool = True, p: float = 0.0, window=None, softcap=None, segment_ids=None, key_mask=None):
    """Attention with every weight in memory, and the masks that the kernels draw after `SEED`."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = q @ k.mT * q.size(-1) ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(k.size(2), device=q.device) - torch.arange(q.size(2), device=q.device)[:, None]
    hidden = (ahead > 0) & causal if window is None else (ahead.abs() >= window) | (ahead > 0) & causal
    if segment_ids is not None:
        hidden = hidden | (segment_ids[:, None, :, None] != segment_ids[:, None, None, :])
    if key_mask is not None:
        hidden = hidden | ~key_mask[:, None, None, :]
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : k.size(2)]
    if p:
        weights = rng.dropout(weights, Dropout(rng.reserve(q.device), p, Site.FUNCTIONAL))
    return weights @ v


def heads(device, dtype, batch, heads, kv_heads, query_count, key_count, head_dim):
    """q, k and v as projections leave them, and the output's gradient."""
    shapes = [(query_count, heads), (key_count, kv_heads), (key_count, kv_heads), (query_count, heads)]
    drawn = (
        draw(batch, length, count, head_dim, device=device, dtype=dtype, seed=seed).transpose(1, 2)
        for seed, (length, count) in enumerate(shapes)
    )
    *inputs, grad = drawn
    return inputs, grad


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
        lambda q, k, v: written_out(q, k, v, causal=causal, p=p), inputs, grad, terms=count // kv_count * max(lengths) + head_dim,
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

    assert_true(ours, lambda *tensors: written_out(*tensors, **keywords), inputs, grad, terms=4 * length + head_dim)


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
    torch.manual_seed(SEED)
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


# --- promises ---


@pytest.mark.parametrize("device, dtype, head_dim, runs", on_both([(F32, 16, 2)], [(BF16, 64, 30), (BF16, 128, 30), (F32, 64, 30)]))
def test_same_bits_every_time(device, dtype, head_dim, runs):
    length = 18 if device == "cpu" else 1000
    inputs, grad = heads(device, dtype, 1, 2, 1, length, length, head_dim)
    x, weight = draw(length, 64, device=device, dtype=dtype), draw(64, device=device, dtype=dtype)

    def run():
        attention = gradients(lambda q, k, v: functional.attention(q, k, v, dropout_p=0.1, backend="triton"), inputs, grad)
        return *attention, *gradients(lambda x, weight: functional.norm(x, weight, backend="triton"), (x, weight), x)

    first = run()
    for _ in range(runs - 1):
        assert all(map(torch.equal, run(), first))


@pytest.mark.parametrize("device, shape", on_both([((40, 32),)], [((2**31 // 4096 + 9, 4096),)]))
def test_norm_past_two_to_the_31_elements(device, shape):
    needs(device, 24)
    x, weight = torch.empty(shape, dtype=BF16, device=device).normal_(), draw(shape[1], device=device, dtype=BF16)
    y, dx, dweight = gradients(lambda x, weight: functional.norm(x, weight, backend="triton"), (x, weight), x)
    assert dweight.isfinite().all()
    last = x[-8:].clone()
    eager, truth = (gradients(reference.norm, (last, weight), last, dtype) for dtype in (None, F64))
    for result, expected, exact in zip((y, dx), eager, truth, strict=False):
        assert_accurate(result[-8:], expected, exact, terms=shape[1])


@pytest.mark.parametrize("device, length, count, head_dim", on_both([(12, 2, 16)], [(2**31 // 128**2 + 9, 128, 128)]))
def test_rope_past_two_to_the_31_elements(device, length, count, head_dim):
    needs(device, 12)
    x = torch.empty(1, length, count, head_dim, dtype=BF16, device=device).normal_().transpose(1, 2)
    cos, sin = reference.rope_table(length, head_dim, 1e4, dtype=F32, device=torch.device(device))
    actual = select("triton", x.device).rotate(x, cos, sin)[:, :, -8:]
    last, *table = x[:, :, -8:], cos[-8:], sin[-8:]
    assert_accurate(actual, reference.rotate(last, *table), reference.rotate(last.double(), *(angles.double() for angles in table)))


@pytest.mark.parametrize("device, shape", on_both([((9, 70),)], [((2**31 // 14336 + 9, 14336),)]))
def test_activation_past_two_to_the_31_elements(device, shape):
    needs(device, 36)
    backend = select("triton", torch.device(device))
    gate, up, grad = (torch.empty(shape, dtype=BF16, device=device).normal_() for _ in range(3))
    drop = Dropout(rng.reserve(device), 0.2, Site.MLP)
    first = shape[0] - 8
    last = [x[first:].clone() for x in (gate, up)]
    plain = [gradients(lambda *x: reference.hidden(*x, "silu", drop.rows_from(first)), last, grad[first:], dtype) for dtype in (None, F64)]
    hidden = backend.activation(gate, up, "silu", drop)[first:].clone()
    grad_gate, grad_up, _ = backend.activation_backward(grad, gate, up, "silu", drop)
    for result, eager, truth in zip((hidden, grad_gate[first:], grad_up[first:]), *plain, strict=True):
        assert_accurate(result, eager, truth)


@pytest.mark.parametrize(
    "device, batch, count, length, head_dim", on_both([(2, 2, 17, 16)], [(2**31 // (32 * 128 * 128) + 3, 32, 128, 128)])
)
def test_attention_past_two_to_the_31_elements(device, batch, count, length, head_dim):
    needs(device, 40)
    inputs, grad = heads(device, BF16, batch, count, 1, length, length, head_dim)
    actual = gradients(lambda q, k, v: functional.attention(q, k, v, backend="triton"), inputs, grad)
    last = [x[-1:] for x in inputs]
    eager, truth = (gradients(lambda q, k, v: written_out(q, k, v), last, grad[-1:], dtype) for dtype in (None, F64))
    for result, expected, exact in zip(actual, eager, truth, strict=True):
        assert_accurate(result[-1:], expected, exact, terms=count * length + head_dim)


def every_kernel(device: str, fill=lambda tensor, values: tensor.copy_(values)) -> list[torch.Tensor]:
    """The results of each kind of kernel, from inputs that `fill` writes into tensors full of NaN."""
    place, length = torch.device(device), 9 if device == "cpu" else 300
    backend = select("triton", place)
    inputs, grad = heads(device, F32, 1, 2, 1, length, length, 16)
    nan = [torch.full_like(x, math.nan) for x in (*inputs, grad)]
    for tensor, values in zip(nan, (*inputs, grad), strict=True):
        fill(tensor, values)
    *inputs, grad = nan
    q = inputs[0]
    rows, weight = q.transpose(1, 2).flatten(0, 1).flatten(1), draw(32, device=device, dtype=F32)
    cos, sin = reference.rope_table(length, 16, 1e4, dtype=F32, device=place)
    drop = Dropout(torch.tensor([3, 4], device=device), 0.3, Site.MLP)
    return [
        *gradients(lambda q, k, v: functional.attention(q, k, v, dropout_p=0.2, backend="triton"), inputs, grad),
        *gradients(lambda x, weight: functional.norm(x, weight, backend="triton"), (rows, weight), rows),
        backend.rotate(q, cos, sin), backend.dropout_add(rows, rows, drop), backend.activation(rows, rows, "silu", drop),
        *backend.activation_backward(rows, rows, rows, "silu", drop),
    ]  # fmt: skip


@pytest.mark.parametrize("device", on_both([()], [()]))
def test_kernels_run_on_the_current_stream(device):
    """On another stream the inputs are written late: a kernel started elsewhere would read the NaN that stood there before."""
    expected = every_kernel(device)
    stream = torch.cuda.Stream() if device != "cpu" else None

    def late(tensor, values):
        if stream is not None:
            torch.cuda._sleep(50_000_000)
        tensor.copy_(values)

    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        actual = every_kernel(device, late)
    if stream is not None:
        torch.cuda.synchronize()
    assert all(result.isfinite().all() for result in actual)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2 or INTERPRETED, reason="needs two GPUs, and Triton without its interpreter")
def test_kernels_run_where_their_tensors_are():
    assert torch.cuda.current_device() == 0
    expected, actual = every_kernel("cuda:0"), every_kernel("cuda:1")
    for result, other in zip(actual, expected, strict=True):
        assert result.device == torch.device("cuda:1")
        torch.testing.assert_close(result.cpu(), other.cpu())
