"""The ledger of a step against bytes counted by hand, by the profiler, and on fake tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock, checkpoint_sequential
from ckpt_ext.functional import linear_cross_entropy
from ckpt_ext.memory import LiveStorages, estimate, measure

DIM, VOCAB, LENGTH = 64, 200, 512
SPEC = BlockSpec(dim=DIM, heads=4, kv_heads=2, hidden_dim=172, rope_theta=1e4)


class Model(nn.Module):
    """Symbols to a loss, by blocks that are called as `through` says."""

    def __init__(self, kind, through, loss="whole"):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.through, self.loss = through, loss

    def forward(self, symbols):
        x = self.through(self.blocks, self.embedding(symbols))
        if self.loss == "sliced":
            return linear_cross_entropy(x, self.head.weight, symbols)
        return F.cross_entropy(self.head(x).flatten(0, 1), symbols.flatten())


def one_by_one(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def checkpointed(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


MODELS = {
    "plain": lambda: Model(lambda: EagerBlock(SPEC), one_by_one),
    "torch checkpoint": lambda: Model(lambda: EagerBlock(SPEC), checkpointed),
    "ours: all": lambda: Model(lambda: TransformerBlock(SPEC, policy=Policy("all")), one_by_one),
    "ours: input": lambda: Model(lambda: TransformerBlock(SPEC), one_by_one, "sliced"),
    "ours: segments": lambda: Model(lambda: TransformerBlock(SPEC), lambda blocks, x: checkpoint_sequential(blocks, x, segments=2)),
}


def with_optimizer(name):
    model = MODELS[name]()
    return model, torch.optim.AdamW(model.parameters())


def step(model, optimizer):
    symbols = torch.randint(VOCAB, (1, LENGTH))
    model(symbols).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    else:
        model.zero_grad()


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("name", MODELS)
def test_estimate_is_measure_without_the_data(name):
    model, optimizer = with_optimizer(name)
    real = measure(lambda: step(model, optimizer), model, optimizer, vocab=VOCAB)
    fake = estimate(lambda: with_optimizer(name), step, vocab=VOCAB)
    for purpose, found in real.as_dict().items():
        assert fake.as_dict()[purpose] == (pytest.approx(found, rel=0.03, abs=1024) if purpose != "phase" else found), purpose


@pytest.mark.parametrize("name", ["plain", "torch checkpoint", "ours: input", "ours: segments"])
def test_the_peak_is_the_profilers(name):
    """What the allocator itself reports, scratch inside operators included."""
    model, _ = with_optimizer(name)
    step(model, None)
    ledger = measure(lambda: step(model, None), model, vocab=VOCAB)
    before = ledger.parameters
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(model, None)
    live = most = 0
    for event in sorted((e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    assert ledger.peak - before == pytest.approx(most, rel=0.03)


def test_the_split_is_what_it_says():
    model, optimizer = with_optimizer("plain")
    ledger = measure(lambda: step(model, optimizer), model, optimizer, vocab=VOCAB)
    parameters = bytes_of(model.parameters())
    assert ledger.phase == "backward"
    assert ledger.parameters == parameters
    assert ledger.optimizer == pytest.approx(2 * parameters, rel=1e-3)
    # The loss, its logits, their logarithm and one of their gradients, at the start of backward; nothing of a parameter yet but the head's.
    assert ledger.logits >= 2 * LENGTH * VOCAB * 4
    assert ledger.saved > 4 * 10 * LENGTH * DIM * 4
    assert ledger.peak == ledger.activations + ledger.parameters + ledger.gradients + ledger.optimizer + ledger.other


def test_inputs_alone_are_saved_and_the_rest_is_working_set():
    model = MODELS["ours: input"]()
    model.blocks.requires_grad_(False)
    unit = LENGTH * DIM * 4
    ledger = measure(lambda: step(model, None), model, vocab=VOCAB)
    # At the first block of backward all four inputs are alive, and little else of forward.
    assert 4 * unit <= ledger.saved <= 5.2 * unit
    assert ledger.working > 3 * unit
    with LiveStorages(model.parameters()) as live:
        model(torch.randint(VOCAB, (1, LENGTH))).backward()
    assert ledger.activations <= live.peak <= ledger.peak


def test_gradients_that_are_kept_count_from_the_start():
    model = nn.Linear(DIM, DIM)

    def accumulate():
        model(torch.ones(1, DIM)).sum().backward()

    first, second = measure(accumulate, model, warmup=0), measure(accumulate, model, warmup=0)
    assert first.gradients == bytes_of(model.parameters())
    assert second.gradients == bytes_of(model.parameters())
    assert second.working >= bytes_of([model.weight])


def test_what_the_optimizer_makes_is_its_own():
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step():
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    ledger = measure(step, model, optimizer)
    assert ledger.phase == "optimizer"
    assert ledger.optimizer > 2 * bytes_of(model.parameters())


def test_hooks_are_gone_afterwards():
    model, optimizer = with_optimizer("plain")
    measure(lambda: step(model, optimizer), model, optimizer)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_warmup_must_make_sense():
    with pytest.raises(ValueError, match="warmup must not be negative, got -1"):
        measure(lambda: None, nn.Linear(1, 1), warmup=-1)
