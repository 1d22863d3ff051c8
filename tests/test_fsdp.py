"""Blocks and swapped models under FSDP2, on two processes: gradients, collectives, and what is sharded or freed when."""

import copy
import itertools
from collections import Counter
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ckpt_ext
from ckpt_ext import BlockSpec, EagerBlock, TransformerBlock
from ckpt_ext.ranks import Collectives, run_on_ranks
from ckpt_ext.testing import assert_accurate
from ckpt_ext.training import LanguageModel
from ckpt_ext.truth import Float64Throughout

transformers = pytest.importorskip("transformers")

WORLD, DIM, LENGTH, LAYERS = 2, 32, 9, 3
SPEC = BlockSpec(dim=DIM, heads=4, kv_heads=2, hidden_dim=44, rope_theta=1e4)
TOKENS = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, tie_word_embeddings=False)
CONFIGS = {
    "llama": transformers.LlamaConfig(
        hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        max_position_embeddings=32, **TOKENS,
    ),
    "gpt2": transformers.GPT2Config(
        n_embd=DIM, n_layer=LAYERS, n_head=4, n_positions=32, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, **TOKENS
    ),
}  # fmt: skip
FAMILIES = ("native", *CONFIGS)


def make(family, *, ours, swap=True):
    """A model in float64 with parameters that are always the same: on the engine, or plain PyTorch's."""
    torch.manual_seed(0)
    if family == "native":
        blocks = [(TransformerBlock if ours else EagerBlock)(SPEC, dtype=torch.float64) for _ in range(LAYERS)]
        return LanguageModel(blocks, DIM, dtype=torch.float64, device=torch.device("cpu"))
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family])).double()
    if ours and swap:
        assert len(ckpt_ext.swap(model).swapped) == LAYERS
    return model


def layers_of(model):
    if isinstance(model, LanguageModel):
        return model.blocks
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def per_block(model, **arguments):
    for layer in layers_of(model):
        fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


def per_model(model, **arguments):
    return fully_shard(model, **arguments)


def nested(model, **arguments):
    """Every module that is called and has blocks inside is sharded, too, and so is the head."""
    for layer in layers_of(model):
        fully_shard(layer, **arguments)
    if not isinstance(model, LanguageModel):
        fully_shard(model.base_model, **arguments)
    else:
        fully_shard(model.head, **arguments)
    return fully_shard(model, **arguments)


def batch(rank):
    return torch.randint(3, 64, (2, LENGTH + 1), generator=torch.Generator().manual_seed(rank))


def loss(model, symbols):
    out = model(symbols[:, :-1])
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())


def truth(family):
    """By name, the mean over the ranks of the gradients that each alone gets; plain PyTorch in float64 in one process."""
    model, sums = make(family, ours=False), {}
    with Float64Throughout():
        for rank in range(WORLD):
            model.zero_grad()
            loss(model, batch(rank)).backward()
            for name, parameter in model.named_parameters():
                sums[name] = sums.get(name, 0) + parameter.grad / WORLD
    return sums


def whole_gradients(model):
    """Those of a sharded model by name, without what wrappers put into names."""
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad.full_tensor() for name, p in model.named_parameters()}


def check(model, expected):
    """Every parameter is sharded, and its gradient equals `expected` to 1e-9 of the largest of each."""
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    actual = whole_gradients(model)
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        error, size = (grad - expected[name]).abs().max().item(), expected[name].abs().max().item()
        assert error <= 1e-9 * size, f"{name}: {error:.3g} of {size:.3g}"


class Step(NamedTuple):
    """What one step did."""

    collectives: Counter[str]
    between: list[int]
    """Bytes of the storages of the parameters that each block ran with, after the forward pass."""
    after: list[int]
    """The same after backward."""


def step(model, rank):
    """Forward and backward, with collectives counted and the storages of the layers' unsharded parameters looked at."""
    storages, handles = [], []
    for layer in layers_of(model):
        note = layer.register_forward_pre_hook(lambda layer, _: storages.append([p.untyped_storage() for p in layer.parameters()]))
        handles.append(note)
    model.zero_grad()
    with Collectives() as collectives, Float64Throughout():
        value = loss(model, batch(rank))
        run = storages[: len(handles)]
        between = [sum(storage.nbytes() for storage in layer) for layer in run]
        value.backward()
    for handle in handles:
        handle.remove()
    return Step(collectives.counts, between, [sum(storage.nbytes() for storage in layer) for layer in run])


def sharded(family, wrap, *, ours, **arguments):
    return wrap(make(family, ours=ours), **arguments)


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
