"""Models of transformers that are cut across ranks by `parallelize_module`, swapped and sharded: gradients and collectives."""

import itertools
import warnings
from functools import partial

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

import ckpt_ext
from ckpt_ext.rank_models import LAYERS, WORLD, agree, batch, cut, layers_of, loss, make, per_block, styles, whole
from ckpt_ext.ranks import Collectives, run_on_ranks
from ckpt_ext.truth import Float64Throughout

transformers = pytest.importorskip("transformers")


def cut_layers(model, mesh):
    """By the plan with the fewest collectives: q, k and v, and gate and up, get one DTensor for input, whose gradient is added up once."""
    whole = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Replicate()}, desired_input_kwarg_layouts={"hidden_states": Replicate()},
        use_local_output=False,
    )  # fmt: skip
    gathered = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False)
    return cut_each_linear(model, mesh, {"self_attn": whole, "mlp": gathered})


def cut_each_linear(model, mesh, inputs=None):
    columns = [*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
    for layer in model.model.layers:
        parallelize_module(layer, mesh, styles(columns, ("self_attn.o_proj", "mlp.down_proj")) | (inputs or {}))
    return model


def cut_blocks(model, mesh):
    for block in layers_of(model):
        cut(block, mesh)
    return model


def step(model, symbols):
    """The gradients, all of them whole, and the collectives of a step."""
    model.zero_grad()
    with Collectives() as collectives, Float64Throughout():
        loss(model, symbols).backward()
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}, collectives.counts


def swapped_llama(rank):
    """Swapped before or after it is cut: gradients of the whole model in one process, and no more collectives than without swapping."""
    mesh = init_device_mesh("cpu", (WORLD,))
    expected, _ = step(make("llama", ours=True, swap=False), batch(0))
    for cut_model, swap_first in itertools.product((cut_layers, cut_each_linear), (True, False)):
        plain, base = step(cut_model(make("llama", ours=True, swap=False), mesh), batch(0))
        agree(plain, expected)
        model = make("llama", ours=True, swap=False)
        for action in (ckpt_ext.swap, partial(cut_model, mesh=mesh))[:: 1 if swap_first else -1]:
            found = action(model)
        if not swap_first:
            assert len(found.swapped) == LAYERS, found
        assert model.model.layers[0].__class__ is not plain_class(), "swapped"
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is refused in a call warns
            actual, counts = step(model, batch(0))
        agree(actual, expected)
        assert counts == {"allreduce_": LAYERS * 4}
        assert base == ({"all_reduce": LAYERS * 4} if cut_model is cut_layers else {"all_reduce": LAYERS * 7}), base


def plain_class():
    return transformers.models.llama.modeling_llama.LlamaDecoderLayer


def sharded_and_cut(rank):
    """FSDP2 over one axis of a mesh and tensor parallel over the other, two ranks along either."""
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        parts = [batch(index) for index in range(shape[0])]
        mine = parts[mesh["data"].get_local_rank()]
        for family, cut_model in (("llama", cut_layers), ("native", cut_blocks)):
            expected: dict = {}
            for part in parts:
                for name, grad in step(make(family, ours=False), part)[0].items():
                    expected[name] = expected.get(name, 0) + grad / len(parts)
            model = cut_model(make(family, ours=True, swap=False), mesh["tensor"])
            assert len(ckpt_ext.swap(model).swapped) == LAYERS
            counts = sharded_steps(model, mesh["data"], mine, expected)
            assert counts["allreduce_"] == (LAYERS * 4 if shape[1] > 1 else 0)
            if family == "llama":
                base = sharded_steps(cut_layers(make(family, ours=False), mesh["tensor"]), mesh["data"], mine, expected)
                kinds = ("_allgather_base_", "_reduce_scatter_base_")
                assert [counts[kind] for kind in kinds] == [base[kind] for kind in kinds] and (base[kinds[0]] > 0) == (shape[0] > 1)
                assert counts["allreduce_"] == base["all_reduce"]


def sharded_steps(model, mesh, symbols, expected):
    """Two steps of the model, a group a layer: FSDP2 learns the order in the first. The collectives of the second."""
    per_block(model, mesh=mesh)
    for _ in range(2):
        grads, counts = step(model, symbols)
        agree(grads, expected)
    return counts


def refused_layers_are_right(rank):
    """Layers of Llama that are cut in another way are named, and checkpointed."""
    mesh = init_device_mesh("cpu", (WORLD,))
    expected, _ = step(make("llama", ours=True, swap=False), batch(0))
    model = make("llama", ours=True, swap=False)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, styles(("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)))
    report = ckpt_ext.swap(model)
    assert len(report.refused) == LAYERS and all("cut along" in reason for reason in report.refused.values()), report
    agree(step(model, batch(0))[0], expected)


CASES = [swapped_llama, sharded_and_cut, refused_layers_are_right]


@pytest.fixture(scope="module")
def failures():
    return run_on_ranks(CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_tensor_parallel_models(case, failures):
    assert not failures[case], failures[case]
