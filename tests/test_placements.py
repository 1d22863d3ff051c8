"""Norms before, behind and over branches, and branches side by side: against the reference, and against each other in each policy."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock, checkpoint_sequential, functional, offload
from ckpt_ext.kernels import tiles
from ckpt_ext.memory import LiveStorages, saved_bytes
from ckpt_ext.projections import Dense
from ckpt_ext.testing import assert_accurate, eager_block, twin
from ckpt_ext.weights import BlockWeights, NormWeights

SAVES = ("input", "attention", "all")
SHAPE = {"dim": 16, "heads": 4, "kv_heads": 2, "hidden_dim": 28}
GPT = {"norm": "layer", "activation": "gelu", "qkv_bias": True, "out_bias": True, "mlp_bias": True}
DROPOUT = {"attn_dropout": 0.2, "residual_dropout": 0.3, "mlp_dropout": 0.1}
PLACEMENTS = {
    "pre": {},
    "post": {"norm_placement": "post"},
    "branch": {"norm_placement": "branch"},
    "sandwich": {"norm_placement": "sandwich"},
    "parallel": {"parallel": True},
}
placements = pytest.mark.parametrize("placement", PLACEMENTS)
new_placements = pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "pre"])
kinds = pytest.mark.parametrize("kind", [{"rope_theta": 1e4}, GPT], ids=["rms", "layer"])
dropouts = pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["", "dropout"])


def spec_of(placement, **options):
    return BlockSpec(**{**SHAPE, **PLACEMENTS[placement], **options})


def inputs(batch=2, length=9, dtype=torch.float64, dim=SHAPE["dim"]):
    torch.manual_seed(5)
    x = torch.randn(batch, length, dim, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), torch.randn_like(x).to(dtype)


def results(block, x, grad):
    """Output and the gradients of all that requires one, by name; masks as after one seed."""
    torch.manual_seed(11)
    y = block(x)
    wanted = {name: t for name, t in (("x", x), *block.named_parameters()) if t.requires_grad}
    return {"y": y.detach(), **dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), grad), strict=True))}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def by_hand(block, x):
    """The block's formula, written down placement by placement, without any of the package's."""
    spec, norm = block.spec, type(block.attention_norm).forward

    def n1(t):
        return norm(block.attention_norm, t)

    def n2(t):
        return norm(block.mlp_norm, t)

    def attention(t):
        q, k, v = (p(t).unflatten(-1, (-1, spec.head_dim)).transpose(1, 2) for p in (block.q_proj, block.k_proj, block.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return block.out_proj(out.transpose(1, 2).flatten(2))

    def mlp(t):
        return block.down_proj(F.silu(block.gate_proj(t)) * block.up_proj(t))

    if spec.parallel:
        return x + attention(n1(x)) + mlp(n2(x))
    match spec.norm_placement:
        case "pre":
            mid = x + attention(n1(x))
            return mid + mlp(n2(mid))
        case "post":
            mid = n1(x + attention(x))
            return n2(mid + mlp(mid))
        case "branch":
            mid = x + n1(attention(x))
            return mid + n2(mlp(mid))
        case "sandwich":
            mid = x + norm(block.attention_out_norm, attention(n1(x)))
            return mid + norm(block.mlp_out_norm, mlp(n2(mid)))


@placements
def test_the_reference_is_the_formula(placement):
    block = eager_block(spec_of(placement, norm="layer"))
    x, _ = inputs()
    torch.testing.assert_close(block(x), by_hand(block, x), rtol=1e-12, atol=1e-13)


def test_post_is_the_encoder_layer_of_torch():
    spec = BlockSpec(**{**SHAPE, "kv_heads": 4}, norm_placement="post", causal=False, **{**GPT, "activation": "relu"})
    theirs = torch.nn.TransformerEncoderLayer(
        spec.dim, spec.heads, spec.hidden_dim, dropout=0.0, activation="relu", layer_norm_eps=spec.norm_eps, batch_first=True,
        dtype=torch.float64,
    )  # fmt: skip
    ours = TransformerBlock(spec, dtype=torch.float64)
    modules = {
        "attention_norm": theirs.norm1, "mlp_norm": theirs.norm2, "out_proj": theirs.self_attn.out_proj,
        "up_proj": theirs.linear1, "down_proj": theirs.linear2,
    }  # fmt: skip
    state = {f"{name}.{part}": t for name, module in modules.items() for part, t in module.state_dict().items()}
    for part in ("weight", "bias"):
        pieces = getattr(theirs.self_attn, f"in_proj_{part}").detach().chunk(3)
        state |= {f"{name}_proj.{part}": piece for name, piece in zip("qkv", pieces, strict=True)}
    ours.load_state_dict(state)
    x, grad = inputs()
    (y, grad_x), (expected, expected_grad_x) = ((b(x), torch.autograd.grad(b(x), x, grad)[0]) for b in (ours, theirs))
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(grad_x, expected_grad_x, rtol=1e-11, atol=1e-12)


@new_placements
@kinds
@dropouts
@pytest.mark.parametrize("slices", [1, 3])
def test_equals_the_reference_in_float64_and_itself_in_every_policy(placement, kind, dropout, slices):
    reference = eager_block(spec_of(placement, **kind, **dropout))
    x, grad = inputs()
    expected = results(reference, x, grad)
    actual = results(twin(reference, policy=Policy(slices=slices)), x, grad)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-10, atol=1e-11, msg=name)
    for save in SAVES[1:]:
        assert_same(results(twin(reference, policy=Policy(save, slices)), x, grad), actual)


@new_placements
def test_qk_norms_and_an_inner_width_of_its_own(placement):
    reference = eager_block(spec_of(placement, qk_norm="row", head_dim=6, rope_theta=1e4, window=4, softcap=5.0, sinks=True))
    x, grad = inputs()
    expected = results(reference, x, grad)
    actual = results(twin(reference), x, grad)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-10, atol=1e-11, msg=name)
    assert_same(results(twin(reference, policy=Policy("all")), x, grad), actual)


@new_placements
def test_segments_and_offload_change_no_bit(placement, monkeypatch):
    monkeypatch.setattr(offload, "LEAST_BYTES", 0)
    spec = spec_of(placement, **DROPOUT)
    x, grad = inputs(dtype=torch.float32)
    bases = [eager_block(spec, torch.float32) for _ in range(3)]

    def run(policy, segments=None):
        blocks = torch.nn.ModuleList(twin(base, policy=policy) for base in bases)
        chain = torch.nn.Sequential(*blocks)
        if segments is not None:
            chain.forward = lambda x: checkpoint_sequential(blocks, x, segments=segments)
        return results(chain, x, grad)

    expected = run(Policy(slices=2))
    assert_same(run(Policy(slices=2), segments=2), expected)
    assert_same(run(Policy(slices=2, offload=True)), expected)
    assert_same(run(Policy("attention", slices=2, offload=True)), expected)


@new_placements
@pytest.mark.parametrize(
    "backend, dtype, slices",
    [(backend, dtype, slices) for backend, dtype in (("aten", torch.float32), ("aten", torch.bfloat16)) for slices in (1, 3)]
    + [("triton", torch.float32, 2)],
)
def test_low_precision_is_as_accurate_as_eager(placement, backend, dtype, slices):
    low = eager_block(spec_of(placement, rope_theta=1e4, **DROPOUT), dtype)
    x, grad = inputs(batch=1, length=12, dtype=dtype)
    truth = results(twin(low, EagerBlock, torch.float64), x.detach().double().requires_grad_(), grad.double())
    rival = results(low, x, grad)
    actual = results(twin(low, policy=Policy(slices=slices), backend=backend), x, grad)
    for name in truth:
        assert actual[name].dtype == dtype
        assert_accurate(actual[name], rival[name], truth[name], terms=SHAPE["hidden_dim"])


@new_placements
def test_triton_equals_the_reference_and_itself_in_every_policy(placement):
    reference = eager_block(spec_of(placement, **GPT, **DROPOUT))
    x, grad = inputs(batch=1, length=5)
    expected = results(reference, x, grad)
    actual = results(twin(reference, backend="triton", policy=Policy(slices=2)), x, grad)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-10, atol=1e-11, msg=name)
    assert_same(results(twin(reference, backend="triton", policy=Policy("all", slices=2)), x, grad), actual)


@new_placements
def test_a_fused_mlp_reads_the_stream_as_each_placement_has_it(placement, monkeypatch):
    monkeypatch.setattr(tiles, "fused_mlp", lambda *_: True)
    reference = eager_block(spec_of(placement, rope_theta=1e4, **DROPOUT))
    x, grad = inputs(batch=1, length=4)
    expected = results(reference, x, grad)
    actual = results(twin(reference, backend="triton", policy=Policy(slices=2)), x, grad)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-10, atol=1e-11, msg=name)
    again = results(twin(reference, backend="triton", policy=Policy("all", slices=2)), x, grad)
    assert_same(again, actual)


@new_placements
@pytest.mark.parametrize("save", ["input", "all"])
def test_autocast_is_as_accurate_as_eager_under_autocast(placement, save):
    low = eager_block(spec_of(placement, rope_theta=1e4), torch.float32)
    x, grad = inputs(batch=1, length=12, dtype=torch.float32)
    truth = results(twin(low, EagerBlock, torch.float64), x.detach().double().requires_grad_(), grad.double())

    def under_autocast(block):
        forward = block.forward
        block.forward = lambda x: torch.autocast("cpu", dtype=torch.bfloat16)(forward)(x)
        return results(block, x, grad)

    rival, actual = under_autocast(twin(low, EagerBlock)), under_autocast(twin(low, policy=Policy(save, 2)))
    for name in truth:
        assert actual[name].dtype == torch.float32
        # What a product gives is rounded to bfloat16 in both, and each weight's gradient once.
        assert_accurate(actual[name].bfloat16(), rival[name], truth[name], terms=SHAPE["hidden_dim"])


@new_placements
@pytest.mark.parametrize("save, x_needs_grad", [("input", True), ("all", False)])
def test_what_is_frozen_changes_no_other_gradient(placement, x_needs_grad, save):
    whole = twin(eager_block(spec_of(placement, **GPT, residual_dropout=0.2), torch.float32), policy=Policy(save, 2))
    x, grad = inputs(dtype=torch.float32)
    expected = results(whole, x, grad)
    x.requires_grad_(x_needs_grad)
    names = [name for name, _ in whole.named_parameters()]
    # Each alone, and all but each.
    for trained in [*([name] for name in names), *([other for other in names if other != name] for name in names)]:
        for name, parameter in whole.named_parameters():
            parameter.requires_grad_(name in trained)
        actual = results(whole, x, grad)
        wanted = ["y", *(["x"] if x_needs_grad else []), *trained]
        assert set(actual) == set(wanted)
        assert_same(actual, {name: expected[name] for name in actual})


@new_placements
@pytest.mark.parametrize("save", ["input", "all"])
def test_gradcheck(placement, save):
    spec = BlockSpec(dim=4, heads=2, kv_heads=1, hidden_dim=6, rope_theta=1e4, **PLACEMENTS[placement], **DROPOUT)
    block = twin(eager_block(spec), policy=Policy(save, 2))
    x, _ = inputs(batch=1, length=3, dim=4)
    names, parameters = zip(*block.named_parameters(), strict=True)

    def run(x, *tensors):
        torch.manual_seed(1)
        return torch.func.functional_call(block, dict(zip(names, tensors, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@placements
@dropouts
def test_what_is_saved(placement, dropout):
    spec = spec_of(placement, **dropout)
    x = torch.randn(2, 9, spec.dim, requires_grad=True)
    state = 16 if dropout else 0
    tokens, attention_width = 2 * 9, spec.heads * spec.head_dim
    inner = 4 * (2 * attention_width + 2 * spec.kv_heads * spec.head_dim + spec.heads + 2 * spec.hidden_dim)  # q, out; k, v; lse; gate, up
    # Of rows of the stream: x, normed rows, mid, and what the norms of branches or sums are taken of. Of norms: the statistics, float32.
    rows, norms = {"pre": (4, 2), "post": (4, 2), "branch": (4, 2), "sandwich": (6, 4), "parallel": (3, 2)}[placement]
    expected = {
        "input": 4 * spec.dim,
        "attention": 4 * (spec.dim + attention_width + spec.heads),
        "all": inner + 4 * (rows * spec.dim + norms),
    }
    for save in SAVES:
        block = TransformerBlock(spec, policy=Policy(save))
        assert saved_bytes(lambda block=block: block(x), list(block.parameters())) == tokens * expected[save] + state, save


@new_placements
def test_nothing_is_kept_past_the_saved_tensors(placement):
    spec = spec_of(placement, **DROPOUT)
    blocks = torch.nn.Sequential(*(TransformerBlock(spec) for _ in range(3)))
    x = torch.randn(2, 9, spec.dim, requires_grad=True)
    with LiveStorages(list(blocks.parameters())) as memory:
        y = blocks(x)
        assert memory.live == 3 * (x.nbytes + 16), "the inputs of two blocks, y, and three RNG states"
        y.sum().backward()
        del y
        assert memory.live == x.grad.nbytes + sum(p.grad.nbytes for p in blocks.parameters())


@new_placements
@pytest.mark.parametrize("dropout", [{}, {"residual_dropout": 0.2}], ids=["", "dropout"])
def test_backward_holds_a_few_rows_more_than_the_plain_block_at_most(placement, dropout):
    def peak(placement):
        spec = spec_of(placement, dim=32, heads=4, kv_heads=4, hidden_dim=64, **dropout)
        block = TransformerBlock(spec, policy=Policy(slices=4)).requires_grad_(False)
        x = torch.randn(1, 256, spec.dim, requires_grad=True)
        y = block(x)
        grad = torch.randn_like(y)
        with LiveStorages(list(block.parameters())) as memory:
            torch.autograd.grad(y, x, grad)
        return memory.peak / x.nbytes

    assert peak(placement) <= peak("pre") + 2.25


def matmul_flops(run):
    with FlopCounterMode(display=False) as counter:
        run()
    products = (torch.ops.aten.mm, torch.ops.aten.addmm)
    return sum(count for op, count in counter.get_flop_counts()["Global"].items() if op in products)


@placements
def test_backward_runs_no_projection_again_that_it_does_not_need(placement):
    spec = spec_of(placement, heads=1, kv_heads=1, hidden_dim=64)
    tokens, square, wide = 64, 2 * 64 * spec.dim**2, 2 * 64 * spec.dim * spec.hidden_dim
    assert spec.head_dim == spec.dim
    projections = 4 * square + 3 * wide
    spared = {"pre": wide, "parallel": wide + square}.get(placement, 0)
    for save, again in (("input", projections - spared), ("all", 0)):
        block = TransformerBlock(spec, policy=Policy(save, 1))
        x = torch.randn(1, tokens, spec.dim, requires_grad=True)
        y = block(x)
        assert matmul_flops(lambda y=y: y.sum().backward()) == 2 * projections + again, save
        block.requires_grad_(False)
        y = block(x)
        assert matmul_flops(lambda y=y: y.sum().backward()) == projections + again, f"{save}: frozen weights cost no product"


def test_an_offset_is_that_of_every_norm():
    spec = spec_of("sandwich", norm_offset=1.0, activation="geglu_tanh")
    gemma, plain = TransformerBlock(spec), TransformerBlock(dataclasses.replace(spec, norm_offset=0.0))
    norms = ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")
    assert all(not getattr(gemma, name).weight.any() and getattr(plain, name).weight.eq(1).all() for name in norms)
    state = gemma.state_dict()
    plain.load_state_dict({name: t + 1 if name.split(".")[0] in norms else t for name, t in state.items()})
    x, grad = inputs(dtype=torch.float32)
    assert_same(results(gemma, x, grad), results(plain, x, grad))


@placements
def test_children_and_state_dict(placement):
    block = TransformerBlock(spec_of(placement))
    out_norms = {"attention_out_norm.weight", "mlp_out_norm.weight"}
    assert out_norms & set(block.state_dict()) == (out_norms if placement == "sandwich" else set())
    twin(block)


@pytest.mark.parametrize("placement", ["post", "branch", "sandwich"])
def test_only_plain_pre_norm_blocks_may_run_their_branches_side_by_side(placement):
    with pytest.raises(ValueError, match=f"parallel must be False where norm_placement='{placement}', got True"):
        spec_of(placement, parallel=True)
    with pytest.raises(ValueError, match="norm_placement must be .*, got 'behind'"):
        BlockSpec(**SHAPE, norm_placement="behind")


def plain_weights(**parts):
    dim, hidden = SHAPE["dim"], SHAPE["hidden_dim"]
    square, norm = Dense(torch.eye(dim)), NormWeights(torch.ones(dim))
    half = Dense(torch.zeros(dim // 2, dim))
    wide = Dense(torch.zeros(hidden, dim))
    whole = BlockWeights(norm, square, half, half, square, norm, wide, wide, Dense(torch.zeros(dim, hidden)))
    return whole._replace(**parts)


@pytest.mark.parametrize(
    "options, parts, message",
    [
        ({"norm_placement": "sandwich"}, {}, "attention_out_norm must be given where norm_placement='sandwich', got None"),
        ({"norm_placement": "post"}, {"mlp_norm": None}, "mlp_norm must be given where norm_placement='post', got None"),
        ({}, {"mlp_out_norm": NormWeights(torch.ones(16))}, "mlp_out_norm must be None where norm_placement='pre', got NormWeights"),
        ({}, {"gate": None}, "gate must be given where activation='swiglu', got None"),
        ({"activation": "gelu"}, {}, "gate must be None where activation='gelu', got Dense"),
        ({"qk_norm": "head"}, {}, "q_norm must be given where qk_norm='head', got None"),
        ({"sinks": True}, {}, "sinks must be given where sinks=True, got None"),
    ],
)
def test_weights_must_be_those_of_the_spec(options, parts, message):
    x = torch.zeros(1, 2, SHAPE["dim"])
    functional.block(x, plain_weights(), BlockSpec(**SHAPE))
    with pytest.raises(ValueError, match=message):
        functional.block(x, plain_weights(**parts), BlockSpec(**SHAPE, **options))
