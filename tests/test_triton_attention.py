"""Attention kernels under the interpreter against `reference.attention` in float64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_ext import reference, rng
from ckpt_ext.kernels.attention_backward import attention_backward
from ckpt_ext.kernels.attention_forward import attention_forward
from ckpt_ext.kernels.launch import record_launches
from ckpt_ext.kernels.tiles import Tile
from ckpt_ext.masks import Mask
from ckpt_ext.rng import Dropout
from ckpt_ext.scoring import Scoring
from ckpt_ext.testing import assert_accurate, framed, poison_allocations

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    poison_allocations(monkeypatch)


def dropout(p: float, seed: int = 1234567890123, offset: int = 5):
    return Dropout(torch.tensor([seed, offset]), p, site=1)


def scoring(*, scale: float = 0.3, softcap=None, sinks=None, drop=None, **mask) -> Scoring:
    return Scoring(Mask(**mask), scale, softcap, sinks, drop)


def inputs(batch=1, heads=2, kv_heads=1, query_count=16, key_count=16, head_dim=16, dtype=torch.float64):
    """grad, q, k and v."""
    torch.manual_seed(query_count * 1000 + key_count)
    query_shape, key_shape = (batch, heads, query_count, head_dim), (batch, kv_heads, key_count, head_dim)
    return tuple(framed(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in (query_shape, query_shape, key_shape, key_shape))


def ours(grad, q, k, v, how: Scoring, tile=None):
    """`(out, lse, dq, dk, dv)` of the kernels, and the gradient of the sinks if there are any."""
    out, lse = attention_forward(q, k, v, **how._asdict(), tile=tile)
    *grads, grad_sinks = attention_backward(grad, q, k, v, out, lse, **how._asdict(), tile=tile)
    assert (grad_sinks is None) == (how.sinks is None)
    return out, lse, *grads, *(() if grad_sinks is None else (grad_sinks,))


def eager(grad, q, k, v, how: Scoring, dtype=torch.float64):
    """The same by the reference, computed in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, *(() if how.sinks is None else (how.sinks,)))]
    how = how._replace(sinks=None if how.sinks is None else leaves[3])
    out = reference.attention(*leaves[:3], **how._asdict())
    return out.detach(), log_sum_exp(*leaves[:2], how).detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))


def log_sum_exp(q, k, how: Scoring):
    scores = q @ k.repeat_interleave(q.size(1) // k.size(1), 1).transpose(-1, -2) * how.scale
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    scores = scores.masked_fill(~reference.visible(how.mask, q.size(2), k.size(2), q.device), -math.inf)
    sinks = scores.new_full((q.size(1),), -math.inf) if how.sinks is None else how.sinks
    return torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1).logsumexp(-1)


def assert_true(tensors, how: Scoring, tile=None):
    """Results agree with the truth: to 1e-12 in float64, else no worse than twice what eager PyTorch in that dtype manages."""
    grad, q, k, _ = tensors
    results, truths = ours(*tensors, how, tile), eager(*tensors, how)
    rivals = truths if q.dtype == torch.float64 else eager(*tensors, how, q.dtype)
    terms = max(q.size(0) * q.size(2) * q.size(1) // k.size(1), k.size(2)) + q.size(3)
    for name, result, truth, rival in zip(NAMES, results, truths, rivals, strict=False):
        assert result.dtype == (torch.promote_types(q.dtype, torch.float32) if name == "lse" else q.dtype), name
        blind = truth == -math.inf
        assert torch.equal(result == -math.inf, blind), name
        result, truth, rival = (x.masked_fill(blind, 0) for x in (result, truth, rival))
        if q.dtype == torch.float64:
            error, largest = (result - truth).abs().max(), truth.abs().max()
            assert error <= 1e-12 * max(1, largest), f"{name}: error {error:.3g} of {largest:.3g}"  # NaN fails too
        else:
            assert_accurate(result, rival, truth, terms=terms)


# --- against the truth ---


COUNTS = [(n, n) for n in (1, 2, 7, 8, 15, 16, 17, 31, 33)] + [(17, 33), (33, 17), (1, 35), (35, 1), (16, 31), (48, 18)]


@pytest.mark.parametrize("causal, drop", [(False, dropout(0.2)), (True, None)], ids=["full-dropout", "causal"])
@pytest.mark.parametrize("query_count, key_count", COUNTS)
def test_lengths(query_count, key_count, causal, drop):
    assert_true(inputs(query_count=query_count, key_count=key_count), scoring(causal=causal, drop=drop))


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (4, 1), (3, 1)])
def test_grouped_queries(heads, kv_heads):
    assert_true(inputs(2, heads, kv_heads, 7, 18), scoring(causal=True, drop=dropout(0.2)))


@pytest.mark.parametrize("head_dim, length", [(40, 20), (64, 20), (80, 20), (256, 3)])
def test_head_dims(head_dim, length):
    assert_true(inputs(query_count=length, key_count=length, head_dim=head_dim), scoring(causal=True, scale=head_dim**-0.5))


def segments(*lengths: int, batch: int = 1):
    """int32 ids `[batch, sum(lengths)]`, ascending from 0, of documents of these lengths; of the last, padding, they are -1."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(torch.int32)
    return ids.where(ids < len(lengths) - 1, -1).expand(batch, -1)


def dense(*shape: int):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.6


def packed(query_count: int, key_count: int) -> dict:
    return {"query_segments": segments(3, query_count - 5, 2), "key_segments": segments(key_count // 2, key_count - key_count // 2, 0)}


FEATURES = {
    "window": lambda *_: scoring(window=5),
    "causal window": lambda *_: scoring(causal=True, window=18),
    "documents": lambda *counts: scoring(**packed(*counts)),
    "causal documents": lambda *counts: scoring(causal=True, **packed(*counts)),
    "key padding on the left": lambda queries, keys: scoring(
        query_segments=torch.zeros(1, 1, dtype=torch.int32).expand(1, queries), key_segments=segments(keys - 3, 3).flip(1)
    ),
    "dense": lambda *counts: scoring(dense=dense(1, 2, *counts)),
    "causal dense of one head": lambda *counts: scoring(causal=True, dense=dense(1, 1, *counts).expand(1, 2, *counts)),
    "softcap": lambda *_: scoring(causal=True, scale=2.0, softcap=1.5),
    "sinks": lambda *_: scoring(sinks=torch.tensor([0.7, -2.0], dtype=torch.float64)),
}


@pytest.mark.parametrize("counts, dtype", [((33, 33), torch.float64), ((48, 7), torch.float64), ((31, 31), torch.float32)], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, counts, dtype):
    how = FEATURES[feature](*counts)
    sinks = None if how.sinks is None else how.sinks.to(dtype)
    assert_true(inputs(query_count=counts[0], key_count=counts[1], dtype=dtype), how._replace(sinks=sinks))


def everything(queries: int, keys: int, dtype: torch.dtype) -> Scoring:
    sinks = torch.tensor([0.5, -1.0], dtype=dtype)
    mask = {"causal": True, "window": 20, "dense": dense(1, 2, queries, keys), **packed(queries, keys)}
    return scoring(scale=0.6, softcap=3.0, sinks=sinks, drop=dropout(0.2), **mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plain", [True, False], ids=["causal", "everything"])
def test_dtypes(dtype, plain):
    assert_true(inputs(1, 2, 1, 33, 33, 40, dtype), scoring(causal=True) if plain else everything(33, 33, dtype))


@st.composite
def problems(draw):
    """Inputs and a scoring: any features together."""
    batch, (heads, kv_heads) = draw(st.integers(1, 2)), draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    query_count, key_count = (draw(st.sampled_from([1, 7, 16, 17, 31, 33, 48])) for _ in range(2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ids = [None, None]
    if (order := draw(st.sampled_from(["none", "sorted", "unsorted"]))) != "none":
        ids = [torch.randint(-1, 3, (batch, count), generator=generator, dtype=torch.int32) for count in (query_count, key_count)]
        ids = [x.sort(1).values for x in ids] if order == "sorted" else ids
    allowed = None
    if draw(st.booleans()):
        shape = [size if draw(st.booleans()) else 1 for size in (batch, heads, query_count, key_count)]
        allowed = (torch.rand(shape, generator=generator) < 0.7).expand(batch, heads, query_count, key_count)
    mask = Mask(draw(st.booleans()), draw(st.none() | st.integers(1, 40)), *ids, allowed)
    sinks = torch.randn(heads, generator=generator, dtype=torch.float64) if draw(st.booleans()) else None
    drop = dropout(0.3) if draw(st.booleans()) else None
    how = Scoring(mask, draw(st.sampled_from([0.3, -1.0])), draw(st.none() | st.just(1.5)), sinks, drop)
    return inputs(batch, heads, kv_heads, query_count, key_count), how


@settings(max_examples=16, deadline=None, derandomize=True, database=None)
@given(problems())
def test_features_go_together(problem):
    assert_true(*problem)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 30.0])
def test_scale_may_be_anything(scale):
    """Negative, zero, and so large that a softmax without its maximum would overflow."""
    assert_true(inputs(query_count=20, key_count=20), scoring(causal=True, scale=scale))


def test_very_negative_scores_do_not_leak_through_the_padding():
    """Keys beyond the last have score 0; where all others score -1000, their weights must not be rebuilt as exp(1000)."""
    grad, q, k, v = inputs(query_count=18, key_count=18)
    assert_true((grad, q.abs() + 10, -(k.abs() + 10), v), scoring(scale=1.0))


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "column-major": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every other row": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "every other element": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "packed": lambda x: torch.cat((x, x), -1)[..., : x.size(-1)],
    "one row for all": lambda x: x[:, :1, :1].expand_as(x),
    "one number for all": lambda x: x[:1, :1, :1, :1].expand_as(x),
}


@pytest.mark.parametrize("first", range(len(LAYOUTS)), ids=list(LAYOUTS))
def test_layouts(first):
    """grad (of `out.sum()` one number for all), q, k, v and a dense mask each in another layout, and over the runs each in every one."""
    layouts = itertools.islice(itertools.cycle(LAYOUTS.values()), first, None)
    *tensors, allowed = (
        layout(x) for x, layout in zip((*inputs(query_count=18, key_count=18), dense(1, 2, 18, 18)), layouts)  # noqa: B905
    )
    assert_true(tensors, scoring(causal=True, dense=allowed))


def test_gradients_are_the_derivatives_of_the_forward_kernel():
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, sinks):
            out, lse = attention_forward(q, k, v, **how._replace(sinks=sinks)._asdict())
            ctx.save_for_backward(q, k, v, out, lse, sinks)
            return out

        @staticmethod
        def backward(ctx, grad):
            *saved, sinks = ctx.saved_tensors
            return attention_backward(grad, *saved, **how._replace(sinks=sinks)._asdict())

    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
    how = scoring(causal=True, window=3, softcap=1.5, dense=dense(1, 2, 17, 5), drop=dropout(0.4))
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs(query_count=17, key_count=5)[1:], sinks)]
    assert torch.autograd.gradcheck(Attention.apply, leaves, fast_mode=True)


# --- rows that see nothing ---


def hiding(form: str, rows: list[int]) -> dict:
    """A mask of 18 queries and keys of which `rows` see no key, and the others themselves at the least."""
    if form == "dense":
        allowed = dense(1, 2, 18, 18) | torch.eye(18, dtype=torch.bool)
        allowed[:, :, rows] = False
        return {"dense": allowed}
    ids = torch.zeros(1, 18, dtype=torch.int32)
    lonely = ids.clone()
    lonely[:, rows] = -1 if form == "padding" else 3
    return {"query_segments": lonely, "key_segments": lonely if form == "padding" else ids}


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -math.inf], dtype=torch.float64)], ids=["", "sinks"])
@pytest.mark.parametrize("form, rows", [
    ("dense", [0]), ("dense", list(range(18))), ("padding", [0, 5, 17]), ("padding", list(range(18))), ("document", [0, 16]),
])  # fmt: skip
def test_rows_that_see_no_key(form, rows, sinks):
    grad, q, k, v = inputs(query_count=18, key_count=18)
    how = scoring(causal=True, sinks=sinks, **hiding(form, rows))
    out, lse, dq, *grads = ours(grad, q, k, v, how)
    assert (out[:, :, rows] == 0).all() and (dq[:, :, rows] == 0).all() and all(x.isfinite().all() for x in grads)
    expected = torch.full((2,), -math.inf, dtype=torch.float64) if sinks is None else sinks
    torch.testing.assert_close(lse[:, :, rows], expected[None, :, None].expand(1, 2, len(rows)))
    if len(rows) < 18:  # the rest is as if nothing came back to those rows
        grad = grad.clone()
        grad[:, :, rows] = 0
        truths = eager(grad, q, k, v, how)
        others = [row for row in range(18) if row not in rows]
        for result, truth in ((out, truths[0]), (lse, truths[1]), (dq, truths[2])):
            torch.testing.assert_close(result[:, :, others], truth[:, :, others], rtol=0, atol=1e-12)
        for result, truth in zip(grads[:2], truths[3:5], strict=True):
            torch.testing.assert_close(result, truth, rtol=0, atol=1e-12)


# --- dropout ---


def test_mask_does_not_depend_on_the_tile():
    """With values that are unit vectors, the output is the dropped weights themselves."""
    drop = dropout(0.5)
    _, q, k, _ = inputs(2, 1, 1, 20, 32, 32)
    v = torch.eye(32, dtype=torch.float64).expand(2, 1, 32, 32)
    kept = rng.dropout(torch.ones(2, 1, 20, 32), drop) != 0
    for tile in (Tile(16, 16), Tile(32, 32), Tile(16, 32), Tile(32, 16)):
        out, _ = attention_forward(q, k, v, **scoring(drop=drop)._asdict(), tile=tile)
        assert torch.equal(out != 0, kept)


@pytest.mark.parametrize("tile", [Tile(16, 32), Tile(32, 16), Tile(32, 32)], ids=str)
def test_other_tiles(tile):
    assert_true(inputs(query_count=40, key_count=37), scoring(causal=True, window=18, drop=dropout(0.3), **packed(40, 37)), tile)


def test_dropping_everything_gives_zeros():
    out, lse, *grads = ours(*inputs(query_count=18, key_count=18), scoring(causal=True, drop=dropout(1.0)))
    assert lse.isfinite().all()
    assert all((x == 0).all() for x in (out, *grads))


# --- promises ---


def test_same_bits_every_time_and_inputs_untouched():
    tensors = inputs(1, 2, 1, 18, 18, dtype=torch.float32)
    before = [x.clone() for x in tensors]
    first, second = (ours(*tensors, everything(18, 18, torch.float32)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_outputs_lie_in_memory_as_batch_time_heads_dim():
    out, lse, *grads = ours(*inputs(2, 4, 2, 5, 6), scoring(causal=True))
    assert lse.is_contiguous()
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *grads))


@pytest.mark.parametrize("batch, query_count, key_count", [(0, 5, 5), (1, 0, 5), (1, 5, 0), (1, 0, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_empty(batch, query_count, key_count, masked):
    tensors = inputs(batch, 2, 1, query_count, key_count)
    ids = {f"{name}_segments": torch.zeros(batch, count, dtype=torch.int32) for name, count in (("query", query_count), ("key", key_count))}
    mask = {**ids, "window": 3, "dense": torch.ones(batch, 2, query_count, key_count, dtype=torch.bool)} if masked else {}
    out, lse, dq, dk, dv = ours(*tensors, scoring(causal=True, drop=dropout(0.3), **mask))
    assert out.shape == dq.shape == tensors[1].shape and dk.shape == dv.shape == tensors[2].shape and lse.shape == out.shape[:3]
    assert all((x == 0).all() for x in (out, dq, dk, dv))
    assert (lse == -math.inf).all()


def test_grids_hold_any_batch_and_nothing_is_launched_for_none():
    def grids(batch: int, length: int):
        q = torch.empty(batch, 64, length, 64, device="meta")
        ids = torch.empty(batch, length, dtype=torch.int32, device="meta")
        with record_launches() as launches:
            ours(q, q, q, q, scoring(query_segments=ids, key_segments=ids))
        return [launch.grid for launch in launches]

    whole = grids(70_000, 16)
    assert all(len(grid) == 1 and 70_000 <= grid[0] < 2**31 for grid in whole) and sum(grid[0] >= 70_000 * 64 for grid in whole) == 4
    assert grids(0, 16) == grids(1, 0) == []


def test_a_slice_of_heads_has_its_rows_of_the_whole_mask():
    grad, q, k, v = inputs(batch=2, heads=4, kv_heads=2, query_count=9, key_count=9)
    sinks = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    how = scoring(causal=True, sinks=sinks, drop=dropout(0.3), dense=dense(2, 4, 9, 9))
    out, lse, *whole = ours(grad, q, k, v, how)
    for kv_head in range(2):
        heads, kv = slice(2 * kv_head, 2 * kv_head + 2), slice(kv_head, kv_head + 1)
        results = ours(grad[:, heads], q[:, heads], k[:, kv], v[:, kv], how.of_heads(heads, 4, 9))
        expected = (out[:, heads], lse[:, heads], whole[0][:, heads], whole[1][:, kv], whole[2][:, kv], whole[3][heads])
        assert all(map(torch.equal, results, expected))
