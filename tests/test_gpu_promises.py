"""Kernels on a GPU: the same bits every time, offsets past 2^31, streams, a second device. The same bodies run small on the interpreter."""

import math
from contextlib import nullcontext

import pytest
import torch

from ckpt_ext import functional, reference, rng
from ckpt_ext.backends import select
from ckpt_ext.kernels.launch import INTERPRETED
from ckpt_ext.rng import Dropout, Site
from ckpt_ext.testing import assert_accurate, draw, eager_attention, gradients, heads, on_both

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
GIB = 2**30


@pytest.fixture(autouse=True)
def no_leftovers():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def needs(device: str, gib: int) -> None:
    """Skip where the GPU has not that much memory left."""
    if device != "cpu" and torch.cuda.mem_get_info()[0] < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


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
    eager, truth = (gradients(lambda q, k, v: eager_attention(q, k, v), last, grad[-1:], dtype) for dtype in (None, F64))
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
