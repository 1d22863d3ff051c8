"""Counted bytes against bytes counted by hand."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock, rope
from ckpt_ext.memory import LiveStorages, saved_bytes

KILOBYTE = 256
"""Elements of a float32 tensor of 1024 bytes."""


def test_a_temporary_counts_while_it_lives():
    with LiveStorages() as memory:
        kept = torch.zeros(KILOBYTE)
        assert (memory.live, memory.peak) == (1024, 1024)
        temporary = kept + 1
        assert (memory.live, memory.peak) == (2048, 2048)
        del temporary
        assert (memory.live, memory.peak) == (1024, 2048)
        kept = kept * 2
    assert (memory.live, memory.peak) == (1024, 2048)
    del kept
    assert (memory.live, memory.peak) == (0, 2048)


def test_views_and_results_in_place_count_once():
    with LiveStorages() as memory:
        base = torch.zeros(KILOBYTE)
        view = base.view(16, 16).t()[3:]
        base.add_(1).mul_(2)
        torch.add(base, 1, out=base)
        assert memory.live == 1024
        del base
        assert memory.live == 1024
        del view
    assert (memory.live, memory.peak) == (0, 1024)


def test_a_small_view_keeps_its_whole_storage_alive():
    with LiveStorages() as memory:
        corner = torch.zeros(KILOBYTE)[:1]
        assert memory.live == 1024
    del corner


def test_what_was_there_before_does_not_count():
    weight = torch.nn.Parameter(torch.ones(16, 16))
    with LiveStorages() as memory:
        views = [weight.t(), weight.detach(), weight.view(-1)]
        with torch.no_grad():
            weight.mul_(2)
        assert memory.live == 0
        y = weight * 2
    assert memory.live == 1024
    del views, y


def test_ignored_storages_do_not_count_and_counted_ones_can_be_let_go():
    before = torch.zeros(KILOBYTE)
    with LiveStorages(ignored=[before]) as memory:
        a, b = torch.zeros(KILOBYTE), torch.zeros(KILOBYTE)
        memory.ignore(a.view(16, 16))
        memory.ignore(a)
        assert memory.live == 1024
        del a
        assert memory.live == 1024
    del b
    assert memory.live == 0


def test_operators_with_several_results():
    with LiveStorages() as memory:
        values, indices = torch.zeros(KILOBYTE).sort()
        assert memory.live == 1024 + 2048
        assert memory.peak == 1024 + 1024 + 2048
    del values, indices


def test_backward_is_counted():
    x = torch.ones(KILOBYTE, requires_grad=True)
    with LiveStorages() as memory:
        y = x.exp()
        loss = y.sum()
        assert memory.live == 1024 + 4
        del y
        assert memory.live == 1024 + 4, "exp keeps its result"
        loss.backward()
        assert x.grad is not None
        del loss
        assert memory.live == 1024, "the gradient alone is left"


def test_fake_tensors_cost_what_real_ones_would():
    with FakeTensorMode():
        with LiveStorages() as memory:
            a = torch.empty(1 << 40)
            b = a + 1
            assert memory.live == 2 * (4 << 40)
            del a
            assert memory.live == 4 << 40
        del b
    assert (memory.live, memory.peak) == (0, 2 * (4 << 40))


def test_many_storages_at_reused_addresses():
    with LiveStorages() as memory:
        for _ in range(100):
            torch.zeros(KILOBYTE)
    gc.collect()
    assert (memory.live, memory.peak) == (0, 1024)


def test_saved_bytes_by_hand():
    x = torch.ones(KILOBYTE, requires_grad=True)
    assert saved_bytes(lambda: x + 1) == 0
    assert saved_bytes(lambda: x.exp()) == 1024
    assert saved_bytes(lambda: x.exp().exp()) == 2048
    assert saved_bytes(lambda: x * x) == 1024, "one storage, saved twice"
    assert saved_bytes(lambda: x * x, ignored=[x]) == 0
    assert saved_bytes(lambda: x.sin() * x.sin(), ignored=[x]) == 2048
    assert saved_bytes(lambda: x[:2] * x[:2]) == 1024, "a view keeps its whole storage"


def test_what_is_freed_during_forward_is_not_kept():
    x = torch.ones(KILOBYTE, requires_grad=True)

    def forward():
        x.exp().exp()
        return x.exp()

    assert saved_bytes(forward) == 1024


def test_nothing_is_saved_without_grad():
    with torch.no_grad():
        assert saved_bytes(lambda: torch.ones(KILOBYTE, requires_grad=True).exp()) == 0


SPEC = BlockSpec(dim=16, heads=2, hidden_dim=32, rope_theta=1e4)
DROPPING = BlockSpec(dim=16, heads=2, hidden_dim=32, rope_theta=1e4, residual_dropout=0.1, mlp_dropout=0.1)
BATCH, LENGTH, BLOCKS = 2, 12, 3
INPUT_BYTES = BATCH * LENGTH * 16 * 4


def stack(spec: BlockSpec, kind=TransformerBlock, **arguments):
    blocks = torch.nn.ModuleList(kind(spec, backend="aten", **arguments) for _ in range(BLOCKS))
    table = rope.table(spec, LENGTH, torch.float32, torch.device("cpu"))
    return blocks, [*blocks.parameters(), *table]


def through(blocks, x, run=lambda block, x: block(x)):
    for block in blocks:
        x = run(block, x)
    return x


@pytest.mark.parametrize(("spec", "state_bytes"), [(SPEC, 0), (DROPPING, 16)], ids=["plain", "dropout"])
def test_a_block_keeps_its_input_and_16_bytes_where_it_drops(spec, state_bytes):
    blocks, ignored = stack(spec)
    x = torch.randn(BATCH, LENGTH, 16, requires_grad=True)
    assert saved_bytes(lambda: through(blocks, x), ignored) == BLOCKS * (INPUT_BYTES + state_bytes)


def test_save_attention_keeps_the_output_and_the_log_sum_exp_too():
    blocks, ignored = stack(SPEC, policy=Policy(save="attention"))
    x = torch.randn(BATCH, LENGTH, 16, requires_grad=True)
    assert saved_bytes(lambda: through(blocks, x), ignored) == BLOCKS * (2 * INPUT_BYTES + BATCH * LENGTH * 2 * 4)


@pytest.mark.parametrize("save", ["input", "attention", "all"])
def test_nothing_is_kept_past_the_saved_tensors(save):
    """What is alive between forward and backward is what the hooks saw: no tensor hides on an autograd context."""
    blocks, ignored = stack(DROPPING, policy=Policy(save=save))
    x = torch.randn(BATCH, LENGTH, 16, requires_grad=True)
    expected = saved_bytes(lambda: through(blocks, x), [*ignored, x])
    with LiveStorages(ignored) as memory:
        y = through(blocks, x)
        assert memory.live == expected + INPUT_BYTES, "the saved tensors, and y"
    del y


def test_stock_checkpointing_keeps_inputs_alone_and_plain_blocks_much_more():
    blocks, ignored = stack(SPEC, kind=EagerBlock)
    x = torch.randn(BATCH, LENGTH, 16, requires_grad=True)

    def checkpointed(block, x):
        return checkpoint(block, x, use_reentrant=False)

    assert saved_bytes(lambda: through(blocks, x, checkpointed), ignored) == BLOCKS * INPUT_BYTES
    assert saved_bytes(lambda: through(blocks, x), ignored) > 10 * BLOCKS * INPUT_BYTES


def test_saved_bytes_of_fake_blocks():
    with FakeTensorMode():
        blocks, ignored = stack(SPEC)
        x = torch.randn(BATCH, LENGTH, 16, requires_grad=True)
        assert saved_bytes(lambda: through(blocks, x), ignored) == BLOCKS * INPUT_BYTES
