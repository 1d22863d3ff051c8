"""Blocks and swapped models under DistributedDataParallel, on two processes: every gradient is the mean of the ranks' own, in float64."""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt_ext
from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock
from ckpt_ext.ranks import run_on_ranks
from ckpt_ext.truth import Float64Throughout

transformers = pytest.importorskip("transformers")

WORLD, DIM, LENGTH = 2, 32, 9
SPEC = BlockSpec(dim=DIM, heads=4, kv_heads=2, hidden_dim=44, rope_theta=1e4)
DROPOUT = BlockSpec(dim=DIM, heads=4, kv_heads=2, hidden_dim=44, attn_dropout=0.2, residual_dropout=0.3, mlp_dropout=0.1)
TOKENS = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False)
LLAMA = transformers.LlamaConfig(
    hidden_size=DIM, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, max_position_embeddings=32,
    **TOKENS,
)  # fmt: skip
GPT2 = transformers.GPT2Config(n_embd=DIM, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, **TOKENS)
NATIVE, SWAPPED = "native", {"llama": LLAMA, "gpt2": GPT2}
MODES = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


class Native(nn.Module):
    """Symbols `[B, T]` to logits `[B, T, 64]`, the blocks of `kind` between; `skips` names blocks that are not run."""

    def __init__(self, kind, spec=SPEC, **arguments):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(64, DIM, dtype=torch.float64), nn.Linear(DIM, 64, dtype=torch.float64)
        self.blocks = nn.ModuleList(kind(spec, dtype=torch.float64, **arguments) for _ in range(3))
        self.skips = ()

    def forward(self, symbols):
        x = self.embedding(symbols)
        for index, block in enumerate(self.blocks):
            x = x if index in self.skips else block(x)
        return self.head(x)


def hugging_face(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).double()


def pair(name, tied=False):
    """The model on the engine, and the same in plain PyTorch."""
    if name == NATIVE:
        ours, plain = Native(TransformerBlock), Native(EagerBlock)
        layers = [model.blocks for model in (ours, plain)]
    else:
        ours, plain = hugging_face(SWAPPED[name]), hugging_face(SWAPPED[name])
        assert len(ckpt_ext.swap(ours).swapped) == 2
        layers = [model.model.layers if name == "llama" else model.transformer.h for model in (ours, plain)]
    if tied:
        for first, second, *_ in layers:
            weight = max(first.named_parameters(), key=lambda item: item[1].numel())[0]
            path, _, leaf = weight.rpartition(".")
            setattr(second.get_submodule(path), leaf, first.get_parameter(weight))
    return ours, plain


def batch(rank, step=0):
    return torch.randint(3, 64, (2, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model, symbols):
    out = model(symbols[:, :-1])
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten())


def truth(model, steps=1, prepare=lambda rank: None):
    """By name, the mean over the ranks of the gradients that each alone gets in `steps` batches; in one process, without any hook."""
    sums = {}
    for rank in range(WORLD):
        model.zero_grad()
        prepare(rank)
        for step in range(steps):
            loss(model, batch(rank, step)).backward()
        for name, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            sums[name] = sums.get(name, 0) + grad / WORLD
    return sums


def check(model, expected):
    """The gradients of a wrapped model equal `expected` to 1e-9 of the largest of each."""
    actual = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        error, size = (parameter.grad - expected[name]).abs().max().item(), expected[name].abs().max().item()
        assert error <= 1e-9 * size, f"{name}: {error:.3g} of {size:.3g}"


def count_hooks(model):
    """How often each parameter's gradient has been handed over, by name."""
    counts = dict.fromkeys((name for name, parameter in model.named_parameters() if parameter.requires_grad), 0)

    def fired(name, _):
        counts[name] += 1

    for name in counts:
        model.get_parameter(name).register_post_accumulate_grad_hook(functools.partial(fired, name))
    return counts


def every_mode(rank, *, tied):
    """Each family in each mode, two backward passes: static_graph changes its way after the first."""
    for family in (NATIVE, *SWAPPED):
        ours, plain = pair(family, tied)
        with Float64Throughout():
            expected = truth(plain)
            for mode in MODES:
                model = DistributedDataParallel(copy.deepcopy(ours), **mode)
                counts = count_hooks(model)
                for step in (1, 2):
                    model.zero_grad()
                    loss(model, batch(rank)).backward()
                    check(model, expected)
                    assert set(counts.values()) == {step}, (family, mode, counts)


def in_every_mode(rank):
    every_mode(rank, tied=False)


def with_a_weight_shared_by_two_blocks(rank):
    every_mode(rank, tied=True)


def accumulating_without_synchronisation(rank):
    for family in (NATIVE, *SWAPPED):
        ours, plain = pair(family)
        with Float64Throughout():
            expected = truth(plain, steps=3)
            model = DistributedDataParallel(ours)
            for step in range(3):
                with model.no_sync() if step < 2 else nullcontext():
                    loss(model, batch(rank, step)).backward()
            check(model, expected)


def with_a_block_that_one_rank_skips(rank):
    ours, plain = pair(NATIVE)

    def prepare(rank):
        plain.skips = (1,) if rank else ()

    expected = truth(plain, prepare=prepare)
    ours.skips = (1,) if rank else ()
    model = DistributedDataParallel(ours, find_unused_parameters=True)
    loss(model, batch(rank)).backward()
    check(model, expected)


def with_frozen_parameters(rank):
    """All but biases, norms and one projection are frozen, and so is what comes before the first block."""
    for family in (NATIVE, *SWAPPED):
        ours, plain = pair(family)
        for model in (ours, plain):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(any(part in name for part in ("bias", "norm", "v_proj", "c_fc")) and "emb" not in name)
        with Float64Throughout():
            expected = truth(plain)
            model = DistributedDataParallel(ours)
            counts = count_hooks(model)
            loss(model, batch(rank)).backward()
            check(model, expected)
        assert counts and set(counts.values()) == {1}


def with_dropout_bit_for_bit(rank):
    """What is kept changes no bit on any rank; masks differ between ranks that are seeded apart."""
    grads = {}
    for save in ("input", "attention", "all"):
        model = DistributedDataParallel(Native(TransformerBlock, DROPOUT, policy=Policy(save)), find_unused_parameters=save == "attention")
        torch.manual_seed(rank)
        loss(model, batch(0)).backward()
        grads[save] = [parameter.grad for parameter in model.parameters()]
    for save in ("input", "attention"):
        assert all(map(torch.equal, grads[save], grads["all"])), save
    alone = Native(TransformerBlock, DROPOUT)
    torch.manual_seed(0)
    loss(alone, batch(0)).backward()
    mean_of_equal_masks = [parameter.grad for parameter in alone.parameters()]
    assert not all(map(torch.allclose, grads["input"], mean_of_equal_masks))


def in_segments(rank):
    """Segments rebuild inputs of blocks whose turn has not come; hooks must still fire once, when a gradient is whole."""
    ours, plain = pair("llama")
    ckpt_ext.swap(ours, segments=1)
    with Float64Throughout():
        expected = truth(plain)
        model = DistributedDataParallel(ours)
        counts = count_hooks(model)
        loss(model, batch(rank)).backward()
        check(model, expected)
    assert set(counts.values()) == {1}


CASES = [
    in_every_mode, with_a_weight_shared_by_two_blocks, accumulating_without_synchronisation, with_a_block_that_one_rank_skips,
    with_frozen_parameters, with_dropout_bit_for_bit, in_segments,
]  # fmt: skip


@pytest.fixture(scope="module")
def failures():
    return run_on_ranks(CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_gradients(case, failures):
    assert not failures[case], failures[case]
