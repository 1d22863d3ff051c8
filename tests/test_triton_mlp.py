"""Fused MLP kernels against float64 maths that autograd differentiates, and bit for bit against the kernels whose place they take."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ckpt_ext import rng
from ckpt_ext.kernels.activation import activation_backward, activation_forward
from ckpt_ext.kernels.architecture import AMD, NVIDIA, assume_architecture
from ckpt_ext.kernels.mlp_backward import mlp_backward
from ckpt_ext.kernels.mlp_forward import mlp_forward
from ckpt_ext.kernels.mlp_tile import Norm
from ckpt_ext.kernels.norm import norm_forward
from ckpt_ext.kernels.norm_stats import norm_stats
from ckpt_ext.kernels.tiles import Tile, fused_mlp
from ckpt_ext.rng import Dropout
from ckpt_ext.testing import assert_accurate, framed, poison_allocations

EPS = 1e-5
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
EAGER = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
KINDS = [None, "rms", "layer"]
DROPOUT = Dropout(torch.tensor([1234567890123, 2**33 + 8]), p=0.3, site=3)
# One program with one step does for most, and costs the interpreter little.
WIDE = Tile(32, 32, 32)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poison_allocations(monkeypatch)


class Problem(NamedTuple):
    """Rows, weights, biases and a norm's parameters, and the gradient of the hidden layer."""

    x: Tensor
    w_gate: Tensor | None
    w_up: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    norm: Norm | None
    grad: Tensor

    def options(self) -> dict:
        """The keyword arguments that the launchers take of it."""
        stats = None if self.norm is None else norm_stats(self.x, kind=self.norm.kind, eps=EPS)
        return {"b_gate": self.b_gate, "b_up": self.b_up, "norm": self.norm, "stats": stats}

    def tensors(self) -> list[Tensor]:
        parameters = () if self.norm is None else (self.norm.weight, self.norm.bias)
        return [t for t in (self.x, self.w_gate, self.w_up, self.b_gate, self.b_up, *parameters, self.grad) if t is not None]


def problem(rows, dim, hidden, dtype=torch.float32, *, gated=True, kind=None, bias=True, rows_dtype=None):
    generator = torch.Generator().manual_seed(rows * 10000 + dim * 100 + hidden)

    def draw(*shape, scale=1.0, dtype=dtype):
        return framed((torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype))

    norm = {None: None, "rms": Norm("rms", draw(dim), offset=1.0), "layer": Norm("layer", draw(dim), draw(dim))}[kind]
    w_gate, w_up = (draw(hidden, dim, scale=max(dim, 1) ** -0.5) for _ in range(2))
    b_gate, b_up = (draw(hidden) if bias else None for _ in range(2))
    x, grad = draw(rows, dim, dtype=rows_dtype or dtype), draw(rows, hidden)
    return Problem(x, w_gate if gated else None, w_up, b_gate if gated else None, b_up, norm, grad)


def explicit_projections(given, dtype):
    """gate and up in `dtype`."""
    x, w_gate, w_up, b_gate, b_up = (None if t is None else t.to(dtype) for t in given[:5])
    if given.norm is not None:
        wide = x if dtype == torch.float64 else x.float()  # a norm computes in float32 at the least, eager or not
        weight, bias = (None if t is None else t.to(wide.dtype) for t in (given.norm.weight, given.norm.bias))
        if given.norm.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight + given.norm.offset)
        x = (wide if bias is None else wide + bias).to(dtype)
    return None if w_gate is None else functional.linear(x, w_gate, b_gate), functional.linear(x, w_up, b_up)


def explicit(given, pointwise, keep, p, dtype):
    """hidden, gate and up, and the gradients of the latter two, in `dtype`."""
    gate, up = (None if t is None else t.requires_grad_() for t in explicit_projections(given, dtype))
    hidden = EAGER[pointwise](up) if gate is None else EAGER[pointwise](gate) * up
    if keep is not None:
        hidden = torch.where(keep, hidden / (1 - p), 0)
    grads = torch.autograd.grad(hidden, [t for t in (gate, up) if t is not None], given.grad.to(dtype))
    return [t if t is None else t.detach() for t in (hidden, gate, up, *(grads if len(grads) == 2 else (None, *grads)))]


def run(given, pointwise, dropout=None, tile=None):
    """hidden, gate, up, dgate and dup of the kernels, after what must hold whatever the numbers are."""
    before = [t.clone() for t in given.tensors()]
    options = {**given.options(), "pointwise": pointwise, "dropout": dropout, "tile": tile}
    inputs = given.x, given.w_gate, given.w_up
    hidden, gate, up = mlp_forward(*inputs, **options, keep=True)
    alone, *nothing = mlp_forward(*inputs, **options)
    dgate, dup, again = mlp_backward(given.grad, *inputs, **options)
    assert nothing == [None, None]
    assert torch.equal(hidden, alone) and torch.equal(hidden, again)
    assert all(torch.equal(now, then) for now, then in zip(given.tensors(), before, strict=True))

    static = {"pointwise": pointwise, "dropout": dropout}
    assert torch.equal(hidden, activation_forward(gate, up, **static))
    for ours, theirs in zip((dgate, dup, hidden), activation_backward(given.grad, gate, up, **static), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    return hidden, gate, up, dgate, dup


def check(given, pointwise, dropout=None, tile=None):
    outputs = run(given, pointwise, dropout, tile)
    dtype, (rows, dim), cols = given.w_up.dtype, given.x.shape, given.w_up.size(0)
    keep = None if dropout is None else rng.dropout(torch.ones(rows, cols), dropout) != 0
    p = 0.0 if dropout is None else dropout.p
    eager = explicit(given, pointwise, keep, p, dtype)
    truth = explicit(given, pointwise, keep, p, torch.float64)
    # 1 + erf, 1 - sigmoid and sums of products may cancel, so that an error is one of values as large as gate and up.
    largest = max(t.abs().max().item() for t in truth[1:3] if t is not None)
    square = largest ** (2 if pointwise == "relu2" or given.w_gate is not None else 1)
    for ours, theirs, right, magnitude in zip(outputs, eager, truth, (square, largest, largest, square, square), strict=True):
        if right is None:
            assert ours is None
            continue
        assert ours.dtype == dtype and ours.is_contiguous()
        assert_accurate(ours, theirs, right, terms=dim, magnitude=magnitude)


@pytest.mark.parametrize("pointwise", EAGER)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_matches_truth(pointwise, dtype, gated):
    kind = KINDS[(list(EAGER).index(pointwise) + gated) % 3]
    check(problem(17, 24, 29, dtype, gated=gated, kind=kind), pointwise, DROPOUT, WIDE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind, dropout", [("rms", DROPOUT), ("layer", None)])
def test_several_tiles_and_steps(dtype, kind, dropout):
    check(problem(17, 24, 40, dtype, kind=kind, bias=kind == "rms"), "silu", dropout)


@pytest.mark.parametrize("shape", [(1, 16, 5), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_shapes(shape, kind):
    check(problem(*shape, kind=kind), "gelu_tanh", DROPOUT)


def test_tiles_of_rows_in_groups():
    check(problem(147, 3, 20, gated=False, bias=False), "relu")


def test_wide_tiles_are_written_in_parts():
    check(problem(5, 16, 150, torch.bfloat16), "silu", DROPOUT, Tile(16, 128, 16))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_rows(kind, dtype):
    check(problem(5, 24, 7, dtype, kind=kind, rows_dtype=torch.float32), "silu", DROPOUT, WIDE)


def test_rows_of_another_dtype_without_a_norm():
    check(problem(5, 24, 7, torch.bfloat16, rows_dtype=torch.float32), "silu", None, WIDE)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype, rows_dtype", [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float32)], ids=str)
def test_rows_are_normalised_as_the_norm_stores_them(kind, dtype, rows_dtype):
    given = problem(17, 24, 29, dtype, kind=kind, rows_dtype=rows_dtype)
    y, _ = norm_forward(given.x, given.norm.weight, given.norm.bias, kind=kind, eps=EPS, offset=given.norm.offset)
    y = y.to(dtype)
    fused = mlp_forward(given.x, given.w_gate, given.w_up, **given.options(), pointwise="silu", keep=True, tile=WIDE)
    apart = mlp_forward(y, given.w_gate, given.w_up, b_gate=given.b_gate, b_up=given.b_up, pointwise="silu", keep=True, tile=WIDE)
    assert all(map(torch.equal, fused, apart))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [1, 33, 150])
def test_statistics_are_the_norms_own(kind, dtype, cols):
    x = framed(torch.randn(19, cols, generator=torch.Generator().manual_seed(cols), dtype=torch.float64).to(dtype))
    _, expected = norm_forward(x, torch.ones(cols, dtype=dtype), None, kind=kind, eps=EPS)
    ours = norm_stats(x.unsqueeze(0), kind=kind, eps=EPS)
    assert ours.dtype == expected.dtype and torch.equal(ours, expected)


def test_unequal_strides():
    given = problem(12, 48, 20, kind="layer")
    norm = Norm("layer", given.norm.weight[::2], given.norm.bias[1::2])
    w_gate, w_up = given.w_gate[:, ::2], framed(given.w_up[:, :24].T).T
    check(Problem(given.x[::2, ::2], w_gate, w_up, given.b_gate, given.b_up.flip(0), norm, given.grad[:6]), "silu", DROPOUT, WIDE)


def test_zero_strides():
    given = problem(1, 24, 20)
    x, grad, bias = given.x.expand(5, 24), torch.ones(()).expand(5, 20), given.b_up[:1].expand(20)
    check(Problem(x, given.w_gate, given.w_up, given.b_gate, bias, None, grad), "gelu", DROPOUT, WIDE)


@pytest.mark.parametrize("shape", [(0, 7, 5), (3, 7, 0)], ids=str)
def test_empty(shape):
    given = problem(*shape, kind="rms")
    outputs = run(given, "silu", DROPOUT)
    assert all(out.shape == (shape[0], shape[2]) for out in outputs)


def test_rows_without_elements_leave_the_bias():
    given = problem(3, 0, 5)
    _, gate, up = mlp_forward(given.x, given.w_gate, given.w_up, **given.options(), pointwise="silu", keep=True)
    assert torch.equal(gate, given.b_gate.expand(3, 5)) and torch.equal(up, given.b_up.expand(3, 5))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_hidden_may_take_the_place_of_its_gradient(gated):
    given = problem(17, 16, 20, gated=gated, kind="rms")
    inputs, options = (given.x, given.w_gate, given.w_up), {**given.options(), "pointwise": "silu", "dropout": DROPOUT}
    expected = mlp_backward(given.grad, *inputs, **options)
    grad = given.grad.contiguous()
    ours = mlp_backward(grad, *inputs, **options, overwrite=True)
    assert ours[2] is grad
    assert all((one is None and other is None) or torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


def test_slices_of_rows_make_the_whole():
    given = problem(19, 16, 20)
    # Sums of a few integers are exact, in whatever order the interpreter's matrix product takes a row's terms.
    given = given._replace(x=(2 * given.x).round(), w_gate=(8 * given.w_gate).round(), w_up=(8 * given.w_up).round())

    def outputs(span, dropout):
        part = given._replace(x=given.x[span], grad=given.grad[span])
        return run(part, "silu", dropout, WIDE)

    whole = outputs(slice(None), DROPOUT)
    for first, last in itertools.pairwise((0, 4, 5, 19)):
        parts = outputs(slice(first, last), DROPOUT.rows_from(first))
        assert all(torch.equal(expected[first:last], ours) for expected, ours in zip(whole, parts, strict=True))


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_dropped_elements_give_no_gradient(p):
    dropout = Dropout(DROPOUT.state, p, 3)
    ones = torch.ones(5, 16)
    hidden, _, _ = mlp_forward(ones, None, torch.ones(33, 16) / 16, pointwise="relu", dropout=dropout)
    keep = rng.dropout(torch.ones(5, 33), dropout) != 0
    assert torch.equal(hidden, torch.where(keep, 2.0, 0.0)) and (p < 1 or not keep.any())
    _, dup, _ = mlp_backward(torch.ones(5, 33), ones, None, torch.ones(33, 16) / 16, pointwise="relu", dropout=dropout)
    assert torch.equal(dup, hidden)


def test_a_nan_is_not_hidden_and_spoils_its_row_alone():
    given = problem(5, 24, 20, kind="layer")
    given.x[2, 3] = torch.nan
    hidden, _, _ = mlp_forward(given.x, given.w_gate, given.w_up, **given.options(), pointwise="silu", tile=WIDE)
    assert hidden[2].isnan().all() and hidden[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("arch", NVIDIA + AMD)
def test_narrow_rows_are_fused(arch):
    meta = torch.device("meta")
    with assume_architecture(arch):
        fused = [dim for dim in range(64, 16384, 64) if fused_mlp(dim, 4 * dim, torch.bfloat16, meta)]
        assert fused == list(range(64, fused[-1] + 64, 64)) and 512 <= fused[-1] <= 4096
        assert not any(fused_mlp(dim, 4 * dim, dtype, meta) for dim in fused for dtype in (torch.float32, torch.float64))


def test_the_interpreter_fuses_on_demand():
    cpu = torch.device("cpu")
    assert not fused_mlp(64, 256, torch.bfloat16, cpu) and fused_mlp(64, 256, torch.float64, cpu, force=True)
