"""Rotary embedding against float64 maths that autograd differentiates."""

import pytest
import torch

from ckpt_ext.kernels.rope import rotate
from ckpt_ext.testing import assert_accurate, framed, poison_allocations

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poison_allocations(monkeypatch)


def explicit_rotation(x, cos, sin):
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def angles(length, half, dtype=torch.float64):
    angle = torch.randn(length, half, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    return framed(angle.cos().to(dtype)), framed(angle.sin().to(dtype))


def heads(*shape, dtype=torch.float64, seed=0):
    return framed(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype))


def check(x, cos, sin):
    """The rotation and its gradient, which is the rotation back."""
    before = x.clone()
    out = rotate(x, cos, sin)
    truth, eager = explicit_rotation(x.double(), cos.double(), sin.double()), explicit_rotation(x, cos.to(x.dtype), sin.to(x.dtype))
    assert out.dtype == x.dtype and out.transpose(1, 2).is_contiguous()
    assert_accurate(out, eager, truth, terms=2)

    grad = heads(*x.shape, dtype=x.dtype, seed=1)
    true_grad, eager_grad = (
        torch.autograd.grad(explicit_rotation(leaf, cos.to(leaf.dtype), sin.to(leaf.dtype)), leaf, grad.to(leaf.dtype))[0]
        for leaf in (x.double().requires_grad_(), x.detach().requires_grad_())
    )
    assert_accurate(rotate(grad, cos, sin, inverse=True), eager_grad, true_grad, terms=2)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, rotated", [(2, 2), (7, 6), (17, 8), (33, 2), (100, 64), (5, 0)])
def test_matches_truth(dtype, head_dim, rotated):
    angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    check(heads(2, 3, 5, head_dim, dtype=dtype), *angles(5, rotated // 2, angle_dtype))


@pytest.mark.parametrize(
    "view",
    [lambda x: x.transpose(1, 2), lambda x: x[:, :, ::2], lambda x: x[..., ::2], lambda x: x[:, :1].expand(-1, 3, -1, -1)],
    ids=["tokens first", "every second token", "every second element", "expanded"],
)
def test_strides(view):
    x = view(heads(2, 4, 6, 16, dtype=torch.float32))
    cos, sin = angles(2 * x.shape[2], 4, torch.float32)
    check(x, cos[::2], sin[1::2])


def test_angles_by_stride_zero_and_their_own_dtype():
    cos, sin = angles(1, 4, torch.bfloat16)
    check(heads(1, 2, 7, 8, dtype=torch.float32), cos.expand(7, -1), sin.expand(7, -1))


def test_rotating_back_restores():
    x, (cos, sin) = heads(2, 3, 5, 17), angles(5, 8)
    torch.testing.assert_close(rotate(rotate(x, cos, sin), cos, sin, inverse=True), x, rtol=0, atol=1e-12)


def test_elements_beyond_the_rotated_part_keep_their_bits():
    x = heads(2, 3, 5, 33, dtype=torch.bfloat16)
    assert torch.equal(rotate(x, *angles(5, 4, torch.float32))[..., 8:], x[..., 8:])


def test_gradient_of_a_plain_sum():
    grad, (cos, sin) = torch.ones((), dtype=torch.float64).expand(2, 3, 5, 8), angles(5, 3)
    expected = explicit_rotation(grad, cos, -sin)
    torch.testing.assert_close(rotate(grad, cos, sin, inverse=True), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8), (2, 3, 5, 0)], ids=str)
def test_empty(shape):
    assert rotate(torch.empty(shape), *angles(shape[2], shape[3] // 2, torch.float32)).shape == shape


def test_runs_are_equal_bit_for_bit():
    x, (cos, sin) = heads(2, 3, 9, 17, dtype=torch.bfloat16), angles(9, 8, torch.float32)
    assert torch.equal(rotate(x, cos, sin), rotate(x, cos, sin))
