"""`torch.compile` around blocks, and checkpoints around and within: the gradients of eager, with the same masks, and few compilations."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckpt_ext
from ckpt_ext import BlockSpec, Policy, TransformerBlock, checkpoint_sequential, functional, rng

F64 = torch.float64
DROPOUT = {"attn_dropout": 0.2, "residual_dropout": 0.5, "mlp_dropout": 0.1}
SPEC = BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=48, rope_theta=1e4, **DROPOUT)
SMALL = BlockSpec(dim=16, heads=2, hidden_dim=24, activation="relu", residual_dropout=0.5)
# Of the compiler's own, about what it traces.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def blocks(count=1, spec=SMALL, dtype=F64, **arguments):
    torch.manual_seed(3)
    return torch.nn.Sequential(*(TransformerBlock(spec, dtype=dtype, **arguments) for _ in range(count)))


def stream(spec=SMALL, length=6, dtype=F64):
    return torch.randn(2, length, spec.dim, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


def steps(function, module, x, count=2):
    """Outputs and gradients of steps from one seed, and what the generator draws next."""
    torch.manual_seed(0)
    results = []
    for _ in range(count):
        y = function(x)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])])
    return results, torch.randint(2**62, ())


def assert_as_eager(compiled, eager, module, x, rtol=1e-12):
    """Values within rounding, which a compiler may do in another order, with masks and random numbers afterwards that are the same."""
    (found, after), (expected, after_eager) = steps(compiled, module, x), steps(eager, module, x)
    assert torch.equal(after, after_eager)
    assert not torch.allclose(expected[0][0], expected[1][0])  # two steps have masks of their own
    for one, other in zip(found, expected, strict=True):
        for actual, wanted in zip(one, other, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=rtol, atol=rtol * wanted.abs().max().item())


@pytest.mark.parametrize("save, spec", [("input", SPEC), ("attention", SMALL), ("all", SMALL)])
def test_one_graph_with_the_gradients_and_masks_of_eager(save, spec):
    block = blocks(spec=spec, policy=Policy(save))
    assert_as_eager(torch.compile(block, backend="aot_eager", fullgraph=True), block, block, stream(spec))


def test_lengths_of_one_slice_share_a_graph():
    block, counted = blocks(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counted, fullgraph=True)
    for length in (6, 9, 13):
        assert_as_eager(compiled, block, block, stream(length=length))
    assert counted.frame_count <= 2  # for the first length, then for all


@pytest.mark.parametrize("count, dtype, rtol", [(1, F64, 1e-12), (2, torch.float32, 2e-5)])
def test_inductor(count, dtype, rtol):
    pair = blocks(count, dtype=dtype)

    def function(x):
        return pair(x.sin()).cos()

    assert_as_eager(torch.compile(function, fullgraph=True), function, pair, stream(dtype=dtype), rtol)


def test_a_memory_budget_draws_no_mask_again():
    pair = blocks(2)

    def function(x):
        return pair(x.tanh().sin()).cos()

    with torch._functorch.config.patch(activation_memory_budget=0.05):
        assert_as_eager(torch.compile(function, backend="aot_eager", fullgraph=True), function, pair, stream())


def test_a_memory_budget_of_nothing_is_refused():
    block = blocks()
    with (
        torch._functorch.config.patch(activation_memory_budget=0),
        pytest.raises(Exception, match="activation_memory_budget must be above 0 around dropout, got 0"),
    ):
        torch.compile(block, backend="aot_eager", fullgraph=True)(stream())


def test_equal_calls_are_not_merged_and_are_drawn_in_their_order():
    def states():
        first = [rng.reserve("cpu") for _ in range(2)]
        return torch.stack([*first, rng.reserve("cpu", None)])

    torch.manual_seed(5)
    expected = states()
    torch.manual_seed(5)
    compiled = torch.compile(states, backend="inductor", fullgraph=True)()
    assert torch.equal(compiled, expected) and len(compiled[:, 0].unique()) == 3


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
    assert_as_eager(compiled, plain, both, x)


def test_checkpoints_around_compiled_blocks():
    pair = blocks(2)
    expected = functools.partial(steps, pair, pair, stream())()
    for block in pair:
        block.compile(backend="aot_eager")  # the module stays what it is
    ways = {
        "torch's": lambda x: torch_checkpoint(pair[1], torch_checkpoint(pair[0], x, use_reentrant=False), use_reentrant=False),
        "ours": lambda x: ckpt_ext.checkpoint(pair[1], ckpt_ext.checkpoint(pair[0], x)),
        "a segment": lambda x: checkpoint_sequential(pair, x, segments=1),
    }
    for name, way in ways.items():
        found = steps(way, pair, stream())
        assert torch.equal(found[1], expected[1]), name
        for one, other in zip(found[0], expected[0], strict=True):
            for actual, wanted in zip(one, other, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12 * wanted.abs().max().item(), msg=name)


def test_a_compiled_wrapper_is_no_block_of_a_chain():
    pair = blocks(2)
    with pytest.raises(NotImplementedError, match=r"blocks\[0\] must be exactly TransformerBlock, got OptimizedModule"):
        checkpoint_sequential([torch.compile(block, backend="aot_eager") for block in pair], stream())


OPERATORS = {
    "dropout": (torch.ones(4, 8, requires_grad=True), torch.tensor([3, 4]), 0.5, 1),
    "reserve": (None, torch.device("cpu")),
    "reserve_once": (None, torch.device("cpu")),
    "host_buffer": (torch.ones(3, 4),),
}


def test_every_operator_is_checked():
    registered = {name.removeprefix("ckpt_ext::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("ckpt_ext::")}
    assert registered == OPERATORS.keys()


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name):
    # A second run is not compared to the first where that is another reservation, or memory that nothing was written to.
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"] + ["test_aot_dispatch_dynamic"] * (name == "dropout")
    if name == "host_buffer":
        tests.remove("test_autograd_registration")
    torch.library.opcheck(getattr(torch.ops.ckpt_ext, name).default, OPERATORS[name], test_utils=tests)
