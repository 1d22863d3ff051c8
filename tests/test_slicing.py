"""Both ways to cut the MLP half, by tokens and by hidden units: against the reference, against each other, and the choice between them."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock
from ckpt_ext.memory import LiveStorages, saved_bytes
from ckpt_ext.projections import Dense
from ckpt_ext.slicing import Slicing, slicing, spans, working_set
from ckpt_ext.testing import assert_accurate, eager_block, twin

SAVES = ("input", "attention", "all")
WAYS = {
    "tokens": Slicing(tokens=4, head_groups=1),
    "hidden": Slicing(tokens=4, head_groups=1, hidden=16),
    "hidden-odd": Slicing(tokens=1000, head_groups=2, hidden=7),
    "hidden-lone-unit": Slicing(tokens=1000, head_groups=1, hidden=43),
}
SHAPE = {"dim": 32, "heads": 4, "kv_heads": 2, "hidden_dim": 44}
SPECS = {
    "gated": BlockSpec(**SHAPE, rope_theta=1e4),
    "gated-biases-dropout": BlockSpec(**SHAPE, mlp_bias=True, out_bias=True, attn_dropout=0.2, residual_dropout=0.3),
    "plain-layer-norm": BlockSpec(**SHAPE, norm="layer", activation="gelu", mlp_bias=True, residual_dropout=0.3),
    "plain": BlockSpec(**SHAPE, activation="relu2"),
}
LLAMA = BlockSpec(dim=4096, heads=32, kv_heads=8, hidden_dim=14336, rope_theta=5e5)
MLP = ("gate_proj", "up_proj", "down_proj")
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.fixture
def cut(monkeypatch):
    """Gives every block the same slicing."""
    return lambda way: monkeypatch.setattr("ckpt_ext.functional.slicing", lambda *_, **__: way)


def inputs(spec, *, batch=2, length=9, dtype=torch.float64):
    torch.manual_seed(5)
    x = torch.randn(batch, length, spec.dim, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), torch.randn_like(x).to(dtype)


def results(block, x, grad):
    """Output and all gradients there are, by name; masks as after one seed."""
    torch.manual_seed(11)
    y = block(x)
    leaves = {"x": x, **dict(block.named_parameters())}
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    return {"y": y.detach(), **dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), grad), strict=True))}


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype == expected[name].dtype
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-11, atol=1e-12, msg=name)


@specs
@ways
@pytest.mark.parametrize("batch, length", [(2, 9), (1, 1), (0, 5), (3, 0)])
def test_equals_the_reference_in_float64(spec, way, batch, length, cut):
    cut(way)
    reference = eager_block(spec)
    x, grad = inputs(spec, batch=batch, length=length)
    assert_close(results(twin(reference, backend="aten"), x, grad), results(reference, x, grad))


@pytest.mark.parametrize("spec", [SPECS["gated-biases-dropout"], SPECS["plain"]], ids=["gated", "plain"])
def test_kernels_equal_the_reference_by_hidden_units(spec, cut):
    cut(WAYS["hidden"])
    reference = eager_block(spec)
    x, grad = inputs(spec, batch=1, length=5)
    assert_close(results(twin(reference, backend="triton"), x, grad), results(reference, x, grad))


@ways
@pytest.mark.parametrize("frozen", [
    ("gate_proj.weight",), ("up_proj.weight",), ("down_proj.weight",), ("gate_proj.bias", "down_proj.bias"),
    ("gate_proj.weight", "up_proj.weight", "down_proj.weight"), ("mlp_norm.weight", "x"),
], ids=["gate", "up", "down", "biases", "weights", "norm-and-x"])  # fmt: skip
def test_frozen_parts_get_no_gradient_and_change_no_other(frozen, way, cut):
    cut(way)
    reference = eager_block(SPECS["gated-biases-dropout"])
    block = twin(reference, backend="aten")
    x, grad = inputs(reference.spec)
    for module in (reference, block):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)
    x.requires_grad_("x" not in frozen)
    assert_close(results(block, x, grad), results(reference, x, grad))


@ways
def test_only_the_mlp_is_trained(way, cut):
    """Nothing below mid needs a gradient."""
    cut(way)
    reference = eager_block(SPECS["gated"])
    block = twin(reference, backend="aten")
    x, grad = inputs(reference.spec)
    x.requires_grad_(False)
    for module in (reference, block):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in MLP)
    assert_close(results(block, x, grad), results(reference, x, grad))


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_equal_whatever_is_kept_and_run_after_run(way, dtype, cut):
    cut(way)
    base = eager_block(SPECS["gated-biases-dropout"], dtype)
    x, grad = inputs(base.spec, dtype=dtype)
    kept, grad_bits = x.detach().clone(), grad.clone()
    runs = [results(twin(base, policy=Policy(save), backend="aten"), x, grad) for save in (*SAVES, *SAVES)]
    for run, name in itertools.product(runs[1:], runs[0]):
        assert torch.equal(run[name], runs[0][name]), name
    assert torch.equal(x, kept) and torch.equal(grad, grad_bits)


@pytest.mark.parametrize("save", SAVES)
@ways
def test_backward_twice_gives_the_same_and_writes_no_saved_tensor(way, save, cut):
    cut(way)
    block = twin(eager_block(SPECS["gated"]), policy=Policy(save), backend="aten")
    x, grad = inputs(block.spec)
    y = block(x)
    leaves = [x, *block.parameters()]
    first, second = (torch.autograd.grad(y, leaves, grad, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_is_as_accurate_as_eager(dtype, way, cut):
    cut(way)
    low = eager_block(SPECS["gated-biases-dropout"], dtype)
    x, grad = inputs(low.spec, length=32, dtype=dtype)
    truth = results(twin(low, EagerBlock, torch.float64), x.detach().double().requires_grad_(), grad.double())
    rival, actual = results(low, x, grad), results(twin(low, backend="aten"), x, grad)
    for name in truth:
        assert_accurate(actual[name], rival[name], truth[name], terms=64)


def test_partial_sums_that_cancel_lose_nothing(cut):
    """A pair of hidden units, in slices of their own, adds a large number to dx and takes it away again: sums in bfloat16 would keep the
    large number's error. Likewise two tokens and a weight's gradient."""
    spec = BlockSpec(dim=32, heads=4, hidden_dim=64, activation="relu")
    base = eager_block(spec, torch.bfloat16)
    with torch.no_grad():
        base.up_proj.weight[32:] = base.up_proj.weight[:32]
        base.down_proj.weight[:, 32:] = -base.down_proj.weight[:, :32]
        base.down_proj.weight[:, ::8] *= 1 + 2**-5  # what is left
    x, grad = inputs(spec, length=2, dtype=torch.bfloat16)
    truth = results(twin(base, EagerBlock, torch.float64), x.detach().double().requires_grad_(), grad.double())
    rival = results(base, x, grad)
    for way in (Slicing(1, 1), Slicing(1, 1, hidden=8)):
        cut(way)
        actual = results(twin(base, backend="aten"), x, grad)
        for name in truth:
            assert_accurate(actual[name], rival[name], truth[name], terms=64)


@ways
def test_low_precision_over_float32_parameters_gives_their_dtype(way, cut):
    cut(way)
    block = TransformerBlock(SPECS["gated-biases-dropout"], backend="aten")
    x, grad = inputs(block.spec, dtype=torch.bfloat16)
    assert [t.dtype for t in results(block, x, grad).values()] == [torch.bfloat16] * 2 + [torch.float32] * len(list(block.parameters()))


def flops(block, x):
    """Of forward and backward."""
    with FlopCounterMode(display=False) as counter:
        y = block(x)
        forward = counter.get_total_flops()
        y.sum().backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("way", [WAYS["tokens"], WAYS["hidden-odd"]], ids=["tokens", "hidden"])
def test_no_cut_costs_a_product(way, save, cut):
    block = TransformerBlock(SPECS["gated"], policy=Policy(save), backend="aten")
    x, _ = inputs(block.spec, dtype=torch.float32)
    cut(Slicing(x.size(0) * x.size(1), way.head_groups))
    expected = flops(block, x)
    cut(way)
    assert flops(block, x) == expected


@pytest.mark.parametrize("way", [WAYS["tokens"], WAYS["hidden-odd"]], ids=["tokens", "hidden"])
def test_frozen_weights_cost_no_product(way, cut):
    cut(way)
    block = TransformerBlock(SPECS["gated"], backend="aten")
    x, _ = inputs(block.spec, dtype=torch.float32)
    _, trained = flops(block, x)
    one = 2 * 18 * block.spec.dim * block.spec.hidden_dim
    for frozen, parts in ((1, MLP[1:2]), (3, MLP)):
        for part in parts:
            block.get_submodule(part).requires_grad_(False)
        assert flops(block, x)[1] == trained - frozen * one


@ways
def test_both_ways_save_the_same_bytes(way, cut):
    cut(way)
    spec = SPECS["plain-layer-norm"]
    block = TransformerBlock(spec, policy=Policy("all"), backend="aten")
    x, _ = inputs(spec, dtype=torch.float32)
    rows = x.size(0) * x.size(1)
    kept = spec.dim * 6 + 2 * spec.kv_heads * spec.head_dim + spec.hidden_dim + spec.heads + 4  # x, 2 normed, mid, q, out; k, v; up; lse
    assert saved_bytes(lambda: block(x), ignored=block.parameters()) == rows * kept * 4 + 16


def choose(tokens, slices="auto", spec=LLAMA, dtype=torch.bfloat16, device="cuda", frozen=(), weights_dtype=None):
    """The slicing of a block of `spec`, whose parameters take no memory."""
    block = TransformerBlock(spec, dtype=weights_dtype or dtype, device="meta")
    for name in frozen:
        block.get_submodule(name).requires_grad_(False)
    return slicing(spec, tokens, torch.device(device), slices, dtype, block.weights())


@pytest.mark.parametrize("slices", ["auto", 8])
def test_few_tokens_go_by_hidden_units_and_many_by_tokens(slices):
    by_hidden = [choose(tokens, slices).hidden is not None for tokens in (512, 4096, 8192, 32768, 131072)]
    assert by_hidden == [True, True, True, False, False]


@pytest.mark.parametrize("options", [
    {"frozen": MLP}, {"dtype": torch.float32}, {"weights_dtype": torch.float32},
    {"spec": BlockSpec(dim=4096, heads=32, hidden_dim=14336, mlp_dropout=0.1)},
], ids=["frozen", "float32", "float32-weights", "mlp-dropout"])  # fmt: skip
def test_where_hidden_units_save_nothing_or_cannot_be_cut_it_goes_by_tokens(options):
    assert choose(4096, 8, **options).hidden is None


def test_it_goes_by_tokens_where_nothing_is_differentiated_or_a_projection_cannot_be_cut(monkeypatch):
    with torch.no_grad():
        assert choose(4096).hidden is None
    assert choose(4096).hidden is not None
    monkeypatch.setattr(type(Dense(torch.zeros(1, 1)).kind), "cuttable", False)
    assert choose(4096).hidden is None


@pytest.mark.parametrize("slices", [1, 2, 3, 7, 14336, 20000])
@pytest.mark.parametrize("tokens", [0, 1, 5, 4096, 40000])
def test_a_number_is_the_most_slices_of_either_way(slices, tokens):
    way = choose(tokens, slices)
    assert len(list(spans(tokens, way.tokens))) <= slices
    if slices == 1:
        assert way == Slicing(max(tokens, 1), 1)
    elif way.hidden is not None:
        assert 1 < len(list(spans(LLAMA.hidden_dim, way.hidden))) <= slices


def measured(spec, tokens, way, cut, *, trained=True):
    """Peak of a block's backward beside its input, on fake tensors."""
    cut(way)
    with FakeTensorMode():
        block = TransformerBlock(spec, dtype=torch.bfloat16, backend="aten").requires_grad_(trained)
        x = torch.empty(1, tokens, spec.dim, dtype=torch.bfloat16, requires_grad=True)
        with LiveStorages([x, *block.parameters()]) as memory:
            block(x).sum().backward()
    return memory.peak


@pytest.mark.parametrize("tokens, trained", [(64, True), (256, True), (512, True), (2048, True), (256, False)])
def test_the_way_that_is_chosen_has_the_lower_peak(tokens, trained, cut):
    spec = BlockSpec(dim=128, heads=2, kv_heads=1, hidden_dim=448)
    frozen = () if trained else MLP
    chosen = choose(tokens, 8, spec, frozen=frozen)
    rival = chosen._replace(hidden=56 if chosen.hidden is None else None)
    assert chosen.hidden is None or trained
    peaks = [measured(spec, tokens, way, cut, trained=trained) for way in (chosen, rival)]
    assert peaks[0] <= 1.03 * peaks[1]


@pytest.mark.parametrize("tokens", [256, 2560])
def test_working_sets_follow_what_is_measured(tokens, cut):
    spec = BlockSpec(dim=512, heads=4, kv_heads=2, hidden_dim=1792)
    with FakeTensorMode():
        weights = TransformerBlock(spec, dtype=torch.bfloat16).weights()
        way = slicing(spec, tokens, torch.device("cuda"), "auto", torch.bfloat16, weights)
    peak = measured(spec, tokens, way, cut)
    assert working_set(spec, tokens, 2) == pytest.approx(peak, rel=0.25)
