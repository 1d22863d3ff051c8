"""Python threads that train at the same time: each gets what it gets alone, for nothing is shared but parameters that nobody changes."""

import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ckpt_ext
from ckpt_ext import BlockSpec, Policy, TransformerBlock, budget, cross_entropy, functional, offload, verify_models
from ckpt_ext.integrations import chain as links
from ckpt_ext.segments import Segment
from ckpt_ext.slicing import spans

SPEC = BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=48, rope_theta=1e4)
DROPS = BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=48, rope_theta=1e4, residual_dropout=0.5, mlp_dropout=0.1, attn_dropout=0.2)
ROUNDS = 12


@pytest.fixture(autouse=True)
def switch_often():
    """So that threads meet in the midst of things."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*functions):
    """What the functions return, each run in a thread of its own, all let go at once."""
    start, workers = threading.Barrier(len(functions)), torch.get_num_threads()

    def run(function):
        torch.set_num_threads(workers)  # each Python thread has a number of its own, on which the order of sums depends
        start.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(run, function) for function in functions]]


def chain(seed, spec=SPEC, **policy):
    torch.manual_seed(seed)
    return torch.nn.ModuleList(TransformerBlock(spec, policy=Policy(**policy)) for _ in range(4))


def one_by_one(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def in_segments(blocks, x):
    return ckpt_ext.checkpoint_sequential(blocks, x, segments=2)


def checkpointed(blocks, x):
    return ckpt_ext.checkpoint(lambda x: one_by_one(blocks, x).tanh(), x)


def trained(run, blocks, seed, rounds=ROUNDS):
    """Results and gradients of some steps on inputs that get longer."""
    found = []
    for step in range(rounds):
        x = torch.randn(2, 4 + step, 32, generator=torch.Generator().manual_seed(seed + step)).requires_grad_()
        y = run(blocks, x)
        found += [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *blocks.parameters()])]
    return found


def same(actual, expected):
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("run", [one_by_one, in_segments, checkpointed])
@pytest.mark.parametrize("offloaded", [False, True])
def test_two_models_in_two_threads_train_as_each_alone(run, offloaded, monkeypatch):
    monkeypatch.setattr(offload, "LEAST_BYTES", 0)
    models = [chain(seed, offload=offloaded) for seed in (0, 1)]
    alone = [trained(run, blocks, seed) for seed, blocks in enumerate(models)]
    both = together(*(lambda seed=seed, blocks=blocks: trained(run, blocks, seed) for seed, blocks in enumerate(models)))
    assert all(map(same, both, alone))


def test_two_swapped_models_in_segments():
    pytest.importorskip("transformers", reason="the models are its")
    models = []
    for seed in (0, 1):
        model, batch = verify_models.load("tiny-llama", batch=2, length=12, layers=4, dtype=torch.float32, seed=seed)
        model.config.use_cache = False
        assert len(ckpt_ext.swap(model, segments=2).swapped) == 4
        models.append((model, batch))

    def step(model, batch):
        found = []
        for _ in range(3):
            found += torch.autograd.grad(model(**batch).loss, list(model.parameters()))
        return found

    alone = [step(*pair) for pair in models]
    assert all(map(same, together(*(lambda pair=pair: step(*pair) for pair in models)), alone))


@pytest.mark.parametrize("run", [one_by_one, in_segments])
def test_each_thread_replays_its_own_masks(run):
    """The default generator is everybody's, so which masks a thread gets is chance; its backward pass must find them all the same."""
    models = [chain(seed, DROPS) for seed in (0, 1)]

    def replays(blocks, seed):
        for step in range(ROUNDS):
            x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(seed + step)).requires_grad_()
            loss = run(blocks, x).square().sum()
            twice = [torch.autograd.grad(loss, [x, *blocks.parameters()], retain_graph=True) for _ in range(2)]
            if not same(*twice):
                return False
        return True

    assert all(together(*(lambda seed=seed, blocks=blocks: replays(blocks, seed) for seed, blocks in enumerate(models))))


@pytest.mark.parametrize("run", [one_by_one, in_segments, checkpointed])
def test_backward_in_another_thread(run):
    blocks = chain(0, DROPS)
    x = torch.randn(2, 5, 32, requires_grad=True)
    wanted = [x, *blocks.parameters()]
    torch.manual_seed(5)
    expected = torch.autograd.grad(run(blocks, x).square().sum(), wanted)
    torch.manual_seed(5)
    loss = run(blocks, x).square().sum()
    (actual,) = together(lambda: torch.autograd.grad(loss, wanted))
    assert same(actual, expected)


def test_replays_that_set_a_generator_wait_for_each_other():
    models = [chain(seed, DROPS) for seed in (0, 1)]

    def losses():
        torch.manual_seed(7)
        x = torch.randn(2, 16, 32)
        return [[checkpointed(blocks, x).square().sum() for _ in range(6)] for blocks in models]

    def back(blocks, losses):
        return [gradient for loss in losses for gradient in torch.autograd.grad(loss, list(blocks.parameters()))]

    expected = [back(*pair) for pair in zip(models, losses(), strict=True)]
    both = together(*(lambda pair=pair: back(*pair) for pair in zip(models, losses(), strict=True)))
    assert all(map(same, both, expected))


def test_an_input_is_fetched_for_its_own_thread():
    x = torch.randn(2, 1 << 18)
    parked = offload.park(x)
    (other,) = together(lambda: offload._latest(x.device))
    assert other is None and offload._latest(x.device) is parked


def test_a_layer_goes_on_with_the_segment_of_its_own_thread():
    y = torch.randn(2, 5, 32, requires_grad=True)
    links._RUNNING.under = links._Under(Segment(), 0, 0, 1, weakref.ref(y), y._version)
    (other,) = together(lambda: links.place_of(links.Link(1, 2, 1), y, SPEC, trained=True)[0])
    assert other is None
    place = links.place_of(links.Link(1, 2, 1), y, SPEC, trained=True)[0]
    assert place is not None and place.position == 1


def test_one_parameter_in_two_graphs_that_go_back_at_once():
    blocks = chain(0)
    x = torch.randn(2, 5, 32)
    one_by_one(blocks, x).square().sum().backward()
    expected = [2 * parameter.grad for parameter in blocks.parameters()]
    blocks.zero_grad()
    losses = [one_by_one(blocks, x).square().sum() for _ in range(2)]
    together(*(loss.backward for loss in losses))
    assert same([parameter.grad for parameter in blocks.parameters()], expected)


def test_what_a_head_takes_is_found_beside_a_loss_that_is_trained(monkeypatch):
    monkeypatch.setitem(cross_entropy._TILE_BYTES, "other", 2 << 20)
    monkeypatch.setitem(cross_entropy._TILE_BYTES, "cpu", 1 << 14)
    monkeypatch.setattr(cross_entropy, "_LEAST_SIDE", 16)
    x, weight = torch.randn(200, 32, requires_grad=True), torch.randn(200, 32, requires_grad=True)
    target = torch.randint(200, (200,))

    def loss():
        return [torch.autograd.grad(functional.linear_cross_entropy(x, weight, target), [x, weight]) for _ in range(10)]

    def head():
        budget.head_bytes.cache_clear()
        return [budget.head_bytes(SPEC, 3000, None, 1, 64 + n, "tiled", torch.float32, True) for n in range(5)]

    assert len(list(spans(200, 16))) > 3  # a walk that leaves tiles out would be seen
    expected = loss()[0], head()
    losses, heads = together(loss, head)
    budget.head_bytes.cache_clear()
    assert heads == expected[1]
    assert all(same(found, expected[0]) for found in losses)
