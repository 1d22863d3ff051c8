"""Sharded models saved to disk and loaded by others, FSDP1, and weights that are elsewhere between calls, on two processes."""

import itertools
import re
import shutil
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_ext
from ckpt_ext.rank_models import FAMILIES, LAYERS, WORLD, batch, layers_of, loss, make, per_block, sharded, truth
from ckpt_ext.ranks import Collectives, run_on_ranks
from ckpt_ext.truth import Float64Throughout

pytest.importorskip("transformers")



def shared_folder(rank):
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    return folders[0]


def advance(model, optimizer, rank):
    optimizer.zero_grad()
    with Float64Throughout():
        loss(model, batch(rank)).backward()
    optimizer.step()


def whole(model):
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def saved_and_loaded(rank):
    """A checkpoint on disk, with the optimizer's state, of a model that runs as blocks goes on as one that does not, and back."""
    folder = shared_folder(rank)
    try:
        for family in FAMILIES:
            for ours in (True, False):
                trained, other = (sharded(family, per_block, ours=each) for each in (ours, not ours))
                optimizer, its = (torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (trained, other))
                assert list(trained.state_dict()) == list(other.state_dict())
                advance(trained, optimizer, rank)
                place = f"{folder}/{family}{ours}"
                save(dict(zip(("model", "optimizer"), get_state_dict(trained, optimizer), strict=True)), checkpoint_id=place)
                model_state, optimizer_state = get_state_dict(other, its)
                load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=place)
                set_state_dict(other, its, model_state_dict=model_state, optim_state_dict=optimizer_state)
                before = whole(trained)
                for name, parameter in whole(other).items():
                    assert torch.equal(parameter, before[name]), name
                # Without the states, AdamW's second step would be as long as its first.
                for model, its_optimizer in ((trained, optimizer), (other, its)):
                    advance(model, its_optimizer, rank)
                after = whole(trained)
                for name, parameter in whole(other).items():
                    assert not torch.equal(after[name], before[name]), name
                    assert (parameter - after[name]).abs().max() <= 1e-9, name
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)


def fsdp1(model, **arguments):
    policy = ModuleWrapPolicy({type(layers_of(model)[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **arguments)


def fsdp1_step(model, rank):
    """Collectives of a step, and the whole gradients by the parameters' own names."""
    model.zero_grad()
    with Collectives() as collectives, Float64Throughout():
        loss(model, batch(rank)).backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        grads = {name.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for name, p in model.named_parameters()}
    return collectives.counts, grads


def flat_parameters(rank):
    """FSDP1, whose layers have views of one flat parameter in a call, and pieces between calls: to be swapped before."""
    for family in FAMILIES:
        expected = truth(family)
        plain = fsdp1(make(family, ours=False), use_orig_params=True)
        for swap_first in (True, False):
            model = fsdp1(make(family, ours=True, swap=swap_first), use_orig_params=True)
            if not swap_first and family != "native":
                report = ckpt_ext.swap(model)
                assert len(report.refused) == LAYERS and all("swap before sharding" in reason for reason in report.refused.values())
            for _ in range(2):
                base, _ = fsdp1_step(plain, rank)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    found, grads = fsdp1_step(model, rank)
                assert found == base, (found, base)
                assert grads.keys() == expected.keys()
                for name, grad in grads.items():
                    assert (grad - expected[name]).abs().max() <= 1e-9 * expected[name].abs().max(), name


def views_of_flat_parameters(rank):
    """FSDP1 with nothing but flat parameters: weights are views of them, and no parameters themselves. Either may come first."""
    for family, swap_first in itertools.product(FAMILIES, (True, False)):
        plain = fsdp1(make(family, ours=False), use_orig_params=False)
        ours = fsdp1(make(family, ours=True, swap=swap_first), use_orig_params=False)
        if not swap_first:
            assert len(ckpt_ext.swap(ours).swapped) == LAYERS
        for _ in range(2):
            counts = []
            for model in (plain, ours):
                model.zero_grad()
                with Collectives() as collectives, Float64Throughout():
                    loss(model, batch(rank)).backward()
                counts.append(collectives.counts)
            assert counts[0] == counts[1]
            for expected, parameter in zip(plain.parameters(), ours.parameters(), strict=True):
                assert (parameter.grad - expected.grad).abs().max() <= 1e-9 * expected.grad.abs().max()


def segments_of_flat_parameters(rank):
    """FSDP1 hands layers' outputs on as they are, so that a segment spans groups, and is rebuilt when their parameters are gone."""
    for flat_alone in (True, False):
        model = make("llama", ours=True)
        ckpt_ext.swap(model, segments=1)
        model = fsdp1(model, use_orig_params=not flat_alone)
        with Float64Throughout():
            value = loss(model, batch(rank))
            with pytest.raises(RuntimeError, match="parameters of all blocks of a segment must be there .* got freed ones"):
                value.backward()


def mixed_with_distributed(rank):
    """A weight that was made a DTensor by itself, among plain ones: refused by the module's name."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model, blocks = make("llama", ours=False), make("native", ours=True)
    for projection in (layers_of(model)[1].mlp.up_proj, blocks.blocks[1].up_proj):
        projection.weight = torch.nn.Parameter(distribute_tensor(projection.weight.detach(), mesh, [Shard(0)]))
    report = ckpt_ext.swap(model)
    assert report.refused == {"model.layers.1": "mlp.up_proj.weight must be a plain tensor, got DTensor"}
    with pytest.raises(NotImplementedError, match="up_proj.weight must be a plain tensor, got DTensor"):
        loss(blocks, batch(rank))


CASES = [saved_and_loaded, flat_parameters, views_of_flat_parameters, segments_of_flat_parameters, mixed_with_distributed]


@pytest.fixture(scope="module")
def failures():
    return run_on_ranks(CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_saved_and_sharded(case, failures):
    assert not failures[case], failures[case]


def test_weights_that_are_elsewhere_are_named():
    """As DeepSpeed's ZeRO-3 leaves them between the calls of their own modules: of shape [0]."""
    reason = r"mlp.up_proj.weight must have shape [48, 32], got [0]"
    model, late, blocks = make("llama", ours=False), make("llama", ours=True), make("native", ours=True)
    for projection in (layers_of(model)[1].mlp.up_proj, layers_of(late)[1].mlp.up_proj, blocks.blocks[1].up_proj):
        projection.weight.data = torch.empty(0, dtype=torch.float64)
    assert ckpt_ext.swap(model).refused == {"model.layers.1": reason}
    with pytest.warns(UserWarning, match=f"model.layers.1 .*{re.escape(reason)}"), pytest.raises(RuntimeError, match="shape|size"):
        loss(late, batch(0))
    with pytest.raises(ValueError, match=r"up_proj.weight must have shape \[44, 32\], got \[0\]"):
        loss(blocks, batch(0))
