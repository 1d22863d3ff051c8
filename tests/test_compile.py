"""`torch.compile` around a block: one graph, the gradients of eager, with the same masks."""

import pytest
import torch

from ckpt_ext import BlockSpec, Policy, TransformerBlock


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("save", ["input", "attention", "all"])
def test_one_graph_with_the_gradients_and_masks_of_eager(save):
    spec = BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=48, rope_theta=1e4, residual_dropout=0.5, mlp_dropout=0.1, attn_dropout=0.2)
    block = TransformerBlock(spec, policy=Policy(save), dtype=torch.float64)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for length in (6, 9):
        x = torch.randn(2, length, 32, dtype=torch.float64, requires_grad=True)
        runs = []
        for function in (block, compiled):
            torch.manual_seed(0)
            y = function(x)
            runs.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])])
        for expected, actual in zip(*runs, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
