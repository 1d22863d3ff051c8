"""Device functions by themselves, under the interpreter."""

import math

import pytest
import torch
import triton
import triton.language as tl

from ckpt_ext.kernels.primitives import ptr_offset, tanh


@triton.jit
def _store_offset(offset_ptr, row, stride):
    tl.store(offset_ptr, ptr_offset((row,), (stride,)))


def test_offsets_pass_two_to_the_31():
    offset = torch.zeros(1, dtype=torch.int64)
    _store_offset[(1,)](offset, 319, 7864320)
    assert offset.item() == 319 * 7864320 == 2508718080


@triton.jit
def _store_tanh(y_ptr, x_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(y_ptr + lanes, tanh(tl.load(x_ptr + lanes)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tanh(dtype):
    """Near 0, where both its forms meet, where it becomes 1, and beyond every number."""
    sizes = torch.cat((torch.logspace(-30, -1, 510, dtype=torch.float64), torch.linspace(0.3, 25, 512), torch.tensor([0.0, 1e30])))
    x = torch.cat((sizes, -sizes)).to(dtype)
    y = torch.empty_like(x)
    _store_tanh[(1,)](y, x, BLOCK=2048)
    truth = x.double().tanh()
    assert ((y.double() - truth).abs() <= 4 * torch.finfo(dtype).eps * truth.abs()).all()

    edges = torch.tensor([math.inf, -math.inf, math.nan, -0.0], dtype=dtype)
    y = torch.empty_like(edges)
    _store_tanh[(1,)](y, edges, BLOCK=4)
    assert torch.equal(y[:2], torch.tensor([1, -1], dtype=dtype)) and y[2].isnan() and y[3] == 0
