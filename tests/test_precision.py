"""Mixed dtypes and autocast: what is computed in which dtype is decided in the forward pass, and the replay repeats it."""

import contextlib

import pytest
import torch

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock, functional
from ckpt_ext.testing import assert_accurate

SPEC = BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=48, rope_theta=1e4, residual_dropout=0.2)
BF16 = torch.bfloat16


def block(dtype=torch.float32, save="input", kind=TransformerBlock):
    torch.manual_seed(0)
    return kind(SPEC, policy=Policy(save), dtype=dtype)


def stream(dtype=torch.float32):
    return torch.randn(2, 6, SPEC.dim, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def gradients(module, x, forward=contextlib.nullcontext, backward=contextlib.nullcontext):
    torch.manual_seed(2)
    with forward():
        y = module(x)
    with backward():
        return y, torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))


def autocast(dtype=BF16, **options):
    return lambda: torch.autocast("cpu", dtype=dtype, **options)


CONTEXTS = {
    "outside": contextlib.nullcontext,
    "inside": autocast(),
    "another dtype": autocast(torch.float16),
    "disabled": autocast(enabled=False),
    "no cache": autocast(cache_enabled=False),
}


@pytest.mark.parametrize("backward", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("save", ["input", "attention"])
def test_replay_computes_in_the_forward_dtypes_wherever_backward_runs(save, backward):
    x = stream()
    y, expected = gradients(block(save="all"), x, autocast())
    replayed, actual = gradients(block(save=save), x, autocast(), backward)
    assert y.dtype == torch.float32 and torch.equal(y, replayed)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(actual, expected, strict=True))


def test_autocast_is_as_accurate_as_eager_under_autocast():
    x = stream()
    exact = block(torch.float64, kind=EagerBlock)
    exact.load_state_dict(block().state_dict())
    _, truth = gradients(exact, x.detach().double().requires_grad_())
    _, eager = gradients(block(kind=EagerBlock), x, autocast())
    _, actual = gradients(block(), x, autocast())
    for a, b, c in zip(actual, eager, truth, strict=True):
        assert_accurate(a, b, c, terms=SPEC.hidden_dim)


def test_autocast_disabled_inside_autocast():
    x = stream()
    _, plain = gradients(block(), x)

    @contextlib.contextmanager
    def nested():
        with torch.autocast("cpu", dtype=BF16), torch.autocast("cpu", enabled=False):
            yield

    _, actual = gradients(block(), x, nested)
    assert all(torch.equal(a, b) for a, b in zip(actual, plain, strict=True))


@pytest.mark.parametrize("backend", ["aten", "triton"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_low_precision_stream_through_float32_parameters(backend, dtype):
    module = TransformerBlock(SPEC, backend=backend)
    x = stream(dtype)
    y, grads = gradients(module, x)
    assert y.dtype == dtype
    assert [g.dtype for g in grads] == [dtype, *(p.dtype for p in module.parameters())]
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_float32_norm_weights_in_a_low_precision_block(backend):
    module = TransformerBlock(SPEC, backend=backend, dtype=BF16)
    module.attention_norm.float(), module.mlp_norm.float()
    _, grads = gradients(module, stream(BF16))
    assert [g.dtype for g in grads] == [BF16, *(p.dtype for p in module.parameters())]


def test_functions_follow_autocast():
    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=BF16):
        out, y = functional.attention(q, q, q), functional.mlp(x, None, w, w, activation="silu")
    assert out.dtype == y.dtype == BF16
    (out.sum() + y.sum()).backward()
    assert q.grad.dtype == x.grad.dtype == w.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype, other", [(BF16, torch.float16), (torch.float16, BF16)])
@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_output_keeps_the_streams_dtype_under_autocast_to_another(backend, dtype, other):
    module = TransformerBlock(SPEC, backend=backend)
    with torch.autocast("cpu", dtype=other):
        y = module(stream(dtype))
    assert y.dtype == dtype
    y.sum().backward()
