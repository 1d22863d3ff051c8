import pytest
import torch
from torch.nn import functional as F

from ckpt_ext.truth import Float64Throughout


def norm(x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def exact_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


CASES = {
    "cast": (norm, exact_norm),
    "softmax": (lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype), lambda x: F.softmax(x, -1)),
    "factory": (lambda x: x * torch.arange(5, dtype=torch.float32) / 3, lambda x: x * torch.arange(5, dtype=torch.float64) / 3),
    "integers": (lambda x: x * (torch.arange(5).float() / 3).cos(), lambda x: x * (torch.arange(5).double() / 3).cos()),
    "half": (lambda x: x.to(torch.bfloat16).to(x.dtype), lambda x: x),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_model_casts_stays_in_float64(name):
    cast, exact = CASES[name]
    results = []
    for function, mode in ((exact, None), (cast, Float64Throughout())):
        x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with mode or torch.enable_grad():
            y = function(x)
            y.cos().sum().backward()
        results.append((y.detach(), x.grad))
    for actual, expected in zip(*reversed(results), strict=True):
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-15)


def test_without_it_casts_lose_bits():
    x = torch.randn(3, 5, dtype=torch.float64)
    assert (norm(x) - exact_norm(x)).abs().max() > 1e-9


def test_integers_and_bools_stay():
    with Float64Throughout():
        x = torch.zeros(3, dtype=torch.float64)
        assert x.to(torch.int64).dtype == torch.int64
        assert (x > 0).dtype == torch.bool
        assert torch.arange(3).dtype == torch.int64
