"""The operations on their own: attention, MLP and norm as functions, and what the public edge refuses."""

import pytest
import torch

from ckpt_ext import BlockSpec, Policy, TransformerBlock, functional, reference, rng
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
    expected = with_gradients(lambda *t: reference.attention(*t, causal=causal, scale=0.3, dropout=drawn(p, t[0])), tensors)
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
    assert_same(actual, with_gradients(lambda *t: reference.attention(*t, causal=True), dense))


def test_saved_tensors_may_come_back_with_other_strides():
    tensors = qkv()
    expected = with_gradients(lambda *t: reference.attention(*t, causal=True), tensors)

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
    assert_same(actual, with_gradients(lambda *t: reference.attention(*t, causal=True, scale=scale), tensors))


@backends
@pytest.mark.parametrize("function", [
    lambda x, **options: functional.attention(*(x.view(2, 3, 2, 8).transpose(1, 2),) * 3, **options),
    lambda x, **options: functional.mlp(x, None, torch.ones(4, 16, dtype=F64), torch.ones(16, 4, dtype=F64), activation="gelu", **options),
    lambda x, **options: functional.norm(x, torch.ones(16, dtype=F64), **options),
    lambda x, **options: TransformerBlock(BlockSpec(dim=16, heads=2, hidden_dim=20), dtype=F64, **options)(x),
], ids=["attention", "mlp", "norm", "block"])
def test_results_may_be_changed_in_place(backend, function):
    x = randn(2, 3, 16)
    y = function(x, backend=backend) if function else None
    y += 1 if y.dim() == 3 else 0
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
    assert_same(actual, with_gradients(lambda *t: reference.attention(*t, causal=causal, dropout=drawn(0.3, t[0])), tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_low_precision_attention_is_as_accurate_as_eager(dtype, p):
    low = qkv(queries=33, keys=33, dtype=dtype)
    high = tuple(t.detach().double().requires_grad_() for t in low)
    truth = with_gradients(lambda *t: reference.attention(*t, causal=True, dropout=drawn(p, t[0])), high)
    eager = with_gradients(lambda *t: reference.attention(*t, causal=True, dropout=drawn(p, t[0])), low)
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


# --- refusals ---


def spec(**changes):
    return BlockSpec(**{"dim": 32, "heads": 4, "hidden_dim": 48, **changes})


@pytest.mark.parametrize("changes, message", [
    ({"dim": 0}, "dim must be a positive int, got 0"),
    ({"heads": 2.0}, "heads must be a positive int, got 2.0"),
    ({"heads": 5}, "dim must be a multiple of heads=5"),
    ({"kv_heads": 3}, "kv_heads must divide heads=4, got 3"),
    ({"rope_theta": -1.0}, "rope_theta must be positive, got -1.0"),
    ({"rope_theta": 1e4, "rope_dim": 3}, "rope_dim must be even and at most head_dim=8, got 3"),
    ({"rope_theta": 1e4, "rope_dim": 10}, "rope_dim must be even and at most head_dim=8, got 10"),
    ({"norm": "batch"}, "norm must be one of 'rms', 'layer', got 'batch'"),
    ({"norm_eps": -1.0}, "norm_eps must be non-negative, got -1.0"),
    ({"activation": "swish"}, "activation must be one of 'swiglu'.* got 'swish'"),
    ({"attn_dropout": 1.5}, r"attn_dropout must be a probability in \[0, 1\], got 1.5"),
    ({"mlp_dropout": float("nan")}, r"mlp_dropout must be a probability in \[0, 1\], got nan"),
    ({"residual_dropout": -0.1}, r"residual_dropout must be a probability in \[0, 1\], got -0.1"),
])
def test_spec_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_policy_refuses():
    with pytest.raises(ValueError, match="save must be one of 'input', 'attention', 'all', got 'nothing'"):
        Policy("nothing")


@pytest.mark.parametrize("x, message", [
    (torch.zeros(3, 32), r"x must have shape \[B, T, 32\], got \[3, 32\]"),
    (torch.zeros(1, 3, 31), r"x must have shape \[B, T, 32\], got \[1, 3, 31\]"),
    (torch.zeros(1, 3, 32, dtype=torch.int64), "x must be float64, float32, bfloat16 or float16, got torch.int64"),
    (torch.zeros(1, 3, 32, dtype=torch.float8_e4m3fn), "x must be float64, float32, bfloat16 or float16, got torch.float8"),
    (torch.zeros(1, 3, 32, device="meta"), "must be on x's device meta, got cpu"),
])
def test_block_refuses(x, message):
    with pytest.raises(ValueError, match=message):
        TransformerBlock(spec())(x)


def test_dropout_on_a_device_without_generator_is_refused():
    with pytest.raises(NotImplementedError, match="meta"):
        TransformerBlock(spec(residual_dropout=0.1), device="meta")(torch.zeros(1, 3, 32, device="meta"))


def test_attention_refuses():
    q, k, v = qkv()
    cases = [
        ((q[0], k, v), {}, r"q must have shape \[B, H, T, D\]"),
        ((q, k.float(), v), {}, "k must have q's dtype torch.float64, got torch.float32"),
        ((q, k, v[:, :, 1:]), {}, r"v must have k's shape \[2, 2, 7, 16\], got \[2, 2, 6, 16\]"),
        ((q, k[..., 1:], v[..., 1:]), {}, "k must have q's batch and head size 2 and 16"),
        ((q[:, :3], k, v), {}, "k must have a number of heads that divides q's 3, got 2"),
        ((q, k, v), {"scale": torch.tensor(0.5)}, "scale must be a finite number"),
        ((q, k, v), {"dropout_p": 2.0}, r"dropout_p must be a probability in \[0, 1\], got 2.0"),
        ((q, k, v), {"backend": "cuda"}, "backend must be one of 'auto', 'triton', 'aten', got 'cuda'"),
        ((q, k.to("meta"), v.to("meta")), {}, "k must be on q's device cpu, got meta"),
    ]
    for tensors, options, message in cases:
        with pytest.raises(ValueError, match=message):
            functional.attention(*tensors, **options)


def test_mlp_and_norm_refuse():
    x, w_gate, w_up, w_down = randn(4, 8), randn(20, 8), randn(20, 8), randn(8, 20)
    cases = [
        (lambda: functional.mlp(x, w_gate, w_up, w_down, activation="gelu"), "w_gate must be None for activation 'gelu'"),
        (lambda: functional.mlp(x, None, w_up, w_down), "w_gate must be given for activation 'swiglu'"),
        (lambda: functional.mlp(x, w_gate, w_up, w_down, activation="?"), "activation must be one of"),
        (lambda: functional.mlp(x, w_gate[:, 1:], w_up, w_down), r"w_gate must have shape \[\*, 8\], got \[20, 7\]"),
        (lambda: functional.mlp(x, w_gate[1:], w_up, w_down), r"w_gate must have w_up's shape \[20, 8\], got \[19, 8\]"),
        (lambda: functional.mlp(x, w_gate, w_up, w_down[:, 1:]), r"w_down must have shape \[\*, 20\], got \[8, 19\]"),
        (lambda: functional.mlp(x, w_gate, w_up, w_down, dropout_p=-1), "dropout_p must be a probability"),
        (lambda: functional.norm(x, w_up), r"weight must have shape \[8\], got \[20, 8\]"),
        (lambda: functional.norm(x, x[0], kind="group"), "kind must be one of 'rms', 'layer', got 'group'"),
        (lambda: functional.norm(x.long(), x[0]), "x must be float64"),
        (lambda: functional.norm(x, x[0].to(torch.complex128)), "weight must be float64.* got torch.complex128"),
        (lambda: functional.norm(x, None), "weight must be a Tensor, got None"),
        (lambda: functional.norm(x, x[0], eps="a"), "eps must be a finite number, got 'a'"),
        (lambda: functional.norm(x[:, :0], x[0, :0]), r"x must have at least one element in a row, got shape \[4, 0\]"),
        (lambda: functional.mlp(x, None, w_up.long(), w_down, activation="gelu"), "w_up must be float64.* got torch.int64"),
        (lambda: functional.mlp(x, None, w_up[0, 0], w_down, activation="gelu"), "w_up must be a matrix"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


# --- children that the engine would step around ---


class Doubled(torch.nn.Linear):
    """Stands for any subclass with a forward of its own: an adapter, a quantised or parametrised linear."""

    def forward(self, x):
        return 2 * super().forward(x)


def hooked(block):
    block.up_proj.register_forward_hook(lambda *_: None)


def pre_hooked(block):
    block.q_proj.register_forward_pre_hook(lambda *_: None)


def backward_hooked(block):
    block.mlp_norm.register_full_backward_hook(lambda *_: None)


def replaced(block):
    block.v_proj = Doubled(32, 32)


def parametrized(block):
    torch.nn.utils.parametrizations.weight_norm(block.out_proj)


def patched(block):
    block.down_proj.forward = lambda x: x


def another_norm(block):
    block.mlp_norm = torch.nn.LayerNorm(32)


def another_epsilon(block):
    block.attention_norm.eps = 10.0


def eight_bits(block):
    block.v_proj.to(torch.float8_e4m3fn)


def quantised(block):
    block.k_proj.weight = torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.uint8), requires_grad=False)


@pytest.mark.parametrize("change, name", [
    (hooked, "up_proj"), (pre_hooked, "q_proj"), (backward_hooked, "mlp_norm"), (replaced, "v_proj"), (parametrized, "out_proj"),
    (patched, "down_proj"), (quantised, "k_proj"), (another_norm, "mlp_norm"), (another_epsilon, "attention_norm.eps"),
    (eight_bits, "v_proj"),
])  # fmt: skip
def test_a_child_that_does_more_than_multiply_is_refused_by_name(change, name):
    block = TransformerBlock(spec())
    change(block)
    with pytest.raises(NotImplementedError, match=name):
        block(torch.zeros(1, 3, 32))


def test_a_weight_of_another_shape_is_refused_by_name():
    block = TransformerBlock(spec())
    block.up_proj.weight = torch.nn.Parameter(torch.zeros(47, 32))
    with pytest.raises(ValueError, match=r"up_proj.weight must have shape \[48, 32\], got \[47, 32\]"):
        block(torch.zeros(1, 3, 32))


@pytest.mark.parametrize("options, message", [
    ({"policy": "input"}, "policy must be a Policy, got 'input'"),
    ({"backend": "cuda"}, "backend must be one of 'auto', 'triton', 'aten', got 'cuda'"),
])
def test_a_block_refuses_what_is_no_policy_or_backend(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerBlock(spec(), **options)
