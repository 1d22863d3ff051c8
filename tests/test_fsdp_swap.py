"""Swapping and sharding in either order, a child with a group of its own, and segments, under FSDP2 on two processes."""

import itertools

import pytest
from torch.distributed.fsdp import FSDPModule

import ckpt_ext
from ckpt_ext import Policy
from ckpt_ext.rank_models import (
    DIM,
    LAYERS,
    LENGTH,
    SIZES,
    check,
    kept_bytes,
    layers_of,
    make,
    per_block,
    per_model,
    sharded,
    step,
    truth,
)
from ckpt_ext.ranks import run_on_ranks

pytest.importorskip("transformers")

INPUT = 2 * LENGTH * DIM * 8
"""Bytes of the input of a layer."""


def swapped_after_sharding(rank):
    """Layers of FSDP's class are blocks, too, and are of FSDP's class and nothing more once they are given back."""
    for family, wrap in itertools.product(SIZES, (per_block, per_model)):
        expected, base = truth(family), step(sharded(family, wrap, ours=False), rank)
        kept = kept_bytes(sharded(family, wrap, ours=True), rank)
        model = wrap(make(family, ours=False))
        kinds = [type(layer) for layer in layers_of(model)]
        for policy in (Policy(), Policy("attention")):
            report = ckpt_ext.swap(model, policy=policy)
            assert len(report.swapped) == LAYERS, report
            for layer, kind in zip(layers_of(model), kinds, strict=True):
                assert type(layer).__name__ == kind.__name__ and isinstance(layer, FSDPModule) == (wrap is per_block)
            for _ in range(2):
                assert step(model, rank) == base
                check(model, expected)
            if policy == Policy():
                assert kept_bytes(model, rank) == kept
        ckpt_ext.unswap(model)
        assert [type(layer) for layer in layers_of(model)] == kinds
        assert step(model, rank) == base
        check(model, expected)


def given_back_after_sharding(rank):
    """Layers that were sharded as blocks are FSDP's still once they are given back, and can be swapped again."""
    for family in SIZES:
        expected, base = truth(family), step(sharded(family, per_block, ours=False), rank)
        own = type(layers_of(make(family, ours=False))[0])
        model = sharded(family, per_block, ours=True)
        for _ in range(2):
            ckpt_ext.unswap(model)
            for layer in layers_of(model):
                assert type(layer).__mro__[1:] == (FSDPModule, *own.__mro__) and type(layer).__name__ == f"FSDP{own.__name__}"
            assert step(model, rank) == base
            check(model, expected)
            assert len(ckpt_ext.swap(model).swapped) == LAYERS
            assert step(model, rank) == base
            check(model, expected)


def native_after_sharding(rank):
    blocks = per_block(make("native", ours=True))
    assert len(ckpt_ext.swap(blocks, policy=Policy("attention")).swapped) == LAYERS
    step(blocks, rank)
    check(blocks, truth("native"))


CASES = [swapped_after_sharding, given_back_after_sharding, native_after_sharding]


@pytest.fixture(scope="module")
def failures():
    return run_on_ranks(CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_swapped_and_sharded(case, failures):
    assert not failures[case], failures[case]
