"""Chains of blocks in segments: the gradients of the blocks one by one, bit for bit, and fewer inputs kept."""

import gc
import itertools
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock, attention_mask, checkpoint_sequential
from ckpt_ext.memory import LiveStorages, saved_bytes
from ckpt_ext.partition import even_lengths, least_peak_lengths

DROPOUT = {"attn_dropout": 0.2, "residual_dropout": 0.3, "mlp_dropout": 0.1}
SPEC = BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=44, rope_theta=1e4, **DROPOUT)


def chain(layers=5, spec=SPEC, **arguments):
    torch.manual_seed(2)
    return torch.nn.ModuleList(TransformerBlock(spec, **arguments) for _ in range(layers))


def inputs(length=9, batch=2):
    torch.manual_seed(5)
    x = torch.randn(batch, length, 32)
    return x.requires_grad_(), torch.randn_like(x)


def one_by_one(blocks, x, mask=None):
    for block in blocks:
        x = block(x, mask=mask)
    return x


def results(run, blocks, x, grad):
    """Output and all gradients; dropout as after one seed."""
    torch.manual_seed(11)
    y = run(x)
    wanted = [t for t in (x, *blocks.parameters()) if t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, grad)]


def assert_equal(actual, expected):
    assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("segments", ["auto", 1, 2, 3, 5, 9])
@pytest.mark.parametrize("slices", [1, 3])
def test_equals_the_blocks_one_by_one_bit_for_bit(segments, slices):
    blocks = chain(policy=Policy(slices=slices))
    x, grad = inputs()
    mask = attention_mask(key_mask=torch.arange(9).expand(2, 9) > 1)
    expected = results(lambda x: one_by_one(blocks, x, mask), blocks, x, grad)
    assert_equal(results(lambda x: checkpoint_sequential(blocks, x, segments=segments, mask=mask), blocks, x, grad), expected)


def test_equals_the_blocks_one_by_one_through_triton():
    blocks = chain(3, backend="triton")
    x, grad = inputs(5, 1)
    expected = results(lambda x: one_by_one(blocks, x), blocks, x, grad)
    assert_equal(results(lambda x: checkpoint_sequential(blocks, x, segments=1), blocks, x, grad), expected)


def test_keeps_the_inputs_of_segments_alone():
    blocks = chain(6)
    x, _ = inputs()
    state = 16 * 6
    for segments in (1, 2, 3, 6):
        kept = saved_bytes(lambda n=segments: checkpoint_sequential(blocks, x, segments=n), blocks.parameters())
        table = 2 * 9 * 4 * 4  # cosines and sines
        assert kept == segments * x.nbytes + state + table


def test_backward_holds_one_segment_and_frees_it():
    blocks = chain(9, BlockSpec(dim=32, heads=4, hidden_dim=16), policy=Policy(slices=1)).requires_grad_(False)
    x = torch.randn(1, 64, 32, requires_grad=True)
    peaks = {}
    for segments in (3, 9):
        x.grad = None
        memory = LiveStorages([x])
        with memory:
            y = checkpoint_sequential(blocks, x, segments=segments)
            y.sum().backward()
            del y
        peaks[segments] = memory.peak / x.nbytes
        assert memory.live == x.grad.nbytes
    # Eight inputs besides x in the one run; two, and two that are rebuilt, in the other.
    assert peaks[3] == pytest.approx(peaks[9] - 4, abs=0.01)


def test_frozen_blocks_before_and_inside():
    blocks = chain(6)
    x, grad = inputs()
    x = x.detach()
    for index in (0, 1, 3):
        blocks[index].requires_grad_(False)
    expected = results(lambda x: one_by_one(blocks, x), blocks, x, grad)
    assert_equal(results(lambda x: checkpoint_sequential(blocks, x, segments=2), blocks, x, grad), expected)


def test_a_second_backward_and_each_hook_once():
    blocks = chain()
    x, grad = inputs()
    fired = []
    for name, parameter in blocks.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    y = checkpoint_sequential(blocks, x, segments=2)
    y.backward(grad, retain_graph=True)
    assert sorted(fired) == sorted(name for name, _ in blocks.named_parameters())
    # The last block's gradients come first: each block hands over its own, not the segment all at once.
    assert {name.split(".")[0] for name in fired[:9]} == {"4"}
    first = [p.grad.clone() for p in blocks.parameters()]
    blocks.zero_grad()
    y.backward(grad)
    assert_equal([p.grad for p in blocks.parameters()], first)


def test_graphs_are_freed_whether_backward_ran_or_not():
    blocks = chain().requires_grad_(False)
    x, grad = inputs()
    memory = LiveStorages([x])
    with memory:
        for _ in range(3):
            checkpoint_sequential(blocks, x, segments=2)
        gc.collect()
        assert memory.live == 0
        torch.autograd.grad(checkpoint_sequential(blocks, x, segments=2), x, grad)
        gc.collect()
        assert memory.live == 0
    nodes = []
    y = checkpoint_sequential(chain(), x, segments=2)
    nodes.append(weakref.ref(y.grad_fn))
    y.backward(grad)
    del y
    gc.collect()
    assert nodes[0]() is None


def test_inside_a_checkpoint_and_under_hooks_each_tensor_is_unpacked_once():
    blocks = chain()
    x, grad = inputs()
    expected = results(lambda x: one_by_one(blocks, x), blocks, x, grad)

    def run(x):
        return checkpoint_sequential(blocks, x, segments=2)

    actual = results(lambda x: checkpoint(run, x, use_reentrant=False), blocks, x, grad)
    assert_equal(actual, expected)
    counts = {"pack": 0, "unpack": 0}

    def count(name):
        def hook(tensor):
            counts[name] += 1
            return tensor

        return hook

    with torch.autograd.graph.saved_tensors_hooks(count("pack"), count("unpack")):
        assert_equal(results(run, blocks, x, grad), expected)
    assert counts["pack"] == counts["unpack"] > 0


def test_compiled_code_calls_the_chain_as_it_is():
    blocks = chain()
    x, grad = inputs()
    expected = results(lambda x: checkpoint_sequential(blocks, x, segments=2), blocks, x, grad)
    compiled = torch.compile(lambda x: checkpoint_sequential(blocks, x, segments=2), backend="aot_eager")
    assert_equal(results(compiled, blocks, x, grad), expected)


def test_a_weight_changed_in_place_is_noticed():
    blocks = chain()
    x, grad = inputs()
    y = checkpoint_sequential(blocks, x, segments=1)
    with torch.no_grad():
        blocks[1].up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


def test_without_gradient_nothing_is_kept():
    blocks = chain().eval()
    x, _ = inputs()
    with torch.no_grad():
        y = checkpoint_sequential(blocks, x)
    assert not y.requires_grad and torch.equal(y, one_by_one(blocks, x))
    assert torch.equal(checkpoint_sequential([], x), x)


def test_refusals():
    x, _ = inputs()
    with pytest.raises(ValueError, match=r"blocks\[1\] must keep its input alone in a segment, got save='all'"):
        checkpoint_sequential([TransformerBlock(SPEC), TransformerBlock(SPEC, policy=Policy("all"))], x)
    with pytest.raises(NotImplementedError, match=r"blocks\[0\] must be exactly TransformerBlock, got EagerBlock"):
        checkpoint_sequential([EagerBlock(SPEC)], x)
    hooked = TransformerBlock(SPEC)
    hooked.register_forward_hook(lambda module, args, y: 2 * y)
    with pytest.raises(NotImplementedError, match=r"blocks\[0\] must have no hooks"):
        checkpoint_sequential([hooked], x)
    with pytest.raises(ValueError, match="blocks must be an iterable of TransformerBlock, got TransformerBlock"):
        checkpoint_sequential(TransformerBlock(SPEC), x)
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, dim\], got \[32\]"):
        checkpoint_sequential(chain(), x[0, 0])
    with pytest.raises(ValueError, match="segments must be a positive int, got 0"):
        checkpoint_sequential(chain(), x, segments=0)


# --- where to cut ---


def peak(lengths, inputs, working_sets):
    """The definition, step by step."""
    starts = list(itertools.accumulate(lengths, initial=0))[:-1]
    worst = 0
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        kept = sum(inputs[s] for s in starts[:index])
        worst = max(worst, kept + sum(inputs[start : start + length]) + max(working_sets[start : start + length]))
    return worst


def every_cut(blocks):
    for cuts in itertools.product((False, True), repeat=blocks - 1):
        bounds = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), blocks]
        yield [b - a for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_the_best_of_all(seed):
    generator = torch.Generator().manual_seed(seed)
    blocks = 1 + seed % 9
    inputs, working_sets = (torch.randint(1, high, (blocks,), generator=generator).tolist() for high in (10, 30))
    lengths = least_peak_lengths(inputs, working_sets)
    assert sum(lengths) == blocks and min(lengths) > 0
    assert peak(lengths, inputs, working_sets) == min(peak(cut, inputs, working_sets) for cut in every_cut(blocks))


def test_equal_blocks_make_segments_that_shrink():
    assert least_peak_lengths([1] * 32, [6] * 32) == [7, 7, 6, 5, 4, 3]
    assert least_peak_lengths([], []) == []
    assert even_lengths(32, 5) == [7, 7, 6, 6, 6] and even_lengths(2, 5) == [1, 1] and even_lengths(0, 3) == [0]
