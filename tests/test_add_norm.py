"""A norm fused with its residual path, the sum before it and the gradient added behind it: bits of separate steps, and float64 maths."""

import itertools

import pytest
import torch

from ckpt_ext import rng
from ckpt_ext.backends import NormSpec, aten, triton
from ckpt_ext.kernels import add_norm as kernel
from ckpt_ext.kernels import norm
from ckpt_ext.kernels.tiles import Tile
from ckpt_ext.rng import Dropout
from ckpt_ext.testing import assert_accurate, framed, poison_allocations

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DROPOUT = Dropout(torch.tensor([1234567890123, 2**33 + 8]), p=0.3, site=4)
RMS, LAYER = NormSpec("rms", 1e-5, 1.0), NormSpec("layer", 1e-5)
backends = pytest.mark.parametrize("backend", [aten, triton], ids=["aten", "triton"])
specs = pytest.mark.parametrize("spec", [RMS, LAYER], ids=lambda spec: spec.kind)
dropouts = pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["kept", "dropout"])


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poison_allocations(monkeypatch)
    poison_allocations(monkeypatch, "ckpt_ext.backends")


def draw(*shape, dtype=torch.float32, seed=0):
    return framed(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype))


def inputs(shape, spec, dtype=torch.float32, residual_dtype=None):
    bias = draw(shape[-1], dtype=dtype, seed=3) if spec.kind == "layer" else None
    return draw(*shape, dtype=dtype), draw(*shape, dtype=residual_dtype or dtype, seed=1), draw(shape[-1], dtype=dtype, seed=2), bias


def explicit(x, residual, weight, bias, spec, dropout):
    """Plain maths in the dtypes that promotion gives."""
    if dropout is not None:
        x = torch.where(rng.dropout(torch.ones(x.shape), dropout) != 0, x / (1 - dropout.p), 0)
    total = residual + x
    centred = total - total.mean(-1, keepdim=True) if spec.kind == "layer" else total
    y = centred / (centred.square().mean(-1, keepdim=True) + spec.eps).sqrt() * (weight + spec.offset)
    return total, y if bias is None else y + bias


def check(backend, tensors, spec, dropout):
    """The bits of the two operations, and the truth; nothing that is read is written."""
    x, residual, weight, bias = tensors
    before = [None if t is None else t.clone() for t in tensors]
    total, y, stats = backend.add_norm(*tensors, spec, dropout)
    assert all(t is None or torch.equal(t, then) for t, then in zip(tensors, before, strict=True))
    assert total.dtype == residual.dtype and total.shape == residual.shape and total.is_contiguous()
    assert y.dtype == x.dtype and y.shape == x.shape and y.is_contiguous()

    assert torch.equal(total, backend.dropout_add(x, residual, dropout))
    normed, expected_stats = backend.norm(total, weight, bias, spec)
    assert torch.equal(y, normed.to(x.dtype)) and torch.equal(stats, expected_stats)

    true_total, true_y = explicit(*(None if t is None else t.double() for t in tensors), spec, dropout)
    eager_total, eager_y = explicit(*tensors, spec, dropout)
    assert_accurate(total, eager_total.to(total.dtype), true_total, terms=2)
    assert_accurate(y, eager_y.to(y.dtype), true_y, terms=x.shape[-1])


@backends
@specs
@dropouts
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 3, 7), (19, 33), (3, 100)], ids=str)
def test_bits_of_the_two_operations(backend, spec, dropout, dtype, shape):
    check(backend, inputs(shape, spec, dtype), spec, dropout)


@backends
@specs
@pytest.mark.parametrize(
    "dtype, residual_dtype", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)], ids=str
)
@pytest.mark.parametrize("cols", [33, 100])
def test_wider_residual(backend, spec, dtype, residual_dtype, cols):
    check(backend, inputs((5, cols), spec, dtype, residual_dtype), spec, DROPOUT)


@backends
@specs
@pytest.mark.parametrize(
    "view",
    [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[..., ::2], lambda x: x[:1].expand(3, -1, -1), lambda x: x[0, 0]],
    ids=["transposed", "every second row", "every second column", "expanded", "one row"],
)
def test_strides(backend, spec, view):
    x, residual = view(draw(3, 6, 20)), view(draw(3, 6, 20, seed=1))
    weight, bias = draw(2 * x.shape[-1], seed=2)[::2], draw(x.shape[-1], seed=3)
    check(backend, (x, residual, weight, bias), spec, DROPOUT)
    plain = draw(*x.shape)
    check(backend, (plain, residual, weight, bias), spec, DROPOUT)
    check(backend, (x, plain, weight, bias), spec, DROPOUT)


@backends
@pytest.mark.parametrize("scalar", [0, 1], ids=["x", "residual"])
def test_one_number_everywhere(backend, scalar):
    tensors = list(inputs((5, 33), LAYER))
    tensors[scalar] = torch.ones(()).expand(5, 33)
    check(backend, tensors, LAYER, DROPOUT)


@backends
@specs
@pytest.mark.parametrize("cols", [33, 100])
def test_slices_of_rows_make_the_whole_in_place(backend, spec, cols):
    x, residual, *params = inputs((9, cols), spec, torch.bfloat16)
    total, y, stats = backend.add_norm(x, residual, *params, spec, DROPOUT)
    buffer = torch.full((11, cols), 7.0, dtype=residual.dtype)
    for first, last in itertools.pairwise((0, 4, 5, 9)):
        room = buffer[1 + first : 1 + last]
        span = slice(first, last)
        part, part_y, part_stats = backend.add_norm(x[span], residual[span], *params, spec, DROPOUT.rows_from(first), into=room)
        assert part.data_ptr() == room.data_ptr() and part.shape == room.shape
        assert torch.equal(part_y, y[span]) and torch.equal(part_stats, stats[span])
    assert torch.equal(buffer[1:10], total)
    assert (buffer[::10] == 7).all()


@backends
def test_into_with_more_dimensions_than_rows(backend):
    tensors = inputs((2, 3, 33), RMS)
    total, y, _ = backend.add_norm(*tensors, RMS, DROPOUT)
    room = torch.full((6, 33), torch.nan)
    placed, again, _ = backend.add_norm(*tensors, RMS, DROPOUT, into=room)
    assert placed.shape == total.shape and torch.equal(placed, total) and torch.equal(again, y)
    assert torch.equal(room.view(total.shape), total)


@backends
@specs
@pytest.mark.parametrize("shape", [(0, 7), (3, 0, 7), (0, 100)], ids=str)
def test_no_rows(backend, spec, shape):
    total, y, stats = backend.add_norm(*inputs(shape, spec), spec, DROPOUT)
    assert total.shape == y.shape == shape and stats.shape == (0, 2 if spec.kind == "layer" else 1)


@backends
@pytest.mark.parametrize("p", [2.0**-32, 1.0])
def test_extreme_rates(backend, p):
    x, residual, *params = inputs((5, 33), RMS)
    total, _, _ = backend.add_norm(x, residual, *params, RMS, Dropout(DROPOUT.state, p, 2))
    assert torch.equal(total, residual if p == 1 else residual + x)


@backends
def test_a_nan_stays_in_its_row(backend):
    x, residual, *params = inputs((4, 33), RMS, torch.bfloat16)
    x[1, 3] = torch.nan
    total, y, _ = backend.add_norm(x, residual, *params, RMS, None)
    assert total.isnan().sum() == 1 and total[1, 3].isnan()
    assert y[1].isnan().all() and y[0].isfinite().all() and y[2:].isfinite().all()


@specs
@pytest.mark.parametrize("tile", [Tile(1, 128), Tile(4, 128), Tile(2, 32)], ids=str)
def test_any_tile(monkeypatch, spec, tile):
    for module in (norm, kernel):
        monkeypatch.setattr(module, "norm_tile", lambda *shape: tile)
    check(triton, inputs((13, 100), spec, torch.bfloat16), spec, DROPOUT)


@specs
def test_row_that_a_norm_keeps_but_not_the_sum_before_it(monkeypatch, spec):
    monkeypatch.setattr(kernel, "_WIDEST", 32)
    check(triton, inputs((5, 33), spec, torch.bfloat16), spec, DROPOUT)


@specs
def test_chunks_change_no_bit(monkeypatch, spec):
    tensors = inputs((9, 33), spec, torch.bfloat16)
    whole = aten.add_norm(*tensors, spec, DROPOUT)
    monkeypatch.setattr(aten, "_CHUNK_ELEMENTS", {"cpu": 70, "other": 0})
    assert all(map(torch.equal, aten.add_norm(*tensors, spec, DROPOUT), whole))


def through_norm(backend, grad, tensors, spec, onto, params=True):
    """Gradients of x, weight and bias; nothing that is read is written."""
    _, stats = backend.norm(*tensors, spec)
    inputs = [t for t in (grad, *tensors, stats, onto) if t is not None]
    before = [t.clone() for t in inputs]
    grads = backend.norm_backward(grad, *tensors, stats, spec, params=params, onto=onto)
    assert all(map(torch.equal, inputs, before))
    return grads


def check_onto(backend, grad, tensors, spec, onto):
    """The gradient of x is rounded once, with `onto` in it; those of the parameters know nothing of it."""
    x, *params = tensors
    grad_x, *grads = through_norm(backend, grad, tensors, spec, onto)
    _, *plain = through_norm(backend, grad, tensors, spec, None)
    assert grad_x.dtype == x.dtype and grad_x.shape == x.shape and grad_x.is_contiguous()
    assert all(now is then or torch.equal(now, then) for now, then in zip(grads, plain, strict=True))
    assert torch.equal(through_norm(backend, grad, tensors, spec, onto, params=False)[0], grad_x)

    wide = torch.promote_types(x.dtype, torch.float32)
    unrounded, *_ = through_norm(backend, grad, (x.to(wide), *params), spec, None)
    assert torch.equal(grad_x, (unrounded + onto.to(wide)).to(x.dtype))

    def differentiate(dtype):
        leaf = x.detach().to(dtype).requires_grad_()
        others = (None if t is None else t.to(dtype) for t in params)
        total, y = explicit(leaf, torch.zeros((), dtype=dtype), *others, spec, None)
        return torch.autograd.grad((y, total), leaf, (grad.to(dtype), onto.to(dtype).expand(x.shape)))[0]

    largest = (grad.double() * (params[0].double() + spec.offset)).abs().max() / x.double().std(-1, correction=0).min()
    assert_accurate(grad_x, differentiate(x.dtype), differentiate(torch.float64), terms=x.shape[-1], magnitude=largest.item())


@backends
@specs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 7), (19, 33), (3, 100)], ids=str)
def test_gradient_onto_that_of_the_residual_path(backend, spec, dtype, shape):
    x, onto, *params = inputs(shape, spec, dtype)
    check_onto(backend, draw(*shape, dtype=dtype, seed=4), (x, *params), spec, onto)


@backends
@specs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_residual_path_of_another_dtype(backend, spec, dtype):
    x, onto, *params = inputs((5, 33), spec, torch.bfloat16, dtype)
    check_onto(backend, draw(5, 33, seed=4), (x, *params), spec, onto)


@backends
@specs
@pytest.mark.parametrize(
    "view",
    [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[..., ::2], lambda x: x[:1].expand(3, -1, -1)],
    ids=["transposed", "every second row", "every second column", "expanded"],
)
def test_strides_of_the_residual_path(backend, spec, view):
    onto = view(draw(3, 6, 20, seed=1))
    x, _, *params = inputs(onto.shape, spec)
    check_onto(backend, draw(*x.shape, seed=4), (x, *params), spec, onto)
    check_onto(backend, draw(*x.shape, seed=4), (x, *params), spec, torch.ones(()).expand(x.shape))


@backends
@specs
def test_no_rows_of_the_residual_path(backend, spec):
    x, onto, *params = inputs((0, 33), spec)
    assert through_norm(backend, x, (x, *params), spec, onto)[0].shape == (0, 33)
