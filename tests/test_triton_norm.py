"""Norm kernels against float64 maths that autograd differentiates."""

import pytest
import torch

from ckpt_ext.kernels import norm
from ckpt_ext.kernels.norm import norm_backward, norm_forward
from ckpt_ext.kernels.tiles import Tile
from ckpt_ext.testing import assert_accurate, framed, poison_allocations

EPS = 1e-5
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
KINDS = ["rms", "layer"]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poison_allocations(monkeypatch)


def explicit_norm(x, weight, bias, kind, offset=0.0):
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    normed = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    scaled = normed * (weight + offset)
    return scaled if bias is None else scaled + bias


def differentiate(tensors, grad, kind, offset, dtype):
    """y and the gradients of `explicit_norm` in `dtype`."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    y = explicit_norm(*leaves, kind, offset)
    grads = iter(torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], grad.to(dtype)))
    return y.detach(), [None if leaf is None else next(grads) for leaf in leaves]


def run(tensors, grad, kind, offset=0.0, params=True):
    """y and the gradients of the kernels; none of them writes to what it reads."""
    inputs = [t for t in (*tensors, grad) if t is not None]
    before = [t.clone() for t in inputs]
    y, stats = norm_forward(*tensors, kind=kind, eps=EPS, offset=offset)
    grads = norm_backward(grad, *tensors, stats, kind=kind, offset=offset, params=params)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))
    return y, list(grads)


def check(tensors, grad, kind, offset=0.0):
    """Compare outputs and gradients with the truth, and their dtypes with those of the inputs."""
    x = tensors[0]
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    y, grads = run(tensors, grad, kind, offset)
    eager_y, eager_grads = differentiate(tensors, grad, kind, offset, x.dtype)
    true_y, true_grads = differentiate(tensors, grad, kind, offset, torch.float64)
    assert y.dtype == x.dtype and y.is_contiguous()
    assert_accurate(y, eager_y, true_y, terms=cols)
    # dx is a difference of terms as large as grad * scale * rstd.
    wide = x.double()
    spread = wide.std(-1, correction=0) if kind == "layer" else wide.square().mean(-1).sqrt()
    largest = (grad.double() * (tensors[1].double() + offset)).abs().max() / (spread.square() + EPS).sqrt().min()
    for tensor, ours, eager, truth, terms in zip(tensors, grads, eager_grads, true_grads, (cols, rows, rows), strict=True):
        if tensor is None:
            assert ours is None
            continue
        assert ours.dtype == tensor.dtype
        assert_accurate(ours, eager, truth, terms=terms, magnitude=largest.item() if tensor is x else 0.0)


def inputs(rows, cols, dtype=torch.float32, bias=True, param_dtype=None, grad_dtype=None):
    generator = torch.Generator().manual_seed(rows * 1000 + cols)

    def draw(*shape, dtype):
        return framed(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))

    param_dtype = param_dtype or dtype
    weight, offset = draw(cols, dtype=param_dtype), draw(cols, dtype=param_dtype)
    return (draw(rows, cols, dtype=dtype), weight, offset if bias else None), draw(rows, cols, dtype=grad_dtype or dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [1, 3, 7, 17, 33, 100])
def test_matches_truth(kind, dtype, cols):
    tensors, grad = inputs(19, cols, dtype, bias=kind == "layer")
    check(tensors, grad, kind)


@pytest.mark.parametrize("kind, bias", [("rms", True), ("layer", False)])
def test_bias_is_independent_of_kind(kind, bias):
    check(*inputs(5, 33, bias=bias), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_parameters_and_gradient(kind, dtype):
    check(*inputs(7, 33, dtype, param_dtype=torch.float32, grad_dtype=torch.float32), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [Tile(1, 128), Tile(4, 128), Tile(2, 32)], ids=str)
def test_any_tile(monkeypatch, kind, tile):
    monkeypatch.setattr(norm, "norm_tile", lambda *shape: tile)
    monkeypatch.setattr(norm, "norm_backward_tile", lambda *shape: tile)
    check(*inputs(13, 100), kind)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gemma_offset_is_added_in_float32(offset):
    x = torch.full((1, 4), 64.0, dtype=torch.bfloat16)
    weight = torch.full((4,), 0.00390625, dtype=torch.bfloat16)
    y, _ = norm_forward(x.float(), weight, None, kind="rms", eps=1e-30, offset=offset)
    assert torch.equal(y, torch.full((1, 4), offset + 0.00390625))
    tensors, grad = inputs(5, 33, torch.bfloat16, bias=False)
    check(tensors, grad, "rms", offset)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "view",
    [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[..., ::2], lambda x: x[:1].expand(3, -1, -1), lambda x: x[0, 0]],
    ids=["transposed", "every second row", "every second column", "expanded", "one row"],
)
def test_strides(kind, view):
    generator = torch.Generator().manual_seed(0)
    x = view(framed(torch.randn(3, 6, 20, generator=generator)))
    grad = view(framed(torch.randn(3, 6, 20, generator=generator)))
    weight, bias = framed(torch.randn(2 * x.shape[-1], generator=generator))[::2], torch.randn(x.shape[-1], generator=generator)
    check((x, weight, bias), grad, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_a_plain_sum(kind):
    tensors, _ = inputs(7, 33)
    check(tensors, torch.ones(()).expand(7, 33), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_far_mean_does_not_cancel(kind):
    tensors, grad = inputs(7, 33)
    check((tensors[0] + 1000, *tensors[1:]), grad, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 7), (3, 0, 7), (0, 33)], ids=str)
def test_no_rows(kind, shape):
    x, weight = torch.empty(shape), torch.randn(shape[-1])
    y, (dx, dweight, dbias) = run((x, weight, weight), x, kind)
    assert y.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros_like(weight)) and torch.equal(dbias, dweight)


def test_no_columns():
    y, (dx, dweight, _) = run((torch.empty(3, 0), torch.empty(0), None), torch.empty(3, 0), "rms")
    assert y.shape == dx.shape == (3, 0) and dweight.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_and_runs_change_no_bit(kind):
    tensors, grad = inputs(19, 33, torch.bfloat16)
    y, grads = run(tensors, grad, kind)
    again, grads_again = run(tensors, grad, kind)
    assert torch.equal(y, again) and all(map(torch.equal, grads, grads_again))
    frozen_y, (dx, dweight, dbias) = run(tensors, grad, kind, params=False)
    assert torch.equal(y, frozen_y) and torch.equal(grads[0], dx) and dweight is None and dbias is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind):
    (x, *params), grad = inputs(19, 33)
    y, (dx, *_) = run((x, *params), grad, kind)
    part, (dx_part, *_) = run((x[5:12], *params), grad[5:12], kind)
    assert torch.equal(y[5:12], part) and torch.equal(dx[5:12], dx_part)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, kind):
        y, stats = norm_forward(x, weight, bias, kind=kind, eps=EPS, offset=1.0)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.kind = kind
        return y

    @staticmethod
    def backward(ctx, grad):
        return *norm_backward(grad, *ctx.saved_tensors, kind=ctx.kind, offset=1.0, params=True), None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [7, 19])
def test_gradcheck(kind, cols):
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, cols), (cols,), (cols,))]
    assert torch.autograd.gradcheck(lambda *args: _Norm.apply(*args, kind), tensors, fast_mode=True)
