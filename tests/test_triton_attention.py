"""Attention kernels under the interpreter against attention written out in float64."""

import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from ckpt_ext.kernels.attention_backward import attention_backward
from ckpt_ext.kernels.attention_forward import attention_forward
from ckpt_ext.kernels.dropout import dropout_constants
from ckpt_ext.kernels.launch import record_launches
from ckpt_ext.kernels.primitives import keep_mask, ptr_offset
from ckpt_ext.kernels.tiles import Tile
from ckpt_ext.rng import Dropout

NAMES = ("out", "lse", "dq", "dk", "dv")


def dropout(p: float, seed: int = 1234567890123, offset: int = 5):
    return Dropout(torch.tensor([seed, offset]), p, site=1)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """What a launcher allocates is full of NaN until a kernel has written it."""

    def poison(allocate):
        def allocated(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            in_kernels = sys._getframe(1).f_globals["__name__"].startswith("ckpt_ext.kernels")
            return tensor.fill_(math.nan) if in_kernels and tensor.is_floating_point() else tensor

        return allocated

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))


# --- the truth ---


@triton.jit
def _dump_keep(keep_ptr, state_ptr, row_count, cols, SITE: tl.constexpr, THRESHOLD: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    lanes = tl.arange(0, BLOCK_N)
    keep = keep_mask(state_ptr, rows, 0, cols, SITE, THRESHOLD, BLOCK_N)
    tl.store(keep_ptr + rows[:, None] * cols + lanes[None, :], keep, mask=(rows < row_count)[:, None] & (lanes < cols)[None, :])


def kept(drop, batch: int, heads: int, query_count: int, key_count: int) -> torch.Tensor:
    """The dropout mask of an attention, one kernel tile as wide as a row."""
    rows = batch * heads * query_count
    keep = torch.zeros(rows, key_count, dtype=torch.bool)
    constants = {name: value for name, value in dropout_constants(drop).items() if name in ("SITE", "THRESHOLD")}
    block = max(4, triton.next_power_of_2(key_count))
    _dump_keep[(triton.cdiv(rows, 16),)](keep, drop.state, rows, key_count, **constants, BLOCK_N=block)
    return keep.view(batch, heads, query_count, key_count)


def eager(grad, q, k, v, *, causal, scale, drop=None, dtype=torch.float64):
    """`(out, lse, dq, dk, dv)` with every weight in memory, computed in `dtype`."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    group = q.size(1) // k.size(1)
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    weights = scores.softmax(-1)
    if drop is not None:
        keep = kept(drop, *scores.shape)
        weights = torch.where(keep, weights / (1 - drop.p), 0.0)
    out = weights @ v.repeat_interleave(group, 1)
    return out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), grad.to(dtype))


def ours(grad, q, k, v, *, causal, scale, drop=None, tile=None):
    options = {"causal": causal, "scale": scale, "dropout": drop, "tile": tile}
    out, lse = attention_forward(q, k, v, **options)
    return out, lse, *attention_backward(grad, q, k, v, out, lse, **options)


def framed(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random values in the middle of a larger buffer of NaN, which a read out of bounds would bring in."""
    buffer = torch.full([size + 2 for size in shape], math.nan, dtype=dtype)
    inner = buffer[tuple(slice(1, 1 + size) for size in shape)]
    inner.copy_(torch.randn(shape, dtype=torch.float64))
    return inner


def inputs(batch=1, heads=2, kv_heads=1, query_count=16, key_count=16, head_dim=16, dtype=torch.float64):
    """grad, q, k and v."""
    torch.manual_seed(query_count * 1000 + key_count)
    query_shape, key_shape = (batch, heads, query_count, head_dim), (batch, kv_heads, key_count, head_dim)
    return tuple(framed(*shape, dtype=dtype) for shape in (query_shape, query_shape, key_shape, key_shape))


def assert_true(tensors, *, causal, scale, drop=None, tile=None):
    """The error of each result against float64 is at most twice that of eager PyTorch in the same dtype, plus its rounding."""
    dtype = tensors[1].dtype
    results = ours(*tensors, causal=causal, scale=scale, drop=drop, tile=tile)
    truths = eager(*tensors, causal=causal, scale=scale, drop=drop)
    rivals = eager(*tensors, causal=causal, scale=scale, drop=drop, dtype=dtype)
    length = max(tensors[1].size(2) * tensors[1].size(1) // tensors[2].size(1), tensors[2].size(2)) + tensors[1].size(3)
    sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for name, result, truth, rival in zip(NAMES, results, truths, rivals, strict=True):
        assert result.shape == truth.shape and result.dtype == (sum_dtype if name == "lse" else dtype), name
        rounding = torch.finfo(result.dtype).eps + torch.finfo(sum_dtype).eps * length
        largest = truth.abs().max()
        budget = 1e-12 * max(1, largest) if dtype == torch.float64 else 2 * (rival - truth).abs().max() + rounding * largest
        error = (result - truth).abs().max()
        assert error <= budget, f"{name}: error {error:.3g}, budget {budget:.3g}"  # NaN fails too


# --- against the truth ---


@pytest.mark.parametrize("causal, drop", [(False, None), (True, dropout(0.3))], ids=["full", "causal-dropout"])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 15, 16, 17, 31, 33, 48])
def test_lengths(length, causal, drop):
    assert_true(inputs(query_count=length, key_count=length), causal=causal, scale=0.3, drop=drop)


@pytest.mark.parametrize("causal, drop", [(False, dropout(0.2)), (True, None)], ids=["full-dropout", "causal"])
@pytest.mark.parametrize("query_count, key_count", [(17, 33), (33, 17), (1, 35), (35, 1), (16, 31), (40, 18)])
def test_query_and_key_lengths_differ(query_count, key_count, causal, drop):
    assert_true(inputs(query_count=query_count, key_count=key_count), causal=causal, scale=0.3, drop=drop)


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (4, 1), (3, 1)])
def test_grouped_queries(heads, kv_heads):
    assert_true(inputs(2, heads, kv_heads, 7, 18), causal=True, scale=0.3, drop=dropout(0.2))


@pytest.mark.parametrize("head_dim, length", [(16, 20), (40, 20), (64, 20), (80, 20), (96, 20), (256, 3)])
def test_head_dims(head_dim, length):
    assert_true(inputs(query_count=length, key_count=length, head_dim=head_dim), causal=True, scale=head_dim**-0.5)


@pytest.mark.parametrize("causal, drop", [(False, dropout(0.3)), (True, None)], ids=["full-dropout", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype, causal, drop):
    assert_true(inputs(1, 2, 1, 33, 33, 40, dtype), causal=causal, scale=40**-0.5, drop=drop)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 30.0])
def test_scale_may_be_anything(scale):
    """Negative, zero, and so large that a softmax without its maximum would overflow."""
    assert_true(inputs(query_count=20, key_count=20), causal=True, scale=scale)


def test_very_negative_scores_do_not_leak_through_the_padding():
    """Keys beyond the last have score 0; where all others score -1000, their weights must not be rebuilt as exp(1000)."""
    grad, q, k, v = inputs(query_count=18, key_count=18)
    assert_true((grad, q.abs() + 10, -(k.abs() + 10), v), causal=False, scale=1.0)


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
    """grad, q, k and v each in another layout, and over the runs each in every one; `out.sum()` has a grad of one number for all."""
    layouts = itertools.islice(itertools.cycle(LAYOUTS.values()), first, None)
    tensors = tuple(layout(x) for x, layout in zip(inputs(query_count=18, key_count=18), layouts))  # noqa: B905
    assert_true(tensors, causal=True, scale=0.3)


def test_gradients_are_the_derivatives_of_the_forward_kernel():
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, causal, drop):
            ctx.options = {"causal": causal, "scale": 0.3, "dropout": drop}
            out, lse = attention_forward(q, k, v, **ctx.options)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, grad):
            return *attention_backward(grad, *ctx.saved_tensors, **ctx.options), None, None

    for causal, drop in ((False, None), (True, dropout(0.4))):
        leaves = [x.detach().clone().requires_grad_() for x in inputs(query_count=17, key_count=5)[1:]]
        assert torch.autograd.gradcheck(Attention.apply, (*leaves, causal, drop), fast_mode=True)


# --- dropout ---


def test_mask_does_not_depend_on_the_tile():
    """With values that are unit vectors, the output is the dropped weights themselves."""
    drop = dropout(0.5)
    _, q, k, _ = inputs(2, 1, 1, 20, 32, 32)
    v = torch.eye(32, dtype=torch.float64).expand(2, 1, 32, 32)
    for tile in (Tile(16, 16), Tile(32, 32), Tile(16, 32), Tile(32, 16)):
        out, _ = attention_forward(q, k, v, causal=False, scale=0.3, dropout=drop, tile=tile)
        assert torch.equal(out != 0, kept(drop, 2, 1, 20, 32))


@pytest.mark.parametrize("tile", [Tile(16, 32), Tile(32, 16), Tile(32, 32)], ids=str)
def test_other_tiles(tile):
    assert_true(inputs(query_count=40, key_count=37), causal=True, scale=0.3, drop=dropout(0.3), tile=tile)


def test_dropping_everything_gives_zeros():
    out, lse, *grads = ours(*inputs(query_count=18, key_count=18), causal=True, scale=0.3, drop=dropout(1.0))
    assert lse.isfinite().all()
    assert all((x == 0).all() for x in (out, *grads))


def test_masks_follow_seed_and_offset():
    _, q, k, v = inputs(query_count=18, key_count=18)
    drops = (dropout(0.5), dropout(0.5, seed=7), dropout(0.5, offset=9))
    outs = [attention_forward(q, k, v, causal=False, scale=0.3, dropout=drop)[0] for drop in drops]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(outs, 2))


# --- promises ---


def test_same_bits_every_time_and_inputs_untouched():
    tensors = inputs(1, 2, 1, 18, 18, dtype=torch.float32)
    before = [x.clone() for x in tensors]
    first, second = (ours(*tensors, causal=True, scale=0.3, drop=dropout(0.3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_outputs_lie_in_memory_as_batch_time_heads_dim():
    out, lse, *grads = ours(*inputs(2, 4, 2, 5, 6), causal=True, scale=0.3)
    assert lse.is_contiguous()
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *grads))


def test_a_row_that_sees_no_key_gives_no_gradient():
    """The causal mask leaves no such row; its mark is lse = -inf, and backward takes it as it will come from other masks."""
    grad, q, k, v = inputs(query_count=18, key_count=18)
    out, lse = attention_forward(q, k, v, causal=True, scale=0.3)
    blind = [0, 5, 17]
    out[:, :, blind] = 0
    lse[:, :, blind] = -math.inf
    results = attention_backward(grad, q, k, v, out, lse, causal=True, scale=0.3)
    assert (results[0][:, :, blind] == 0).all()
    grad = grad.clone()
    grad[:, :, blind] = 0  # the truth: as if nothing came back to those rows
    for result, truth in zip(results, eager(grad, q, k, v, causal=True, scale=0.3)[2:], strict=True):
        torch.testing.assert_close(result, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch, query_count, key_count", [(0, 5, 5), (1, 0, 5), (1, 5, 0), (1, 0, 0)])
def test_empty(batch, query_count, key_count):
    tensors = inputs(batch, 2, 1, query_count, key_count)
    out, lse, dq, dk, dv = ours(*tensors, causal=True, scale=0.3, drop=dropout(0.3))
    assert out.shape == dq.shape == tensors[1].shape and dk.shape == dv.shape == tensors[2].shape and lse.shape == out.shape[:3]
    assert all((x == 0).all() for x in (out, dq, dk, dv))
    assert (lse == -math.inf).all()


def test_grids_hold_any_batch_and_nothing_is_launched_for_none():
    def grids(batch: int, length: int):
        q = torch.empty(batch, 64, length, 64, device="meta")
        with record_launches() as launches:
            ours(q, q, q, q, causal=True, scale=0.3)
        return [launch.grid for launch in launches]

    assert all(len(grid) == 1 and 70_000 * 64 <= grid[0] < 2**31 for grid in grids(70_000, 16))
    assert grids(0, 16) == grids(1, 0) == []


@triton.jit
def _store_offset(offset_ptr, row, stride):
    tl.store(offset_ptr, ptr_offset((row,), (stride,)))


def test_offsets_pass_two_to_the_31():
    offset = torch.zeros(1, dtype=torch.int64)
    _store_offset[(1,)](offset, 319, 7864320)
    assert offset.item() == 319 * 7864320 == 2508718080


def test_a_slice_of_heads_has_its_rows_of_the_whole_mask():
    grad, q, k, v = inputs(batch=2, heads=4, kv_heads=2, query_count=9, key_count=9)
    drop, length = dropout(0.3), q.size(2)
    options = {"causal": True, "scale": 0.3}
    out, lse, *whole = ours(grad, q, k, v, **options, drop=drop)
    for kv_head in range(2):
        heads, kv = slice(2 * kv_head, 2 * kv_head + 2), slice(kv_head, kv_head + 1)
        part = replace(drop.rows_from(heads.start * length), batch_rows=4 * length)
        results = ours(grad[:, heads], q[:, heads], k[:, kv], v[:, kv], **options, drop=part)
        expected = (out[:, heads], lse[:, heads], whole[0][:, heads], whole[1][:, kv], whole[2][:, kv])
        assert all(map(torch.equal, results, expected))
