"""`torch.compile` around blocks: one graph, the gradients of eager, with the same masks; and the operators that it meets."""

import pytest
import torch

from ckpt_ext import BlockSpec, Policy, TransformerBlock, rng
from ckpt_ext.testing import assert_compiled_as_eager

F64 = torch.float64
DROPOUT = {"attn_dropout": 0.2, "residual_dropout": 0.5, "mlp_dropout": 0.1}
SPEC = BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=48, rope_theta=1e4, **DROPOUT)
SMALL = BlockSpec(dim=16, heads=2, hidden_dim=24, activation="relu", residual_dropout=0.5)
# Warnings are the compiler's own, about what it traces.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("fresh_compiler")]


def blocks(count=1, spec=SMALL, dtype=F64, **arguments):
    torch.manual_seed(3)
    return torch.nn.Sequential(*(TransformerBlock(spec, dtype=dtype, **arguments) for _ in range(count)))


def stream(spec=SMALL, length=6, dtype=F64):
    return torch.randn(2, length, spec.dim, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("save, spec", [("input", SPEC), ("attention", SMALL), ("all", SMALL)])
def test_one_graph_with_the_gradients_and_masks_of_eager(save, spec):
    block = blocks(spec=spec, policy=Policy(save))
    assert_compiled_as_eager(torch.compile(block, backend="aot_eager", fullgraph=True), block, block, stream(spec))


@pytest.mark.parametrize("count, dtype, rtol", [(1, F64, 1e-12), (2, torch.float32, 2e-5)])
def test_inductor(count, dtype, rtol):
    pair = blocks(count, dtype=dtype)

    def function(x):
        return pair(x.sin()).cos()

    assert_compiled_as_eager(torch.compile(function, fullgraph=True), function, pair, stream(dtype=dtype), rtol)


def test_equal_calls_are_not_merged_and_are_drawn_in_their_order():
    def states():
        first = [rng.reserve("cpu") for _ in range(2)]
        return torch.stack([*first, rng.reserve("cpu", None)])

    torch.manual_seed(5)
    expected = states()
    torch.manual_seed(5)
    compiled = torch.compile(states, backend="inductor", fullgraph=True)()
    assert torch.equal(compiled, expected) and len(compiled[:, 0].unique()) == 3


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
