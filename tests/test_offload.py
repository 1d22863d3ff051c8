"""Inputs in the host's memory: the same bits, fewer bytes on the device, and copies that are waited for."""

import gc
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ckpt_ext import BlockSpec, Policy, TransformerBlock, checkpoint_sequential, host, offload
from ckpt_ext.memory import LiveStorages, saved_bytes

SPEC = BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=44, rope_theta=1e4, attn_dropout=0.2, residual_dropout=0.3, mlp_dropout=0.1)
LAYERS, LENGTH = 6, 16
UNIT = LENGTH * SPEC.dim * 4


@pytest.fixture(autouse=True)
def _nothing_is_too_small(monkeypatch):
    monkeypatch.setattr(offload, "LEAST_BYTES", 0)


class DelayedLane:
    """Copies that are made as late as a stream may make them: when they are waited for. Until then the target holds NaN."""

    def __init__(self):
        self.under_way, self.most, self.log = [], 0, []

    def to_host(self, x):
        self.log.append("out")
        return self._begin(x, host.buffer_for(x).fill_(torch.nan))

    def to_device(self, buffer, like):
        self.log.append("back")
        return self._begin(buffer, torch.full_like(buffer, torch.nan, device=like))

    def _begin(self, source, target):
        copy = (source, target)
        self.under_way.append(copy)
        self.most = max(self.most, len(self.under_way))
        return target, copy

    def wait_for(self, copy):
        # A stream's copies are made in their order.
        while any(other is copy for other in self.under_way):
            source, target = self.under_way.pop(0)
            target.copy_(source)


@pytest.fixture
def delayed(monkeypatch):
    lane = DelayedLane()
    monkeypatch.setattr(offload, "_Here", lambda: lane)
    return lane


def chain(offloaded, layers=LAYERS, save="input", **arguments):
    torch.manual_seed(2)
    policy = Policy(save, 2, offload=offloaded)
    return torch.nn.ModuleList(TransformerBlock(SPEC, policy=policy, **arguments) for _ in range(layers))


def one_by_one(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def inputs():
    torch.manual_seed(5)
    x = torch.randn(1, LENGTH, SPEC.dim, requires_grad=True)
    return x, torch.randn_like(x)


def results(blocks, run=one_by_one):
    x, grad = inputs()
    torch.manual_seed(11)
    y = run(blocks, x)
    return [y.detach(), *torch.autograd.grad(y, [x, *blocks.parameters()], grad)]


def assert_equal(actual, expected):
    assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("save", ["input", "attention"])
@pytest.mark.parametrize("lane", ["here", "delayed"])
def test_bits_are_those_of_inputs_that_stay(save, lane, request):
    if lane == "delayed":
        request.getfixturevalue("delayed")
    assert_equal(results(chain(True, save=save)), results(chain(False, save=save)))


@pytest.mark.parametrize("segments", ["auto", 2, 3, LAYERS])
def test_first_inputs_of_segments_leave_too(segments, delayed):
    run = lambda blocks, x: checkpoint_sequential(blocks, x, segments=segments)  # noqa: E731
    assert_equal(results(chain(True), run), results(chain(False)))
    assert delayed.log.count("out") == (len(delayed.log) + 1) // 2


def test_automatic_segments_rebuild_nothing_that_leaves_the_device(delayed):
    blocks = chain(True)
    checkpoint_sequential(blocks, inputs()[0], segments="auto")
    # Each block parks its own input: of a longer segment only the first would.
    assert delayed.log.count("out") == LAYERS - 1


def test_through_triton():
    assert_equal(results(chain(True, 3, backend="triton")), results(chain(False, 3, backend="triton")))


def test_the_last_input_stays_and_copies_come_back_one_ahead(delayed):
    blocks, (x, grad) = chain(True), inputs()
    y = one_by_one(blocks, x)
    # Each input leaves when the next one comes, and copies are waited for one block later.
    assert delayed.log == ["out"] * (LAYERS - 1)
    assert len(delayed.under_way) == 1
    seen = []
    for block in blocks:
        block.down_proj.weight.register_post_accumulate_grad_hook(lambda _: seen.append(delayed.log.count("back")))
    y.backward(grad)
    # The last input and the one before it never had to come back: at each block the next one's is under way already.
    assert seen == [0, 1, 2, 3, 4, 4]
    assert delayed.most <= 2


def test_the_device_keeps_two_inputs_and_the_host_the_rest():
    blocks, (x, grad) = chain(True), inputs()
    with LiveStorages([*blocks.parameters(), x]) as memory:
        y = one_by_one(blocks, x * 1)
        gc.collect()
        # y, the inputs of the last block and of the one before it; states of dropout are 16 bytes a block.
        assert memory.live == pytest.approx(3 * UNIT, abs=1024)
        assert memory.host == (LAYERS - 1) * UNIT
        y.backward(grad)
        del y
        gc.collect()
        assert memory.host == 0
    assert memory.host_peak == (LAYERS - 1) * UNIT
    assert saved_bytes(lambda: one_by_one(blocks, x), list(blocks.parameters())) < UNIT


def test_the_peak_does_not_grow_with_the_chain():
    def peak(offloaded, layers):
        with FakeTensorMode():
            blocks = chain(offloaded, layers).requires_grad_(False)
            x = torch.empty(1, LENGTH, SPEC.dim, requires_grad=True)
            with LiveStorages([*blocks.parameters(), x]) as memory:
                one_by_one(blocks, x).sum().backward()
        return memory.peak

    assert peak(False, 12) - peak(False, 6) == pytest.approx(6 * UNIT, abs=1024)
    assert peak(True, 12) - peak(True, 6) == pytest.approx(0, abs=1024)


def test_a_second_backward_finds_everything_again(delayed):
    blocks, (x, grad) = chain(True), inputs()
    y = one_by_one(blocks, x)
    first = torch.autograd.grad(y, x, grad, retain_graph=True)
    second = torch.autograd.grad(y, x, grad)
    assert torch.equal(first[0], second[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, grad)


def test_backward_frees_the_host_while_the_loss_lives_on():
    blocks, (x, grad) = chain(True), inputs()
    with LiveStorages() as memory:
        y = one_by_one(blocks, x)
        y.backward(grad)
        gc.collect()
        assert memory.host == 0
    assert y.grad_fn is not None


def test_graphs_that_never_run_backward_are_freed():
    blocks, (x, _) = chain(True), inputs()
    with LiveStorages() as memory:
        y = one_by_one(blocks, x)
        node = weakref.ref(y.grad_fn)
        del y
        gc.collect()
        assert node() is None and memory.host == 0


def test_two_graphs_backward_in_either_order():
    expected = results(chain(False))
    for order in (0, 1):
        blocks = chain(True)
        runs = []
        for _ in range(2):
            x, grad = inputs()
            torch.manual_seed(11)
            runs.append((one_by_one(blocks, x), x, grad))
        for index in (order, 1 - order):
            y, x, grad = runs[index]
            assert_equal([y.detach(), *torch.autograd.grad(y, [x, *blocks.parameters()], grad)], expected)


def test_inputs_may_be_views_of_any_strides(delayed):
    block, reference = chain(True, 2), chain(False, 2)

    def gradient(blocks):
        torch.manual_seed(7)
        base = torch.randn(SPEC.dim, 2 * LENGTH, 2, requires_grad=True)
        torch.manual_seed(11)
        y = one_by_one(blocks, base.transpose(0, 2)[:, ::2])
        return torch.autograd.grad(y.square().sum(), base)[0]

    assert torch.equal(gradient(block), gradient(reference))


def test_a_change_in_place_before_the_copy_raises():
    blocks, (x, grad) = chain(True), inputs()
    first = x * 1
    y = blocks[0](first)
    with torch.no_grad():
        first.add_(1)
    with pytest.raises(RuntimeError, match="offloaded input has been modified by an inplace operation"):
        one_by_one(blocks[1:], y).backward(grad)


def test_a_change_in_place_while_the_copy_is_made_raises(delayed):
    blocks, (x, grad) = chain(True), inputs()
    first = x * 1
    y = blocks[1](blocks[0](first))
    with torch.no_grad():
        first.add_(1)
    with pytest.raises(RuntimeError, match="offloaded input has been modified by an inplace operation"):
        one_by_one(blocks[2:], y).backward(grad)


def test_a_change_in_place_after_the_copy_changes_nothing(delayed):
    blocks = chain(True)

    def run(blocks, x):
        first = x * 1
        y = one_by_one(blocks[:3], first)
        with torch.no_grad():
            first.add_(1)
        return one_by_one(blocks[3:], y)

    assert_equal(results(blocks, run), results(chain(False)))


def test_a_weight_changed_in_place_is_noticed():
    blocks, (x, grad) = chain(True), inputs()
    y = one_by_one(blocks, x)
    with torch.no_grad():
        blocks[0].up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


def test_inside_a_checkpoint():
    run = lambda blocks, x: checkpoint(lambda x: one_by_one(blocks, x), x, use_reentrant=False)  # noqa: E731
    assert_equal(results(chain(True), run), results(chain(False)))


@pytest.mark.filterwarnings("default")
def test_compiled_code_calls_the_blocks_as_they_are():
    compiled = torch.compile(one_by_one, backend="aot_eager")
    assert_equal(results(chain(True, 2), compiled), results(chain(False, 2)))


def test_threads_have_chains_of_their_own():
    # Without dropout, for threads share the generator that its states are drawn from.
    blocks, (x, grad) = chain(True).eval(), inputs()
    expected, found = torch.autograd.grad(one_by_one(chain(False).eval(), x), x, grad), {}

    def work(name):
        found[name] = [torch.autograd.grad(one_by_one(blocks, x), x, grad) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for gradients in (*found[0], *found[1]):
        assert_equal(gradients, expected)


def test_double_backward_raises_at_once():
    blocks, (x, _) = chain(True, 2), inputs()
    blocks.requires_grad_(False)
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        torch.autograd.grad(one_by_one(blocks, x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        torch.autograd.grad(checkpoint_sequential(chain(False, 2), x, segments=1).sum(), x, create_graph=True)


def test_small_inputs_stay(monkeypatch, delayed):
    monkeypatch.setattr(offload, "LEAST_BYTES", UNIT + 1)
    assert_equal(results(chain(True)), results(chain(False)))
    assert not delayed.log


def test_without_gradient_nothing_is_copied(delayed):
    blocks, (x, _) = chain(True), inputs()
    with torch.no_grad():
        one_by_one(blocks, x)
    assert not delayed.log


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match='offload must be False where save="all"'):
        Policy("all", offload=True)
    with pytest.raises(ValueError, match="offload must be"):
        Policy(offload="yes")


def test_the_operator_of_host_buffers():
    torch.library.opcheck(torch.ops.ckpt_ext.host_buffer.default, (torch.randn(3, 4).t(),), test_utils="test_schema")
    with FakeTensorMode():
        buffer = host.buffer_for(torch.empty(2, 3))
    assert buffer.shape == (2, 3)
    assert host.buffer_for(torch.empty(2, 3, device="meta")).is_meta
