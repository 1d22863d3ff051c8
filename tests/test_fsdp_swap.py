"""Swapping and sharding in either order, a child with a group of its own, and segments, under FSDP2 on two processes."""

import itertools
import warnings

import pytest
from torch.distributed.fsdp import FSDPModule, fully_shard

import ckpt_ext
from ckpt_ext import Policy
from ckpt_ext.rank_models import (
    DIM,
    LAYERS,
    LENGTH,
    SIZES,
    batch,
    check,
    kept_bytes,
    layers_of,
    loss,
    make,
    per_block,
    per_model,
    sharded,
    step,
    truth,
)
from ckpt_ext.ranks import Collectives, run_on_ranks
from ckpt_ext.truth import Float64Throughout

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


def with_a_leaf_sharded(rank):
    """A linear child with a group of its own is gathered by its own call alone: the layer is refused by name, and checkpointed."""
    expected = truth("llama")
    for swap_first in (True, False):
        plain, model = make("llama", ours=False), make("llama", ours=True, swap=swap_first)
        for layer in (*layers_of(plain), *layers_of(model)):
            fully_shard(layer.mlp.up_proj)
        base = step(per_block(plain), rank)
        per_block(model)
        if not swap_first:
            report = ckpt_ext.swap(model)
            assert len(report.refused) == LAYERS and all("mlp.up_proj must be exactly Linear" in r for r in report.refused.values())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert step(model, rank).collectives == base.collectives
        check(model, expected)
        assert any("mlp.up_proj must be exactly Linear, got FSDPLinear" in str(each.message) for each in caught) == swap_first
    blocks = make("native", ours=True)
    fully_shard(blocks.blocks[1].up_proj)
    with pytest.raises(NotImplementedError, match="up_proj must be exactly Linear, got FSDPLinear"):
        loss(per_block(blocks), batch(rank))


def in_segments(rank):
    """In one group, only the first layer of a segment keeps its input; layers with groups of their own all do, and say so."""
    for family, reshard in itertools.product(SIZES, (True, False)):
        expected = truth(family)
        for wrap, fewer in ((per_model, LAYERS - 1), (per_block, 0)):
            base = step(sharded(family, wrap, ours=False, reshard_after_forward=reshard), rank)
            kept = kept_bytes(sharded(family, wrap, ours=True, reshard_after_forward=reshard), rank)
            model = make(family, ours=True)
            ckpt_ext.swap(model, segments=1)
            wrap(model, reshard_after_forward=reshard)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert kept - kept_bytes(model, rank) == fewer * INPUT, (family, reshard)
            assert sum("segments" in str(each.message) for each in caught) == (wrap is per_block)
            assert step(model, rank) == base
            check(model, expected)


def native_in_segments(rank):
    """`checkpoint_sequential` takes no blocks with groups of their own; in one group it does."""
    for reshard in (True, False):
        model = make("native", ours=True)
        model.segments = 1
        base = step(sharded("native", per_model, ours=False, reshard_after_forward=reshard), rank)
        per_model(model, reshard_after_forward=reshard)
        with Collectives() as collectives, Float64Throughout():
            loss(model, batch(rank)).backward()
        assert collectives.counts == base.collectives
        check(model, truth("native"))
        model = make("native", ours=True)
        model.segments = 1
        with pytest.raises(NotImplementedError, match=r"blocks\[0\] must be exactly TransformerBlock, got FSDPTransformerBlock"):
            loss(per_block(model, reshard_after_forward=reshard), batch(rank))


CASES = [swapped_after_sharding, given_back_after_sharding, native_after_sharding, with_a_leaf_sharded, in_segments, native_in_segments]


@pytest.fixture(scope="module")
def failures():
    return run_on_ranks(CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_swapped_and_sharded(case, failures):
    assert not failures[case], failures[case]
