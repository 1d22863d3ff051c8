"""Blocks and swapped models under FSDP2, on two processes: gradients, collectives, and what is sharded or freed when."""

import copy
import itertools

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import ckpt_ext
from ckpt_ext.rank_models import (
    FAMILIES,
    LENGTH,
    WORLD,
    batch,
    check,
    layers_of,
    loss,
    make,
    nested,
    per_block,
    per_model,
    sharded,
    step,
    truth,
    whole_gradients,
)  # fmt: skip
from ckpt_ext.ranks import Collectives, run_on_ranks
from ckpt_ext.testing import assert_accurate
from ckpt_ext.truth import Float64Throughout

pytest.importorskip("transformers")


def matrix(rank, wrap):
    """Each family, resharded after forward or not, two steps each: FSDP2 learns the order in the first."""
    for family, reshard in itertools.product(FAMILIES, (True, False)):
        expected = truth(family)
        plain = sharded(family, wrap, ours=False, reshard_after_forward=reshard)
        ours = sharded(family, wrap, ours=True, reshard_after_forward=reshard)
        for _ in range(2):
            base, found = step(plain, rank), step(ours, rank)
            check(plain, expected)
            check(ours, expected)
            assert sum(base.collectives.values()) >= 2 and found == base, (family, reshard, base, found)
            if wrap is per_block:
                assert all(size == 0 for size in found.after)
                assert all((size == 0) == reshard for size in found.between)


def shard_per_block(rank):
    matrix(rank, per_block)


def shard_per_model(rank):
    matrix(rank, per_model)


def shard_nested(rank):
    matrix(rank, nested)


def mixed_precision(rank):
    """Parameters gathered in bfloat16: our errors are at most twice those of plain PyTorch sharded alike."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for family in FAMILIES:
        models = [make(family, ours=ours).float() for ours in (True, False)]
        exact = copy.deepcopy(models[1]).double()
        with Float64Throughout():
            sum(loss(exact, batch(rank)) / WORLD for rank in range(WORLD)).backward()
        counts = []
        for model in models:
            per_block(model, mp_policy=policy)
            with Collectives() as collectives:
                loss(model, batch(rank)).backward()
            counts.append(collectives.counts)
        ours, plain = models
        assert counts[0] == counts[1]
        actual, eager = whole_gradients(ours), whole_gradients(plain)
        for name, parameter in exact.named_parameters():
            assert actual[name].dtype == torch.float32
            assert_accurate(actual[name], eager[name], parameter.grad, terms=2 * LENGTH)


def offloaded_parameters(rank):
    for family in FAMILIES:
        expected, policy = truth(family), CPUOffloadPolicy(pin_memory=False)
        plain, ours = (sharded(family, per_block, ours=ours, offload_policy=policy) for ours in (False, True))
        assert step(ours, rank) == step(plain, rank)
        check(ours, expected)


def inside_wrappers(rank):
    """The layers inside `checkpoint_wrapper`, sharded around it as accelerate does, or within: torch's function, and ours on any layer."""
    for family, reshard in (("native", True), ("llama", True), ("gpt2", False)):
        expected = truth(family)
        base = step(sharded(family, per_block, ours=False, reshard_after_forward=reshard), rank).collectives
        for ours, function in ((True, None), (True, ckpt_ext.checkpoint), (False, ckpt_ext.checkpoint)):
            for shard_first in (False, True):
                model = make(family, ours=ours)
                layers = layers_of(model)
                for index, layer in enumerate(layers):
                    if shard_first:
                        fully_shard(layer, reshard_after_forward=reshard)
                    layers[index] = checkpoint_wrapper(layer, checkpoint_fn=function)
                    if not shard_first:
                        fully_shard(layers[index], reshard_after_forward=reshard)
                fully_shard(model, reshard_after_forward=reshard)
                found = step(model, rank)
                check(model, expected)
                assert found.collectives == base, (family, reshard, ours, function, shard_first)


CASES = [shard_per_block, shard_per_model, shard_nested, mixed_precision, offloaded_parameters, inside_wrappers]


@pytest.fixture(scope="module")
def failures():
    return run_on_ranks(CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_sharded(case, failures):
    assert not failures[case], failures[case]
