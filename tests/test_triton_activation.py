"""Activation kernels against float64 maths that autograd differentiates, and their masks against those of the C++ operator."""

import itertools

import pytest
import torch
from torch.nn import functional

from ckpt_ext import rng
from ckpt_ext.kernels import activation
from ckpt_ext.kernels.activation import activation_backward, activation_forward
from ckpt_ext.kernels.tiles import Tile
from ckpt_ext.rng import Dropout
from ckpt_ext.testing import assert_accurate, framed, poison_allocations

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
EAGER = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
DROPOUT = Dropout(torch.tensor([1234567890123, 2**33 + 8]), p=0.3, site=3)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poison_allocations(monkeypatch)


def kept(rows, cols, dropout):
    """The mask of the C++ operator."""
    return rng.dropout(torch.ones(rows, cols), dropout) != 0


def explicit_hidden(gate, up, pointwise, keep, p):
    hidden = EAGER[pointwise](up) if gate is None else EAGER[pointwise](gate) * up
    return hidden if keep is None else torch.where(keep, hidden / (1 - p), 0)


def differentiate(grad, gate, up, pointwise, keep, p, dtype):
    """hidden and the gradients of `explicit_hidden` in `dtype`."""
    gate, up = (None if t is None else t.detach().to(dtype).requires_grad_() for t in (gate, up))
    hidden = explicit_hidden(gate, up, pointwise, keep, p)
    grads = torch.autograd.grad(hidden, [t for t in (gate, up) if t is not None], grad.to(dtype))
    return hidden.detach(), [None, *grads] if gate is None else list(grads)


def check(grad, gate, up, pointwise, dropout=None):
    """Both kernels against the truth; the hidden rows of both have the same bits; nothing that they read is written."""
    inputs = [t for t in (grad, gate, up) if t is not None]
    before = [t.clone() for t in inputs]
    hidden = activation_forward(gate, up, pointwise=pointwise, dropout=dropout)
    *grads, again = activation_backward(grad, gate, up, pointwise=pointwise, dropout=dropout)
    assert torch.equal(hidden, again)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))

    keep = None if dropout is None else kept(*up.shape, dropout)
    p = 0.0 if dropout is None else dropout.p
    eager_hidden, eager_grads = differentiate(grad, gate, up, pointwise, keep, p, up.dtype)
    true_hidden, true_grads = differentiate(grad, gate, up, pointwise, keep, p, torch.float64)
    assert hidden.dtype == up.dtype and hidden.is_contiguous()
    # 1 + erf and 1 - sigmoid may cancel, so that an error is one of values as large as x.
    largest = max(t.abs().max().item() for t in (gate, up) if t is not None) ** (2 if pointwise == "relu2" or gate is not None else 1)
    assert_accurate(hidden, eager_hidden, true_hidden, terms=4, magnitude=largest)
    for tensor, ours, eager, truth in zip((gate, up), grads, eager_grads, true_grads, strict=True):
        if tensor is None:
            assert ours is None
            continue
        assert ours.dtype == tensor.dtype and ours.is_contiguous()
        assert_accurate(ours, eager, truth, terms=4, magnitude=largest)
    return hidden, grads


def rows(count, cols, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return framed(torch.randn(count, cols, generator=generator, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("pointwise", EAGER)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_matches_truth(pointwise, dtype, gated):
    grad, gate, up = (rows(5, 17, dtype, seed) for seed in range(3))
    check(grad, gate if gated else None, up, pointwise, DROPOUT)


@pytest.mark.parametrize("pointwise", EAGER)
def test_without_dropout(pointwise):
    check(*(rows(5, 17, torch.bfloat16, seed) for seed in range(3)), pointwise)


@pytest.mark.parametrize("cols", [1, 3, 7, 33, 100])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_widths(cols, gated):
    grad, gate, up = (rows(19, cols, seed=seed) for seed in range(3))
    check(grad, gate if gated else None, up, "silu", DROPOUT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_gradient(dtype):
    check(rows(5, 33), rows(5, 33, dtype, 1), rows(5, 33, dtype, 2), "gelu_tanh", DROPOUT)


@pytest.mark.parametrize("pointwise", EAGER)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_inputs_stay_finite(pointwise, dtype):
    x = torch.linspace(-100, 100, 81, dtype=dtype)[None]
    hidden, (_, slope) = check(torch.ones_like(x), None, x, pointwise)
    assert hidden.isfinite().all() and slope.isfinite().all()


@pytest.mark.parametrize("pointwise", EAGER)
def test_nan_is_not_hidden(pointwise):
    x = torch.full((1, 3), torch.nan)
    assert activation_forward(None, x, pointwise=pointwise).isnan().all()


def test_unequal_strides():
    wide = rows(6, 40)
    gate, up = wide[::2, :19], wide[::2, 20:39]
    check(rows(19, 3, seed=1).T, gate, up, "silu", DROPOUT)
    check(torch.ones(()).expand(3, 19), gate.T.contiguous().T, up, "gelu", DROPOUT)


@pytest.mark.parametrize("shape", [(0, 7), (3, 0)], ids=str)
def test_empty(shape):
    x = torch.empty(shape)
    assert activation_forward(x, x, pointwise="silu", dropout=DROPOUT).shape == shape
    assert all(out.shape == shape for out in activation_backward(x, x, x, pointwise="silu", dropout=DROPOUT))


@pytest.mark.parametrize("tile", [Tile(2, 4), Tile(4, 64)], ids=str)
def test_tile_changes_no_bit(monkeypatch, tile):
    grad, gate, up = (rows(5, 33, seed=seed) for seed in range(3))

    def outputs():
        hidden = activation_forward(gate, up, pointwise="silu", dropout=DROPOUT)
        return hidden, *activation_backward(grad, gate, up, pointwise="silu", dropout=DROPOUT)

    expected = outputs()
    assert all(map(torch.equal, expected, outputs()))
    monkeypatch.setattr(activation, "elementwise_tile", lambda *_: tile)
    assert all(map(torch.equal, expected, outputs()))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_slices_of_rows_make_the_whole(gated):
    tensors = [rows(9, 33, seed=seed) for seed in range(3)]
    if not gated:
        tensors[1] = None

    def outputs(dropout, grad, gate, up):
        options = {"pointwise": "silu", "dropout": dropout}
        return activation_forward(gate, up, **options), *activation_backward(grad, gate, up, **options)

    whole = outputs(DROPOUT, *tensors)
    for first, last in itertools.pairwise((0, 4, 5, 9)):
        parts = outputs(DROPOUT.rows_from(first), *(None if t is None else t[first:last] for t in tensors))
        for expected, ours in zip(whole, parts, strict=True):
            assert (expected is None and ours is None) or torch.equal(expected[first:last], ours)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_results_may_take_the_places_of_the_arguments(gated):
    grad, gate, up = (rows(9, 33, seed=seed).contiguous() for seed in range(3))
    gate = gate if gated else None
    expected = activation_backward(grad, gate, up, pointwise="silu", dropout=DROPOUT)
    ours = activation_backward(grad, gate, up, pointwise="silu", dropout=DROPOUT, overwrite=True)
    for result, place, right in zip(ours, (gate, up, grad), expected, strict=True):
        assert result is place and (right is None or torch.equal(result, right))


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_dropped_elements_give_no_gradient(p):
    dropout = Dropout(DROPOUT.state, p, 3)
    ones = torch.ones(5, 33)
    hidden = activation_forward(None, ones, pointwise="relu", dropout=dropout)
    keep = kept(5, 33, dropout)
    assert torch.equal(hidden, torch.where(keep, 2.0, 0.0)) and (p < 1 or not keep.any())
    for out in activation_backward(ones, ones, ones, pointwise="relu", dropout=dropout):
        assert torch.equal(out, hidden)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, pointwise, dropout):
        ctx.save_for_backward(gate, up)
        ctx.static = {"pointwise": pointwise, "dropout": dropout}
        return activation_forward(gate, up, **ctx.static)

    @staticmethod
    def backward(ctx, grad):
        dgate, dup, _ = activation_backward(grad, *ctx.saved_tensors, **ctx.static)
        return dgate, dup, None, None


@pytest.mark.parametrize("pointwise", EAGER)
@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["all kept", "dropout"])
def test_gradcheck(pointwise, dropout):
    gate, up = (torch.randn(3, 19, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *args: _Activation.apply(*args, pointwise, dropout), (gate, up), fast_mode=True)
