"""Philox and the masks made of it: published answers, and equal bits from C++, plain PyTorch and Triton."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ckpt_ext import extension, philox
from ckpt_ext.kernels.primitives import keep_mask as triton_keep_mask

BIG_OFFSET = (0xABCDEF << 32) + 12
SEED = 0x0123456789ABCDEF

KNOWN_ANSWERS = [  # (counter, key, words), from kat_vectors of Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@triton.jit
def _philox(seed_ptr, counter_ptr, out_ptr):
    lanes = tl.philox(
        tl.load(seed_ptr), tl.load(counter_ptr).to(tl.uint32), tl.load(counter_ptr + 1).to(tl.uint32),
        tl.load(counter_ptr + 2).to(tl.uint32), tl.load(counter_ptr + 3).to(tl.uint32),
    )  # fmt: skip
    for lane in tl.static_range(4):
        tl.store(out_ptr + lane, lanes[lane].to(tl.int64))


@triton.jit
def _mask(
    state_ptr, out_ptr, row_start_ptr, rows, cols,
    SITE: tl.constexpr, THRESHOLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = tl.program_id(1) * BLOCK_N
    keep = triton_keep_mask(state_ptr, tl.load(row_start_ptr) + row, first_col, cols, SITE, THRESHOLD, BLOCK_N)
    col = first_col + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + row[:, None] * cols + col[None, :], keep.to(tl.int8), mask=(row[:, None] < rows) & (col[None, :] < cols))


def triton_mask(state: Tensor, p: float, site: int, rows: int, cols: int, block: int, row_start: int = 0) -> Tensor:
    out = torch.full((rows, cols), -1, dtype=torch.int8)
    grid = (triton.cdiv(rows, block), triton.cdiv(cols, block))
    _mask[grid](state, out, torch.tensor([row_start]), rows, cols, SITE=site, THRESHOLD=round(p * 2**32), BLOCK_M=block, BLOCK_N=block)
    assert (out >= 0).all()
    return out.bool()


def op_mask(state: Tensor, p: float, site: int, shape: tuple[int, ...], **window) -> Tensor:
    return torch.ops.ckpt_ext.dropout(torch.ones(shape), state, p, site, **window) != 0


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
class TestKnownAnswers:
    def test_cpp(self, counter, key, words):
        assert tuple(extension.module().philox4x32_10(counter, key)) == words

    def test_torch(self, counter, key, words):
        assert philox.philox4x32_10(counter, key) == words
        tensors = philox.philox4x32_10(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert tuple(map(int, tensors)) == words

    def test_triton(self, counter, key, words):
        seed = key[0] | key[1] << 32
        out = torch.zeros(4, dtype=torch.int64)
        _philox[(1,)](torch.tensor([seed - (seed >> 63 << 64)]), torch.tensor(counter), out)
        assert tuple(out.tolist()) == words


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 4), (5, 7), (2, 33), (17, 130), (1, 3000), (300, 2)])
@pytest.mark.parametrize(
    ("seed", "offset", "site", "p"),
    [(0, 0, 1, 0.5), (SEED, BIG_OFFSET, 255, 0.1), (-1, 2**56 - 4, 7, 0.9), (2**63 - 1, 2**32, 3, 2**-32)],
)
def test_masks_agree(rows, cols, seed, offset, site, p):
    state = torch.tensor([seed, offset])
    oracle = philox.keep_mask(state, p, site, rows, cols)
    assert oracle.shape == (rows, cols)
    assert torch.equal(op_mask(state, p, site, (rows, cols)), oracle)
    for block in (16, 32):
        if rows * cols <= 2500:  # the interpreter takes its time
            assert torch.equal(triton_mask(state, p, site, rows, cols, block), oracle), block


def test_every_part_of_the_state_counts():
    states = [(1, 0), (1 << 32, 0), (0, 1), (0, 1 << 32), (0, 1 << 55), (0, 0)]
    masks = [op_mask(torch.tensor(state), 0.5, site, (8, 32)) for state in states for site in (1, 2)]
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)


def test_mask_is_a_function_of_the_value_of_the_state():
    here = torch.tensor([SEED, 4])
    elsewhere = torch.stack([torch.zeros(2, dtype=torch.int64), here], dim=1)[:, 1]  # other storage, stride 2
    assert torch.equal(op_mask(here, 0.5, 1, (4, 50)), op_mask(elsewhere, 0.5, 1, (4, 50)))


@pytest.mark.parametrize("row_start", [2**29, 2**30, 2**31, 2**32 - 1, 2**33])
@pytest.mark.parametrize("cols", [64, 2**31 + 3])
def test_large_counters_do_not_alias(row_start, cols):
    """Neither the row nor row * ceil(cols / 4) is cut to 31 or 32 bits."""
    state = torch.tensor([SEED, 0])
    base = op_mask(state, 0.5, 1, (2, 64), cols=cols)
    far = op_mask(state, 0.5, 1, (2, 64), cols=cols, row_start=row_start)
    assert not torch.equal(base, far)
    assert torch.equal(far, philox.keep_mask(state, 0.5, 1, row_start + torch.arange(2), cols, width=64))
    if cols == 64:
        assert torch.equal(far, triton_mask(state, 0.5, 1, 2, cols, 64, row_start))


@pytest.mark.parametrize("col_start", [2**31 - 2, 2**32 - 1, 2**34 + 5])
def test_large_columns_do_not_alias(col_start):
    state, cols = torch.tensor([SEED, 0]), 2**40 + 1
    far = op_mask(state, 0.5, 1, (2, 64), cols=cols, col_start=col_start)
    assert not torch.equal(op_mask(state, 0.5, 1, (2, 64), cols=cols), far)
    assert torch.equal(far, philox.keep_mask(state, 0.5, 1, 2, cols, col_start=col_start, width=64))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate(p):
    n = 400 * 503
    kept = op_mask(torch.tensor([SEED, 0]), p, 1, (400, 503)).sum().item()
    assert abs(kept - n * (1 - p)) < 3 * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize(
    ("p", "threshold"), [(0, 0), (1, 2**32), (1.5 * 2**-32, 2), (0.5 * 2**-32, 0), (2.5 * 2**-32, 2), (1 - 2**-40, 2**32)]
)
def test_threshold_rounds_half_to_even(p, threshold):
    assert philox.threshold(p) == threshold


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_threshold_is_the_smallest_word_kept(shift):
    """A p whose threshold is the very word of element 0, and its neighbours."""
    word = philox.philox4x32_10((0, 0, 0, 1 << 24), (5, 0))[0]
    p = (word + shift) / 2**32
    assert op_mask(torch.tensor([5, 0]), p, 1, (1,)).item() == (shift <= 0)
    assert philox.keep_mask(torch.tensor([5, 0]), p, 1, 1, 1).item() == (shift <= 0)


class TestWindows:
    """A tensor that is a window of a mask [B, H, Q, K] is dropped as that part of the whole."""

    B, H, Q, K = 2, 3, 7, 29
    state = torch.tensor([SEED, BIG_OFFSET])

    def whole(self) -> Tensor:
        return philox.keep_mask(self.state, 0.4, 2, self.B * self.H * self.Q, self.K).reshape(self.B, self.H, self.Q, self.K)

    @pytest.mark.parametrize(("start", "stop"), [(0, 29), (4, 17), (1, 2), (3, 29), (26, 29), (5, 5)])
    def test_columns(self, start, stop):
        window = dict(cols=self.K, col_start=start)
        part = op_mask(self.state, 0.4, 2, (self.B, self.H, self.Q, stop - start), **window)
        assert torch.equal(part, self.whole()[..., start:stop])

    @pytest.mark.parametrize("batch", [0, 1])
    def test_rows_of_some_heads(self, batch):
        strides = [self.Q, 1]
        start = (batch * self.H + 1) * self.Q + 2
        part = op_mask(self.state, 0.4, 2, (2, 3, 9), row_start=start, row_strides=strides, cols=self.K, col_start=10)
        assert torch.equal(part, self.whole()[batch, 1:3, 2:5, 10:19])

    def test_strides_in_any_order(self):
        strides = [1, self.Q * self.H, self.Q]  # [Q, B, H, K]
        part = op_mask(self.state, 0.4, 2, (self.Q, self.B, self.H, self.K), row_strides=strides)
        assert torch.equal(part, self.whole().permute(2, 0, 1, 3))

    def test_repeated_rows(self):
        part = op_mask(self.state, 0.4, 2, (5, self.K), row_strides=[0], row_start=3)
        assert torch.equal(part, self.whole().flatten(0, 2)[3].expand(5, -1))

    def test_columns_over_several_blocks(self):
        cols = 5003
        whole = op_mask(self.state, 0.4, 2, (3, cols))
        part = op_mask(self.state, 0.4, 2, (3, 4000), cols=cols, col_start=1001)
        assert torch.equal(part, whole[:, 1001:5001])
        assert torch.equal(whole, philox.keep_mask(self.state, 0.4, 2, 3, cols))

    def test_fallback(self):
        window = dict(row_start=9, row_strides=[self.Q, 1], cols=self.K, col_start=3)
        x = torch.randn(2, 4, 11)
        assert torch.equal(fallback_dropout(x, self.state, 0.4, 2, **window), torch.ops.ckpt_ext.dropout(x, self.state, 0.4, 2, **window))


def fallback_dropout(*arguments, **window) -> Tensor:
    philox._warn.cache_clear()
    with pytest.warns(UserWarning, match="dropout runs in Python"):
        return philox.dropout(*arguments, **window)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 5), (6, 41), (2, 3, 5, 7)])
def test_fallback_equals_cpp(dtype, p, shape):
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    state = torch.tensor([SEED, BIG_OFFSET])
    out = torch.ops.ckpt_ext.dropout(x, state, p, 16)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, x.shape, True)
    assert torch.equal(out, fallback_dropout(x, state, p, 16))


def test_fallback_works_in_pieces(monkeypatch):
    x, state = torch.randn(37, 19), torch.tensor([SEED, 0])
    monkeypatch.setattr(philox, "_CHUNK", 100)
    assert torch.equal(fallback_dropout(x, state, 0.5, 1), torch.ops.ckpt_ext.dropout(x, state, 0.5, 1))
