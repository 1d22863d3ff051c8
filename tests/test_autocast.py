"""Autocast and loss scaling around whole training steps: native blocks, swapped models, checkpointed regions, the loss without logits."""

import contextlib
import itertools

import pytest
import torch
from torch.nn import functional as F

import ckpt_ext
from ckpt_ext import BlockSpec, Policy, TransformerBlock, functional, verify_models
from ckpt_ext.testing import TwoLayers, assert_accurate, assert_same

BF16, F16 = torch.bfloat16, torch.float16
SPEC = BlockSpec(dim=16, heads=2, hidden_dim=24, rope_theta=1e4, residual_dropout=0.2, attn_dropout=0.1)


@contextlib.contextmanager
def nested():
    with torch.autocast("cpu", dtype=BF16), torch.autocast("cpu", enabled=False):
        yield


CONTEXTS = {
    "none": contextlib.nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", dtype=BF16),
    "float16": lambda: torch.autocast("cpu", dtype=F16),
    "disabled within": nested,
    "no cache": lambda: torch.autocast("cpu", dtype=BF16, cache_enabled=False),
}
PAIRS = [pair for pair in itertools.product(CONTEXTS, CONTEXTS) if pair[0] != "none"]


def swapped(save, dtype=torch.float32):
    pytest.importorskip("transformers")
    model, batch = verify_models.load("tiny-llama", batch=1, length=6, layers=1, dtype=dtype, seed=0)
    model.config.use_cache = False
    if save is not None:
        ckpt_ext.swap(model, policy=Policy(save))
    return model.train(), lambda: model(**batch).loss


def native(save, dtype=torch.float32):
    torch.manual_seed(0)
    block = TransformerBlock(SPEC, policy=Policy(save), dtype=dtype)
    x = torch.randn(2, 5, SPEC.dim)
    return block, lambda: block(x).square().mean()


def loss_and_gradients(module, run, forward, backward=contextlib.nullcontext):
    torch.manual_seed(2)
    with forward():
        loss = run()
    with backward():
        return [loss.detach(), *torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad])]


@pytest.mark.parametrize("forward, backward", PAIRS, ids=[f"{forward} then {backward}" for forward, backward in PAIRS])
def test_recompute_under_any_two_contexts_changes_no_bit(forward, backward):
    kept = loss_and_gradients(*native("all"), CONTEXTS[forward])
    assert_same(loss_and_gradients(*native("input"), CONTEXTS[forward], CONTEXTS[backward]), kept)


@pytest.mark.parametrize("backward", ["none", "bfloat16", "float16"])
def test_swapped_layers_recompute_the_bits_of_autocast(backward):
    # What is around the layers goes back under the context of the backward pass, in both.
    kept = loss_and_gradients(*swapped("all"), CONTEXTS["bfloat16"], CONTEXTS[backward])
    assert_same(loss_and_gradients(*swapped("input"), CONTEXTS["bfloat16"], CONTEXTS[backward]), kept)


def test_swapped_layers_are_as_accurate_as_eager_under_autocast():
    truth = loss_and_gradients(*swapped(None, torch.float64), CONTEXTS["none"])
    eager, actual = (loss_and_gradients(*swapped(save), CONTEXTS["bfloat16"]) for save in (None, "input"))
    for ours, theirs, exact in zip(actual, eager, truth, strict=True):
        assert_accurate(ours, theirs, exact, terms=96)


@pytest.mark.parametrize("forward, backward", PAIRS, ids=[f"{forward} then {backward}" for forward, backward in PAIRS])
def test_a_checkpointed_region_computes_in_the_dtypes_of_its_forward_pass(forward, backward):
    torch.manual_seed(0)
    layers, x, seen = TwoLayers(), torch.randn(3, 8), []
    layers.first.register_forward_hook(lambda module, args, y: seen.append((args[0].dtype, y.dtype)))
    plain = loss_and_gradients(layers, lambda: layers(x).square().mean(), CONTEXTS[forward], CONTEXTS[backward])
    again = loss_and_gradients(layers, lambda: ckpt_ext.checkpoint(layers, x).square().mean(), CONTEXTS[forward], CONTEXTS[backward])
    assert_same(again, plain)
    assert len(seen) == 3 and len(set(seen)) == 1  # without checkpointing, with, and in the replay


@pytest.mark.parametrize("backward", ["none", "bfloat16", "float16"])
def test_loss_without_logits_under_autocast(backward):
    torch.manual_seed(0)
    x, weight, target = torch.randn(7, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True), torch.randint(40, (7,))

    def gradients(function, dtype, forward):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight)]
        with CONTEXTS[forward]():
            loss = function(*leaves)
        with CONTEXTS[backward]():
            return loss.detach(), *torch.autograd.grad(loss, leaves)

    def whole(x, weight):
        return F.cross_entropy(F.linear(x, weight), target)

    truth, eager = gradients(whole, torch.float64, "none"), gradients(whole, torch.float32, "bfloat16")
    actual = gradients(lambda x, weight: functional.linear_cross_entropy(x, weight, target), torch.float32, "bfloat16")
    for ours, theirs, exact in zip(actual, eager, truth, strict=True):
        assert ours.dtype == torch.float32
        assert_accurate(ours, theirs.float(), exact, terms=40)


@pytest.mark.parametrize("kind", [native, swapped])
def test_a_grad_scaler_scales_unscales_and_skips(kind):
    """Scaling by powers of two changes no bit where nothing overflows; one infinite gradient and the step is not taken."""
    module, run = kind("input")
    expected = loss_and_gradients(module, run, CONTEXTS["bfloat16"])[1:]
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = [parameter.detach().clone() for parameter in module.parameters()]

    def backward(*, overflows=False):
        optimizer.zero_grad()
        torch.manual_seed(2)
        with CONTEXTS["bfloat16"]():
            loss = run()
        scaler.scale(loss).backward()
        if overflows:
            next(module.parameters()).grad.view(-1)[0] = torch.inf
        scaler.unscale_(optimizer)

    backward(overflows=True)
    scaler.step(optimizer)
    scaler.update()
    assert_same(list(module.parameters()), before)
    assert scaler.get_scale() == 2.0**9
    backward()
    assert_same([parameter.grad for parameter in module.parameters()], expected)
    scaler.step(optimizer)
    scaler.update()
    assert not any(torch.equal(parameter, old) for parameter, old in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("master, stream", [(torch.float32, BF16), (BF16, torch.float32)])
def test_gradients_have_their_parameters_dtype_with_other_activations(master, stream):
    torch.manual_seed(0)
    x = torch.randn(1, 4, SPEC.dim).to(stream).requires_grad_()
    results = []
    for save in ("input", "all"):
        block = native(save, master)[0]
        torch.manual_seed(1)
        y = block(x)
        assert y.dtype == stream
        results.append(torch.autograd.grad(y, [x, *block.parameters()], torch.ones_like(y)))
    assert_same(*results)
    assert [grad.dtype for grad in results[0]] == [stream, *[master] * len(list(block.parameters()))]
