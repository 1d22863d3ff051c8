"""Blocks that are cut across two ranks by `parallelize_module`: gradients, collectives, masks, and what is refused."""

import itertools
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock, attention_mask, checkpoint_sequential, philox, rng
from ckpt_ext.rank_models import agree, cut, styles, whole
from ckpt_ext.ranks import Collectives, run_on_ranks
from ckpt_ext.rng import Site

WORLD, DIM, LENGTH = 2, 32, 7
PLAIN = dict(dim=DIM, heads=4, kv_heads=2, hidden_dim=44, rope_theta=1e4)
SPECS = {
    "llama": BlockSpec(**PLAIN),
    "biases": BlockSpec(
        dim=DIM, heads=4, hidden_dim=44, rope_theta=1e4, norm="layer", activation="gelu", qkv_bias=True, out_bias=True, mlp_bias=True
    ),
    "parallel": BlockSpec(**PLAIN, parallel=True, norm="layer"),
    "heads' norms and sinks": BlockSpec(**PLAIN, qk_norm="head", sinks=True, window=3, softcap=5.0),
    "post": BlockSpec(**PLAIN, norm="layer", norm_placement="post", out_bias=True, mlp_bias=True),
    "sandwich": BlockSpec(**PLAIN, norm_placement="sandwich", norm_offset=1.0),
}
ALL_REDUCES = {"post": 6, "sandwich": 6, "heads' norms and sinks": 7}
"""In a step with save="input", where they are not 4: norms behind branches want the branches again, norms and sinks of heads have gradients
from all ranks."""


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(spec, mesh, policy=None):
    """The eager block, whole, and ours of the same parameters, cut; those that would be ones or zeros drawn, too."""
    torch.manual_seed(0)
    eager = EagerBlock(spec, dtype=torch.float64)
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    ours = TransformerBlock(spec, policy=policy, dtype=torch.float64)
    ours.load_state_dict(eager.state_dict())
    return eager, cut(ours, mesh)


def run(block, *, length=LENGTH, **arguments):
    """Output, gradient of the input and of each parameter, all of them whole, from one seed of the masks; and the collectives of it."""
    x = draw(2, length, DIM, seed=1).requires_grad_()
    block.zero_grad()
    torch.manual_seed(5)
    with Collectives() as collectives:
        y = block(x, **arguments)
        y.backward(draw(*y.shape, seed=2))
    return {"y": y.detach(), "x": x.grad} | {name: whole(p.grad) for name, p in block.named_parameters()}, collectives.counts


def same_bits(actual, expected):
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


def blocks_of_every_kind(rank):
    mesh = init_device_mesh("cpu", (WORLD,))
    for name, spec in SPECS.items():
        results = {}
        for save in ("all", "attention", "input"):
            eager, ours = pair(spec, mesh, Policy(save))
            results[save], counts = run(ours)
            agree(results[save], run(eager)[0])
            expected = 4 + (3 if "sinks" in name else 0) if save == "all" else ALL_REDUCES.get(name, 4)
            assert counts == {"allreduce_": expected}, (name, save, counts)
        same_bits(results["input"], results["all"])
        same_bits(results["attention"], results["all"])


def masks_and_slices(rank):
    """Documents, dense masks with heads, and the MLP by hidden units; the rows of the stream go between ranks no more often for it."""
    mesh, ids = init_device_mesh("cpu", (WORLD,)), torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
    by_head = (draw(2, 4, LENGTH, LENGTH, seed=3) > 0) | torch.eye(LENGTH, dtype=torch.bool)
    for mask, slices in itertools.product((attention_mask(segment_ids=ids), attention_mask(mask=by_head)), (1, 3)):
        eager, ours = pair(SPECS["llama"], mesh, Policy(slices=slices))
        actual, counts = run(ours, mask=mask)
        agree(actual, run(eager, mask=mask)[0])
        assert counts == {"allreduce_": 4}


def dropout_is_that_of_the_whole_block(rank):
    """Masks of the stream are equal on all ranks, those of attention are the whole block's, head by head."""
    mesh = init_device_mesh("cpu", (WORLD,))
    spec = BlockSpec(**PLAIN, attn_dropout=0.3, residual_dropout=0.2)
    results = []
    for save in ("all", "attention", "input"):
        eager, ours = pair(spec, mesh, Policy(save))
        results.append(run(ours)[0])
        agree(results[-1], run(eager)[0])
    same_bits(results[0], results[1])
    same_bits(results[0], results[2])
    same_bits(results[2], run(ours)[0])


def ranks_drop_hidden_units_of_their_own(rank):
    """One token: its dropped hidden units have no gradient in their columns of the down projection."""
    mesh = init_device_mesh("cpu", (WORLD,))
    spec, share = BlockSpec(**{**PLAIN, "hidden_dim": 128}, mlp_dropout=0.5), 64
    results = []
    for save in ("all", "input"):
        _, ours = pair(spec, mesh, Policy(save))
        x = draw(1, 1, DIM).requires_grad_()
        torch.manual_seed(7)
        ours(x).sum().backward()
        results.append({name: parameter.grad.to_local() for name, parameter in ours.named_parameters() if "down" in name})
        kept = (whole(ours.down_proj.weight.grad) != 0).any(0)
        torch.manual_seed(7)
        state = rng.reserve("cpu")
        for other in range(WORLD):
            row = torch.tensor([other << 32])
            assert torch.equal(kept[other * share :][:share], philox.keep_mask(state, 0.5, Site.MLP, row, share)[0])
        assert not torch.equal(kept[:share], kept[share:])
    same_bits(*results)


def other_seeds_are_refused(rank):
    mesh = init_device_mesh("cpu", (WORLD,))
    _, ours = pair(BlockSpec(**PLAIN, residual_dropout=0.1), mesh)
    torch.manual_seed(rank)
    with pytest.raises(RuntimeError, match="one RNG state on all of them"):
        ours(draw(1, 3, DIM))


def what_is_saved(rank):
    """x and the attention half's branch, which has been added up; with attention kept, a rank's share of that."""
    mesh, (x_bytes, share_bytes) = init_device_mesh("cpu", (WORLD,)), (2 * LENGTH * DIM * 8, 2 * LENGTH * 2 * (8 * 8 + 8))
    for save, expected in (("input", 2 * x_bytes), ("attention", 2 * x_bytes + share_bytes)):
        _, ours = pair(SPECS["llama"], mesh, Policy(save))
        parameters, found = {whole.data_ptr() for whole in locals_of(ours)}, {}

        def note(tensor, parameters=parameters, found=found):
            if tensor.untyped_storage().data_ptr() not in parameters:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = draw(2, LENGTH, DIM).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            ours(x)
        table = 2 * LENGTH * 4 * 8  # cosines and sines, which all blocks share
        assert sum(found.values()) == expected + table, (save, found)


def locals_of(block):
    return [(p.to_local() if isinstance(p, DTensor) else p).untyped_storage() for p in block.parameters()]


def parts_that_need_no_gradient(rank):
    """Frozen weights, an input without gradient: nothing is added up for them."""
    mesh = init_device_mesh("cpu", (WORLD,))
    eager, ours = pair(SPECS["llama"], mesh)
    for block in (eager, ours):
        block.requires_grad_(False)
        block.down_proj.weight.requires_grad_()
    x = draw(2, LENGTH, DIM)
    with Collectives() as collectives:
        ours(x).backward(draw(2, LENGTH, DIM, seed=2))
    eager(x).backward(draw(2, LENGTH, DIM, seed=2))
    agree({"down": whole(ours.down_proj.weight.grad)}, {"down": eager.down_proj.weight.grad})
    assert collectives.counts == {"allreduce_": 2}
    with torch.no_grad(), Collectives() as collectives:
        agree({"y": ours(x)}, {"y": eager(x)})
    assert collectives.counts == {"allreduce_": 2}


def triton_draws_the_same_masks(rank):
    """A rank's share of a mask lies beyond 2 ** 32 rows."""
    mesh = init_device_mesh("cpu", (WORLD,))
    spec = BlockSpec(dim=16, heads=2, hidden_dim=32, attn_dropout=0.2, residual_dropout=0.2, mlp_dropout=0.3)
    results = []
    for backend in ("aten", "triton"):
        torch.manual_seed(0)
        block = cut(TransformerBlock(spec, backend=backend, dtype=torch.float64), mesh)
        x = draw(1, 5, 16).requires_grad_()
        torch.manual_seed(1)
        block(x).square().sum().backward()
        results.append({"x": x.grad} | {name: whole(p.grad) for name, p in block.named_parameters()})
    agree(*results)


def compiled(rank):
    """The compiler leaves a graph where a block that is cut across ranks begins."""
    _, ours = pair(BlockSpec(**PLAIN, residual_dropout=0.2), init_device_mesh("cpu", (WORLD,)))
    results = []
    for block in (ours, torch.compile(ours, backend="aot_eager")):
        ours.zero_grad()
        torch.manual_seed(3)
        x = draw(2, LENGTH, DIM).requires_grad_()
        block(x).square().sum().backward()
        results.append({"x": x.grad} | {name: whole(p.grad) for name, p in ours.named_parameters()})
    agree(*results)
    torch._dynamo.reset()


def segments_and_offload(rank):
    mesh = init_device_mesh("cpu", (WORLD,))
    for policy in (Policy(), Policy(offload=True)):
        pairs = [pair(BlockSpec(**PLAIN, residual_dropout=0.1), mesh, policy) for _ in range(3)]
        results = []
        blocks = [ours for _, ours in pairs]
        for run_blocks in (partial(checkpoint_sequential, segments=1), lambda blocks, x: torch.nn.Sequential(*blocks)(x)):
            x = draw(2, LENGTH, DIM).requires_grad_()
            torch.manual_seed(3)
            for block in blocks:
                block.zero_grad()
            run_blocks(blocks, x).square().sum().backward()
            results.append({"x": x.grad} | {f"{i}.{n}": whole(p.grad) for i, b in enumerate(blocks) for n, p in b.named_parameters()})
        same_bits(*results)


def refusals(rank):
    mesh = init_device_mesh("cpu", (WORLD,))
    cases = (
        ({"q_proj": ColwiseParallel()}, "k must be cut along 'out' across the ranks of the other projections, got one that is whole"),
        (styles(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "out_proj"), ("down_proj",)), "out must be cut along 'in'"),
        ({"up_proj": ColwiseParallel(output_layouts=Replicate())}, "up_proj must have the hooks of ColwiseParallel"),
        ({"down_proj": RowwiseParallel(output_layouts=Shard(1))}, "down_proj must have the hooks of"),
        ({"q_proj": ColwiseParallel(input_layouts=Shard(1))}, "q_proj must have the hooks of"),
        ({"mlp_norm": SequenceParallel()}, "mlp_norm must have no hooks"),
    )
    for plan, message in cases:
        block = TransformerBlock(SPECS["llama"], dtype=torch.float64)
        parallelize_module(block, mesh, plan)
        with pytest.raises(NotImplementedError, match=message):
            block(draw(1, 3, DIM))
    for change, message in (
        (dict(kv_heads=1), "kv_heads must be a multiple of the 2 ranks"),
        (dict(qk_norm="row"), "qk_norm must be None or 'head'"),
    ):
        spec = BlockSpec(**(PLAIN | change))
        block = cut(TransformerBlock(spec, dtype=torch.float64), mesh)
        with pytest.raises(NotImplementedError, match=message):
            block(draw(1, 3, DIM))
    eager = cut(EagerBlock(SPECS["llama"], dtype=torch.float64), mesh)
    with pytest.raises(NotImplementedError, match="whole"):
        eager(draw(1, 3, DIM))
    block = cut(TransformerBlock(SPECS["llama"], dtype=torch.float64), mesh)
    for placement in (Replicate(), Shard(1)):
        with pytest.raises(NotImplementedError, match="x must be a plain tensor, got a DTensor"):
            block(DTensor.from_local(draw(1, 3, DIM), mesh, [placement]))
    block.up_proj.register_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(NotImplementedError, match="up_proj must have the hooks of"):
        block(draw(1, 3, DIM))


CASES = [
    blocks_of_every_kind, masks_and_slices, dropout_is_that_of_the_whole_block, ranks_drop_hidden_units_of_their_own,
    other_seeds_are_refused, what_is_saved, parts_that_need_no_gradient, triton_draws_the_same_masks, compiled,
    segments_and_offload, refusals,
]  # fmt: skip


@pytest.fixture(scope="module")
def failures():
    return run_on_ranks(CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_tensor_parallel(case, failures):
    assert not failures[case], failures[case]
