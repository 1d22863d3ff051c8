"""The operations on their own: attention, MLP and norm as functions."""

import pytest
import torch

from ckpt_ext import BlockSpec, TransformerBlock, functional, reference, rng
from ckpt_ext.masks import Mask
from ckpt_ext.spec import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS
from ckpt_ext.testing import assert_accurate

backends = pytest.mark.parametrize("backend", ["aten", "triton"])
F64 = torch.float64


def randn(*shape, seed=0, dtype=F64):
    values = torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).requires_grad_()


def qkv(heads=4, kv_heads=2, queries=7, keys=7, dim=16, dtype=F64):
    shapes = ((2, heads, queries, dim), (2, kv_heads, keys, dim), (2, kv_heads, keys, dim))
    return tuple(randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def with_gradients(function, tensors):
    """The result and its gradients for one fixed random gradient; masks as after one seed."""
    torch.manual_seed(4)
    y = function(*tensors)
    grad = torch.randn(y.shape, dtype=F64, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, tensors, grad)


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def drawn(p, x):
    """The mask state that a function reserves after the seed."""
    return rng.Dropout(rng.reserve(x.device), p, rng.Site.FUNCTIONAL) if p else None


@backends
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries, keys", [(7, 7), (1, 9), (9, 3), (17, 18)])
def test_attention(backend, p, causal, queries, keys):
    tensors = qkv(queries=queries, keys=keys)
    actual = with_gradients(lambda *t: functional.attention(*t, causal=causal, dropout_p=p, scale=0.3, backend=backend), tensors)
    expected = with_gradients(lambda *t: reference.attention(*t, mask=Mask(causal), scale=0.3, dropout=drawn(p, t[0])), tensors)
    assert_same(actual, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_agrees_with_sdpa(causal):
    tensors = qkv(queries=5, keys=8)
    actual = with_gradients(lambda *t: functional.attention(*t, causal=causal), tensors)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert_same(actual, with_gradients(lambda *t: sdpa(*t, is_causal=causal, enable_gqa=True), tensors))


STRIDED = {
    "every other element": lambda t: torch.cat((t, t), -1)[..., ::2],
    "elements far apart": lambda t: t.mT.contiguous().mT,
    "elements repeated": lambda t: t[..., :1].expand_as(t),
    "heads repeated": lambda t: t[:, :1].expand_as(t),
}


@backends
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED)
def test_attention_of_any_strides(backend, which, view):
    tensors = [t.detach() for t in qkv()]
    tensors[which] = view(tensors[which])
    dense = [t.contiguous().requires_grad_() for t in tensors]
    for t in tensors:
        t.requires_grad_()
    actual = with_gradients(lambda *t: functional.attention(*t, backend=backend), tensors)
    assert_same(actual, with_gradients(lambda *t: reference.attention(*t, mask=Mask(True)), dense))


def test_saved_tensors_may_come_back_with_other_strides():
    tensors = qkv()
    expected = with_gradients(lambda *t: reference.attention(*t, mask=Mask(True)), tensors)

    def spread(t):
        return t.unsqueeze(-1).repeat_interleave(2, -1)

    with torch.autograd.graph.saved_tensors_hooks(spread, lambda t: t[..., 0]):
        actual = with_gradients(functional.attention, tensors)
    assert_same(actual, expected)


@backends
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_attention_scale_may_be_negative_or_zero(backend, scale):
    tensors = qkv()
    actual = with_gradients(lambda *t: functional.attention(*t, scale=scale, backend=backend), tensors)
    assert_same(actual, with_gradients(lambda *t: reference.attention(*t, mask=Mask(True), scale=scale), tensors))


@backends
@pytest.mark.parametrize("function", [
    lambda x, **options: functional.attention(*(x.view(2, 3, 2, 8).transpose(1, 2),) * 3, **options),
    lambda x, **options: functional.mlp(x, None, torch.ones(4, 16, dtype=F64), torch.ones(16, 4, dtype=F64), activation="gelu", **options),
    lambda x, **options: functional.norm(x, torch.ones(16, dtype=F64), **options),
    lambda x, **options: TransformerBlock(BlockSpec(dim=16, heads=2, hidden_dim=20), dtype=F64, **options)(x),
], ids=["attention", "mlp", "norm", "block"])
def test_results_may_be_changed_in_place(backend, function):
    x = randn(2, 3, 16)
    y = function(x, backend=backend)
    y += 1
    torch.nn.functional.dropout(y, 0.5, inplace=True)
    if y.dim() == 3:
        y.sum().backward()
        assert x.grad.isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # attention keeps its output
            y.sum().backward()


@pytest.mark.parametrize("shape", [(0, 8), (0, 2, 8), (2, 0, 8)])
def test_mlp_and_norm_of_nothing(shape):
    x, w = torch.zeros(shape, dtype=F64, requires_grad=True), randn(8, 8)
    for y in (functional.mlp(x, None, w, w, activation="relu"), functional.norm(x, w[0])):
        assert y.shape == shape
        y.sum().backward()
    assert not w.grad.any()


@pytest.mark.parametrize("chunk", [1, 40, 300, 1 << 20])
@pytest.mark.parametrize("causal", [True, False])
def test_blocked_attention_does_not_depend_on_its_chunks(monkeypatch, chunk, causal):
    monkeypatch.setattr("ckpt_ext.backends.aten_attention._CHUNK_ELEMENTS", chunk)
    tensors = qkv(queries=9, keys=6)
    actual = with_gradients(lambda *t: functional.attention(*t, causal=causal, dropout_p=0.3, backend="aten"), tensors)
    assert_same(actual, with_gradients(lambda *t: reference.attention(*t, mask=Mask(causal), dropout=drawn(0.3, t[0])), tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_low_precision_attention_is_as_accurate_as_eager(dtype, p):
    low = qkv(queries=33, keys=33, dtype=dtype)
    high = tuple(t.detach().double().requires_grad_() for t in low)
    truth = with_gradients(lambda *t: reference.attention(*t, mask=Mask(True), dropout=drawn(p, t[0])), high)
    eager = with_gradients(lambda *t: reference.attention(*t, mask=Mask(True), dropout=drawn(p, t[0])), low)
    actual = with_gradients(lambda *t: functional.attention(*t, dropout_p=p, backend="aten"), low)
    for a, b, c in zip(actual, eager, truth, strict=True):
        assert a.dtype == dtype
        assert_accurate(a, b, c, terms=33 * 2)


def test_no_attention_weights_of_all_rows_are_alive_at_once():
    from ckpt_ext.memory import LiveStorages

    tensors = tuple(t.float().detach().requires_grad_() for t in qkv(queries=2048, keys=2048, dim=16))
    whole = 2 * 4 * 2048 * 2048 * 4
    with LiveStorages() as counter:
        functional.attention(*tensors, dropout_p=0.1, backend="aten").sum().backward()
    assert counter.peak < whole / 2


@backends
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("activation", [*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS])
def test_mlp(backend, p, activation):
    x, w_up, w_down, w_gate = randn(2, 3, 8), randn(20, 8, seed=1), randn(8, 20, seed=2), randn(20, 8, seed=3)
    gated = activation in GATED_ACTIVATIONS
    tensors = (x, w_up, w_down, w_gate) if gated else (x, w_up, w_down)

    def ours(x, w_up, w_down, w_gate=None):
        return functional.mlp(x, w_gate, w_up, w_down, activation=activation, dropout_p=p, backend=backend)

    def explicit(x, w_up, w_down, w_gate=None):
        gate = None if w_gate is None else (x @ w_gate.T).flatten(0, 1)
        return (reference.hidden(gate, (x @ w_up.T).flatten(0, 1), activation, drawn(p, x)) @ w_down.T).view(x.shape)

    assert_same(with_gradients(ours, tensors), with_gradients(explicit, tensors))


@pytest.mark.parametrize("name, values", [
    ("silu", torch.nn.functional.silu),
    ("gelu", torch.nn.functional.gelu),
    ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ("relu", torch.relu),
    ("relu2", lambda x: torch.relu(x) ** 2),
])
@backends
def test_activations_by_name(backend, name, values):
    x = torch.linspace(-4, 4, 33, dtype=F64)[:, None]
    one = torch.ones(1, 1, dtype=F64)
    torch.testing.assert_close(functional.mlp(x, None, one, one, activation=name, backend=backend), values(x), rtol=0, atol=1e-12)


def test_mlp_keeps_its_input_alone_and_runs_only_gate_and_up_again():
    from torch.utils.flop_counter import FlopCounterMode

    x, w_gate, w_up, w_down = randn(4, 8), randn(20, 8), randn(20, 8), randn(8, 20)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        y = functional.mlp(x, w_gate, w_up, w_down)
    assert set(packed) == {t.data_ptr() for t in (x, w_gate, w_up, w_down)}
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    product = 2 * 4 * 8 * 20
    assert counter.get_total_flops() == (2 + 3 * 2) * product  # gate and up again, then two gradients of each of three products


@backends
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("biased", [True, False])
def test_norm(backend, kind, offset, biased):
    tensors = (randn(2, 3, 10), randn(10, seed=1), *([randn(10, seed=2)] if biased else []))
    options = {"kind": kind, "offset": offset}
    actual = with_gradients(lambda *t: functional.norm(*t, **options, backend=backend), tensors)
    assert_same(actual, with_gradients(lambda *t: reference.norm(*t, **options), tensors))


def test_norm_agrees_with_torch():
    x, weight, bias = randn(4, 10), randn(10, seed=1), randn(10, seed=2)
    assert_same([functional.norm(x, weight, eps=1e-6)], [torch.nn.functional.rms_norm(x, (10,), weight, 1e-6)])
    expected = torch.nn.functional.layer_norm(x, (10,), weight, bias, 1e-6)
    assert_same([functional.norm(x, weight, bias, kind="layer", eps=1e-6)], [expected])


@backends
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradcheck(backend, p):
    def seeded(function, **options):
        def run(*tensors):
            torch.manual_seed(2)
            return function(*tensors, backend=backend, **options)

        return run

    check = torch.autograd.gradcheck
    assert check(seeded(functional.attention, dropout_p=p), qkv(queries=5, keys=6), fast_mode=True)
    assert check(seeded(functional.mlp, dropout_p=p), (randn(5, 8), randn(20, 8), randn(20, 8), randn(8, 20)), fast_mode=True)
    assert check(seeded(functional.norm), (randn(5, 8), randn(8)), fast_mode=True)


def test_gemma_weight_is_added_to_one_in_float32():
    weight = torch.full((8,), 0.00390625, dtype=torch.bfloat16)  # 1 + w rounds to 1 in bfloat16
    x = torch.tensor([[1.0, -1.0] * 4], dtype=torch.float32)
    expected = torch.full_like(x, 1.00390625)
    torch.testing.assert_close(functional.norm(x, weight, eps=0.0, offset=1.0).abs(), expected, rtol=1e-6, atol=0)


def test_attention_under_autocast_takes_tensors_of_several_dtypes():
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = functional.attention(q, k.bfloat16(), v.bfloat16())
        assert torch.equal(mixed, functional.attention(q, k, v)) and mixed.dtype == torch.bfloat16
