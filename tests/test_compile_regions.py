"""Compiled blocks beside what else decides what is run again or compiled again: checkpoints, memory budgets, other lengths."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckpt_ext
from ckpt_ext import BlockSpec, TransformerBlock, checkpoint_sequential, functional
from ckpt_ext.testing import assert_compiled_as_eager

F64 = torch.float64
SPEC = BlockSpec(dim=16, heads=2, hidden_dim=24, activation="relu", residual_dropout=0.5)
# Warnings are the compiler's own, about what it traces.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("fresh_compiler")]


def blocks(count=2):
    torch.manual_seed(3)
    return torch.nn.Sequential(*(TransformerBlock(SPEC, dtype=F64) for _ in range(count)))


def stream(length=6):
    return torch.randn(2, length, SPEC.dim, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_lengths_of_one_slice_share_a_graph():
    block, counted = blocks(1), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counted, fullgraph=True)
    for length in (6, 9, 13):
        assert_compiled_as_eager(compiled, block, block, stream(length))
    assert counted.frame_count <= 2  # for the first length, then for all


def test_a_memory_budget_draws_no_mask_again():
    pair = blocks()

    def function(x):
        return pair(x.tanh().sin()).cos()

    with torch._functorch.config.patch(activation_memory_budget=0.05):
        assert_compiled_as_eager(torch.compile(function, backend="aot_eager", fullgraph=True), function, pair, stream())


def test_a_memory_budget_of_nothing_is_refused():
    block = blocks(1)
    with (
        torch._functorch.config.patch(activation_memory_budget=0),
        pytest.raises(Exception, match="activation_memory_budget must be above 0 around dropout, got 0"),
    ):
        torch.compile(block, backend="aot_eager", fullgraph=True)(stream())


mlp = functools.partial(functional.mlp, activation="silu", dropout_p=0.5)


@pytest.mark.parametrize("checkpoint", [functools.partial(torch_checkpoint, use_reentrant=False), ckpt_ext.checkpoint])
def test_checkpoints_within_a_compiled_function(checkpoint):
    one, two = torch.nn.Linear(8, 12, dtype=F64), torch.nn.Linear(12, 8, dtype=F64)
    both = torch.nn.ModuleList([one, two])

    def layer(x):
        return mlp(x, None, one.weight, two.weight).tanh() + one(x).mean() + two(one(x))

    def function(x):
        return layer(checkpoint(layer, x.sin())).cos()

    def plain(x):
        return layer(layer(x.sin())).cos()

    x = torch.randn(3, 8, dtype=F64, requires_grad=True)
    # Ours leaves the graph.
    compiled = torch.compile(function, backend="aot_eager", fullgraph=checkpoint is not ckpt_ext.checkpoint)
    assert_compiled_as_eager(compiled, plain, both, x)


def test_checkpoints_around_compiled_blocks():
    compiled = blocks()

    def plain(x):
        return functools.reduce(lambda x, block: block.forward(x), compiled, x)

    for block in compiled:
        block.compile(backend="aot_eager")  # the module stays what it is
    ways = {
        "torch's": lambda x: torch_checkpoint(compiled[1], torch_checkpoint(compiled[0], x, use_reentrant=False), use_reentrant=False),
        "ours": lambda x: ckpt_ext.checkpoint(compiled[1], ckpt_ext.checkpoint(compiled[0], x)),
        "a segment": lambda x: checkpoint_sequential(compiled, x, segments=1),
    }
    for way in ways.values():
        assert_compiled_as_eager(way, plain, compiled, stream())


def test_a_compiled_wrapper_is_no_block_of_a_chain():
    pair = blocks()
    with pytest.raises(NotImplementedError, match=r"blocks\[0\] must be exactly TransformerBlock, got OptimizedModule"):
        checkpoint_sequential([torch.compile(block, backend="aot_eager") for block in pair], stream())
