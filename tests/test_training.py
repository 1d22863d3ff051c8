"""Training through blocks: the same losses as without recompute, step by step, from one thread or from several."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock

SPEC = BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=48, rope_theta=1e4, residual_dropout=0.1, mlp_dropout=0.1, attn_dropout=0.1)


def chain(kind, **arguments):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(kind(SPEC, **arguments) for _ in range(2)))


def losses(model, steps=20):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(2, 8, SPEC.dim, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(data) - data.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


@pytest.mark.parametrize("save", ["input", "attention", "all"])
def test_losses_with_dropout_equal_those_without_recompute_at_every_step(save):
    expected = losses(chain(EagerBlock))
    actual = losses(chain(TransformerBlock, policy=Policy(save)))
    assert expected[-1] < expected[0]
    assert max(abs(a - b) for a, b in zip(actual, expected, strict=True)) < 1e-6


def gradients(model, x):
    return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))


def assert_same(actual, expected):
    """Up to rounding: a new thread may have another number of threads for a matrix product, which sums in another order then."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_threads_do_not_disturb_each_other(backend):
    models = [chain(TransformerBlock, backend=backend, dtype=torch.float64).eval() for _ in range(4)]
    x = torch.randn(1, 5, SPEC.dim, dtype=torch.float64)
    expected = gradients(models[0], x)
    with ThreadPoolExecutor(4) as threads:
        for actual in threads.map(lambda model: gradients(model, x), models):
            assert_same(actual, expected)


def test_backward_may_run_in_another_thread():
    model = chain(TransformerBlock, dtype=torch.float64)
    x = torch.randn(1, 5, SPEC.dim, dtype=torch.float64)
    torch.manual_seed(3)
    expected = gradients(model, x)
    torch.manual_seed(3)
    loss = model(x).square().sum()
    with ThreadPoolExecutor(1) as thread:
        actual = thread.submit(torch.autograd.grad, loss, list(model.parameters())).result()
    assert_same(actual, expected)
