"""Rotary angles that the caller gives, and weights that are pieces of a larger parameter."""

import dataclasses

import pytest
import torch

from ckpt_ext import BlockSpec, Policy, attention_mask, functional, reference, rope
from ckpt_ext.backends import select
from ckpt_ext.fused_mlp import fused_hidden
from ckpt_ext.projections import Dense
from ckpt_ext.testing import assert_accurate, eager_block, framed

backends = pytest.mark.parametrize("backend", ["aten", "triton"])
SAVES = ("input", "attention", "all")
F64 = torch.float64
SPEC = BlockSpec(dim=24, heads=4, kv_heads=2, hidden_dim=20, rope_theta=1e4, rope_dim=4)
NO_THETA = dataclasses.replace(SPEC, rope_theta=None)
CPU = torch.device("cpu")


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def angles(*shape, dtype=F64):
    angle = draw(*shape, seed=5)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def run(function, x, weights, grad):
    """The output, and gradients of x and of every parameter."""
    leaves = [x, *(t for t in weights.flatten()[1] if t is not None)]
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


TABLES = {
    "for all": lambda: angles(5, 2),
    "batch of one": lambda: angles(1, 5, 2),
    "per entry": lambda: angles(3, 5, 2),
    "expanded": lambda: tuple(t.expand(3, -1, -1) for t in angles(5, 2)),
    "transposed": lambda: tuple(t.transpose(0, 1) for t in angles(5, 3, 2)),
    "half of cat(f, f)": lambda: tuple(torch.cat((t, t), -1)[..., :2] for t in angles(3, 5, 2)),
}


@backends
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_given_table_of_any_strides_equals_the_reference(backend, table):
    weights, x, grad = eager_block(NO_THETA).weights(), draw(3, 5, 24, seed=1).requires_grad_(), draw(3, 5, 24, seed=2)
    expected = run(lambda x: reference.block(x, weights, NO_THETA, table(), None), x, weights, grad)
    actual = run(lambda x: functional.block(x, weights, NO_THETA, table=table(), backend=backend), x, weights, grad)
    assert_same(actual, expected)


def test_a_table_goes_before_theta():
    weights, x = eager_block(SPEC).weights(), draw(2, 5, 24)
    given = functional.block(x, weights, SPEC, table=angles(5, 2))
    assert torch.equal(given, functional.block(x, weights, NO_THETA, table=angles(5, 2)))
    assert not torch.allclose(given, functional.block(x, weights, SPEC))


@backends
def test_what_is_saved_changes_no_bit(backend):
    weights, x, grad = eager_block(SPEC).weights(), draw(3, 5, 24, seed=1).requires_grad_(), draw(3, 5, 24, seed=2)
    table = angles(3, 5, 2, dtype=torch.float32)
    runs = [
        run(lambda x, s=save: functional.block(x, weights, SPEC, table=table, policy=Policy(s), backend=backend), x, weights, grad)
        for save in SAVES
    ]
    for one, two, three in zip(*runs, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_a_packed_batch_turns_each_document_from_its_own_origin():
    """Documents of one row, each with the positions 0, 1, ...: what each of them gives by itself."""
    weights, lengths = eager_block(SPEC).weights(), ((3, 4), (5, 2))
    cos, sin = rope.table(SPEC, 7, F64, CPU)
    positions = torch.tensor([[*range(first), *range(second)] for first, second in lengths])
    ids = torch.tensor([[0] * first + [1] * second for first, second in lengths])
    x = draw(2, 7, 24)
    packed = functional.block(x, weights, SPEC, table=(cos[positions], sin[positions]), mask=attention_mask(segment_ids=ids))
    for row, (first, _) in enumerate(lengths):
        for span in (slice(0, first), slice(first, 7)):
            alone = functional.block(x[row : row + 1, span], weights, SPEC)
            torch.testing.assert_close(packed[row : row + 1, span], alone, rtol=1e-10, atol=1e-12)


@backends
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inverse", [False, True])
def test_rows_of_a_batched_table_equal_a_table_a_row(backend, dtype, inverse):
    x, (cos, sin) = framed(draw(3, 2, 7, 9, dtype=dtype)), (framed(t) for t in angles(3, 7, 3, dtype=torch.bfloat16))
    rotate = select(backend, CPU).rotate
    whole = rotate(x, cos, sin, inverse=inverse)
    for row in range(3):
        assert torch.equal(whole[row : row + 1], rotate(x[row : row + 1], cos[row], sin[row], inverse=inverse))
    turn = -sin if inverse else sin
    eager, truth = reference.rotate(x, cos.to(dtype), turn.to(dtype)), reference.rotate(x.double(), cos.double(), turn.double())
    assert_accurate(whole, eager, truth, terms=2)


def test_a_table_is_saved_once_for_all_blocks_and_never_copied():
    weights, x, table = eager_block(SPEC).weights(), draw(3, 5, 24).requires_grad_(), angles(5, 4)
    halves = tuple(t[:, :2].expand(3, -1, -1) for t in table)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.block(functional.block(x, weights, SPEC, table=halves), weights, SPEC, table=halves)
    tables = [t for t in saved if t.shape == (3, 5, 2)]
    assert len(tables) == 4
    assert {t.untyped_storage().data_ptr() for t in tables} == {t.untyped_storage().data_ptr() for t in table}


@pytest.mark.parametrize(
    "table, message",
    [
        (angles(4, 2), "table's cosines must have shape .5, 2., with or without a batch of 1 or 3 before it, got .4, 2."),
        (angles(5, 4), "table's cosines must have shape"),
        (angles(2, 5, 2), "table's cosines must have shape"),
        (angles(1, 1, 5, 2), "table's cosines must have shape"),
        ((angles(5, 2)[0], angles(3, 5)[1]), "table's sines must have shape"),
        ((angles(5, 2)[0],), "table must be two tensors"),
        ((angles(5, 2)[0], None), "table must be two tensors"),
        ((angles(5, 2)[0], torch.ones(5, 2, dtype=torch.int32)), "table's sines must be float64, .*, got torch.int32"),
        ((angles(5, 2)[0], torch.ones(5, 2, device="meta")), "table's sines must be on x's device cpu, got meta"),
        ((angles(5, 2)[0].requires_grad_(), angles(5, 2)[1]), "table's cosines must not require grad"),
    ],
)
def test_bad_tables_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        functional.block(draw(3, 5, 24), eager_block(SPEC).weights(), SPEC, table=table)


def test_a_rotated_part_wider_than_a_head_is_refused():
    spec = dataclasses.replace(NO_THETA, rope_dim=8)
    with pytest.raises(ValueError, match="rope_dim must be even and at most head_dim=6, got 8"):
        functional.block(draw(3, 5, 24), eager_block(NO_THETA).weights(), spec, table=angles(5, 4))


def fused_by_head(weights, fused, fused_bias):
    """q, k and v as views of one parameter `[heads * 3 * D, dim]`, GPT-NeoX's order."""
    by_head, bias = fused.view(4, 3, 6, 24), fused_bias.view(4, 3, 6)
    q, k, v = (Dense(by_head[:, part], bias[:, part]) for part in range(3))
    return weights._replace(q=q, k=k, v=v)


@backends
@pytest.mark.parametrize("slices", [1, 3])
def test_a_fused_interleaved_parameter_gets_one_gradient(backend, slices):
    spec = dataclasses.replace(SPEC, kv_heads=4, qkv_bias=True)
    weights, x, grad = eager_block(spec).weights(), draw(2, 5, 24, seed=1), draw(2, 5, 24, seed=2)
    fused, bias = draw(72, 24, seed=3).div(5).requires_grad_(), draw(72, seed=4).requires_grad_()
    views = fused_by_head(weights, fused, bias)
    plain = weights._replace(**{
        part: Dense(getattr(views, part).weight.flatten(0, 1), getattr(views, part).bias.flatten()) for part in "qkv"
    })  # fmt: skip
    table = rope.table(spec, 5, F64, CPU)
    expected = torch.autograd.grad(reference.block(x, plain, spec, table, None), (fused, bias), grad)
    actual = torch.autograd.grad(
        functional.block(x, views, spec, policy=Policy(slices=slices), backend=backend), (fused, bias), grad
    )
    assert_same(actual, expected)
    one = torch.autograd.grad(functional.block(x, views, spec).sum(), views.q.weight)[0]
    assert one.shape == (4, 6, 24)


@backends
def test_an_mlp_and_an_output_by_head_are_sliced_by_tokens(backend):
    weights, x, grad = eager_block(SPEC).weights(), draw(2, 5, 24, seed=1).requires_grad_(), draw(2, 5, 24, seed=2)
    by_head = weights._replace(
        up=Dense(weights.up.weight.view(4, 5, 24)), gate=Dense(weights.gate.weight.view(2, 10, 24)),
        out=Dense(weights.out.weight.view(3, 8, 24)),
    )  # fmt: skip
    expected = run(lambda x: functional.block(x, weights, SPEC, backend=backend), x, weights, grad)
    actual = run(lambda x: functional.block(x, by_head, SPEC, policy=Policy(slices=3), backend=backend), x, weights, grad)
    assert_same(actual, expected)


@backends
@pytest.mark.parametrize("slices", [1, 2])
def test_weights_of_any_strides_and_pieces_of_a_split(backend, slices):
    """As GPT-2 has them: `[in, out]`, with q, k and v in one."""
    spec = dataclasses.replace(SPEC, kv_heads=4)
    weights, x, grad = eager_block(spec).weights(), draw(2, 5, 24, seed=1), draw(2, 5, 24, seed=2)
    parts = {name: getattr(weights, name).weight for name in ("q", "k", "v", "out", "gate", "up", "down")}
    joint = torch.cat([parts[name] for name in "qkv"]).t().detach().clone().requires_grad_()
    others = {name: parts[name].t().detach().clone().requires_grad_() for name in ("out", "gate", "up", "down")}
    q, k, v = joint.t().split(24)
    turned = weights._replace(q=Dense(q), k=Dense(k), v=Dense(v), **{name: Dense(t.t()) for name, t in others.items()})
    leaves = (joint, *others.values())
    expected = torch.autograd.grad(functional.block(x, weights, spec), [parts[n] for n in parts], grad)
    actual = torch.autograd.grad(functional.block(x, turned, spec, policy=Policy(slices=slices), backend=backend), leaves, grad)
    assert_same([g.t() for g in actual], [torch.cat(expected[:3]), *expected[3:]])


def test_the_fused_mlp_is_for_matrices_of_contiguous_rows(monkeypatch):
    from ckpt_ext.backends import triton, triton_mlp

    monkeypatch.setattr(triton_mlp, "pays", lambda *_: True)
    rows, columns, heads = Dense(draw(20, 24)), Dense(draw(24, 20).t()), Dense(draw(4, 5, 24))

    def fuses(gate, up):
        return fused_hidden(triton, gate, up, "silu", F64, CPU) is not None

    assert fuses(rows, rows) and fuses(None, rows)
    assert not any(fuses(gate, up) for gate, up in ((columns, rows), (rows, columns), (rows, heads), (heads, heads), (None, heads)))
