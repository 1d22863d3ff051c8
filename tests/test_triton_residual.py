"""Dropout and the residual sum against the C++ operator's masks and float64 maths."""

import itertools

import pytest
import torch

from ckpt_ext import rng
from ckpt_ext.kernels import residual
from ckpt_ext.kernels.residual import dropout, dropout_add
from ckpt_ext.kernels.tiles import Tile
from ckpt_ext.rng import Dropout
from ckpt_ext.testing import assert_accurate, framed, poison_allocations

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DROPOUT = Dropout(torch.tensor([1234567890123, 2**33 + 8]), p=0.3, site=4)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poison_allocations(monkeypatch)


def draw(*shape, dtype=torch.float32, seed=0):
    return framed(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype))


def kept(shape, site):
    """The mask of the C++ operator."""
    return rng.dropout(torch.ones(shape), site) != 0


def explicit(x, base, site):
    dropped = x if site is None else torch.where(kept(x.shape, site), x / (1 - site.p), 0)
    return dropped if base is None else base + dropped


def check(x, base, site):
    inputs = [t for t in (x, base) if t is not None]
    before = [t.clone() for t in inputs]
    ours = dropout(x, site) if base is None else dropout_add(x, base, site)
    assert ours.dtype == (x if base is None else base).dtype and ours.is_contiguous()
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))
    truth = explicit(x.double(), None if base is None else base.double(), site)
    assert_accurate(ours, explicit(x, base, site).to(ours.dtype), truth, terms=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 3, 7), (19, 17), (33,), (3, 100)], ids=str)
def test_matches_truth(dtype, shape):
    x, base = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    check(x, None, DROPOUT)
    check(x, base, DROPOUT)
    check(x, base, None)


def test_residual_in_float32():
    check(draw(5, 33, dtype=torch.bfloat16), draw(5, 33, seed=1), DROPOUT)


@pytest.mark.parametrize(
    "view",
    [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[..., ::2], lambda x: x[:1].expand(3, -1, -1)],
    ids=["transposed", "every second row", "every second column", "expanded"],
)
def test_strides(view):
    x = view(draw(3, 6, 20))
    base = draw(*x.shape, seed=1)
    check(x, None, DROPOUT)
    check(x, base, DROPOUT)
    check(base, x, DROPOUT)


def test_gradient_of_a_plain_sum():
    check(torch.ones(()).expand(5, 33), None, DROPOUT)


@pytest.mark.parametrize("shape", [(0, 7), (3, 0)], ids=str)
def test_empty(shape):
    x = torch.empty(shape)
    assert dropout(x, DROPOUT).shape == dropout_add(x, x, DROPOUT).shape == dropout_add(x, x, None).shape == shape


@pytest.mark.parametrize("p", [2.0**-32, 0.5, 1.0])
@pytest.mark.parametrize("site", [1, 255])
@pytest.mark.parametrize("state", [[0, 0], [-1, -1], [2**63 - 1, 2**40 + 1]], ids=str)
def test_masks_are_those_of_the_operator(p, site, state):
    if state[1] == -1:
        state = [-1, 2**56 - 1]  # the site has the top byte of the offset
    where = Dropout(torch.tensor(state), p, site)
    keep = dropout(torch.ones(6, 35), where) != 0
    assert torch.equal(keep, kept((6, 35), where)) and (p < 1 or not keep.any())


def test_seed_is_read_by_value():
    x = torch.ones(5, 33)
    again = Dropout(framed(torch.zeros(2)).to(torch.int64).copy_(DROPOUT.state), DROPOUT.p, DROPOUT.site)
    assert torch.equal(dropout(x, DROPOUT), dropout(x, again))


@pytest.mark.parametrize("tile", [Tile(2, 4), Tile(4, 64)], ids=str)
def test_tile_changes_no_bit(monkeypatch, tile):
    x = draw(5, 33)
    expected = dropout(x, DROPOUT)
    assert torch.equal(expected, dropout(x, DROPOUT))
    monkeypatch.setattr(residual, "elementwise_tile", lambda *_: tile)
    assert torch.equal(expected, dropout(x, DROPOUT))


def test_slices_of_rows_make_the_whole():
    x = draw(9, 33)
    whole = dropout(x, DROPOUT)
    for first, last in itertools.pairwise((0, 4, 5, 9)):
        assert torch.equal(dropout(x[first:last], DROPOUT.rows_from(first)), whole[first:last])


def test_rate_and_independence_of_sites():
    masks = [dropout(torch.ones(50, 80), Dropout(DROPOUT.state, 0.3, site)) != 0 for site in (1, 2)]
    count, p = 4000, 0.3
    for mask in masks:
        assert abs(mask.sum().item() - count * (1 - p)) < 4 * (count * p * (1 - p)) ** 0.5
    agree = (masks[0] == masks[1]).float().mean().item()
    assert abs(agree - (p * p + (1 - p) ** 2)) < 0.04


def test_dropout_is_its_own_gradient():
    x = draw(5, 33, dtype=torch.float64).requires_grad_()
    grad = draw(5, 33, dtype=torch.float64, seed=1)
    expected = torch.autograd.grad(explicit(x, None, DROPOUT), x, grad)[0]
    torch.testing.assert_close(dropout(grad, DROPOUT), expected, rtol=0, atol=1e-12)
