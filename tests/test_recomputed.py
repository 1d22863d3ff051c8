"""Blocks and swapped layers with dropout inside checkpoints of torch: gradients are those without the checkpoint, from the same seed, or
it is refused."""

import copy
import functools
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ckpt_ext
from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock, functional
from ckpt_ext.replay import ReplayMismatch

DIM, LENGTH = 32, 6
SPEC = BlockSpec(dim=DIM, heads=4, kv_heads=2, hidden_dim=44, attn_dropout=0.3, residual_dropout=0.2, mlp_dropout=0.1)


def native(save="input", kind=TransformerBlock):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(kind(SPEC, policy=Policy(save), dtype=torch.float64) for _ in range(3)))
    return blocks, torch.randn(2, LENGTH, DIM, dtype=torch.float64, requires_grad=True)


def swapped(save="input"):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=DIM, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0.2, attn_pdrop=0.3, embd_pdrop=0.0)
    layers = transformers.GPT2Model(config).double().train()
    assert len(ckpt_ext.swap(layers, policy=Policy(save)).swapped) == 3
    return nn.Sequential(*layers.h), torch.randn(2, LENGTH, DIM, dtype=torch.float64, requires_grad=True)


MODELS = {
    "native": native, "native-attention": functools.partial(native, "attention"), "native-all": functools.partial(native, "all"),
    "eager": functools.partial(native, kind=EagerBlock), "swapped": swapped, "swapped-attention": functools.partial(swapped, "attention"),
}  # fmt: skip


def gradients(layers, x, run):
    """Of x and all parameters, and the output, from a fixed seed."""
    layers.zero_grad()
    x.grad = None
    torch.manual_seed(3)
    y = run(layers, x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layers.parameters())]


def plain(layers, x):
    return layers(x)


def by_layer(layers, x, **options):
    for layer in layers:
        x = checkpoint(layer, x, **options)
    return x


def at_once(layers, x, **options):
    return checkpoint(layers, x, **options)


def nested(layers, x, **options):
    """The first layer by itself, and all within another checkpoint."""
    return checkpoint(lambda x: by_layer(layers, x, **options), x, **options)


def partly_nested(layers, x, **options):
    return checkpoint(lambda x: layers[2](checkpoint(layers[1], layers[0](x), **options)), x, **options)


def wrapped(layers, x, **options):
    for layer in layers:
        x = checkpoint_wrapper(layer, **options)(x)
    return x


def within_ours(layers, x, **options):
    return ckpt_ext.checkpoint(lambda layers, x: by_layer(layers, x, **options), layers, x)


def around_ours(layers, x, **options):
    return checkpoint(lambda x: ckpt_ext.checkpoint(layers, x), x, **options)


RUNS = (by_layer, at_once, nested, partly_nested, wrapped, within_ours, around_ours)


def same(actual, expected):
    return all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_region_that_puts_generators_back_is_right(name, recwarn):
    layers, x = MODELS[name]()
    expected = gradients(layers, x, plain)
    for run in RUNS:
        options = {} if run is wrapped else {"use_reentrant": False}
        assert same(gradients(layers, x, functools.partial(run, **options)), expected), run.__name__
    assert not recwarn.list


@pytest.mark.parametrize("name", [name for name in MODELS if name != "eager"])
def test_a_region_that_draws_other_masks_is_refused(name):
    layers, x = MODELS[name]()
    expected, right = gradients(layers, x, plain), []
    for run in RUNS:
        options = {"preserve_rng_state": False} | ({} if run is wrapped else {"use_reentrant": False})
        try:
            found = gradients(layers, x, functools.partial(run, **options))
        except ReplayMismatch as error:
            assert "preserve_rng_state=True" in str(error)
            continue
        assert same(found, expected), run.__name__
        right.append(run)
    assert {*right} <= {around_ours, within_ours}, "our checkpoint puts generators back, whatever is around it or in it"


@pytest.mark.parametrize("kind", [TransformerBlock, EagerBlock])
def test_a_gradient_taken_inside_a_region_disturbs_no_masks(kind):
    """It unpacks what the region has saved so far, so the region is run again while it runs."""
    layers, x = native(kind=kind)

    def region(layers, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(layers[0](z).sum(), z)
        return layers[2](layers[1](x) + inner)

    layers.requires_grad_(False)
    expected = gradients(layers, x, region)[:2]
    assert same(gradients(layers, x, lambda layers, x: checkpoint(region, layers, x, use_reentrant=False))[:2], expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("run", [by_layer, at_once], ids=lambda run: run.__name__)
def test_a_reentrant_region_that_puts_generators_back_is_right(run, name):
    """Its forward pass runs without gradients, in which a swapped layer is the original."""
    layers, x = MODELS[name]()
    reference = layers
    if name.startswith("swapped"):
        reference = copy.deepcopy(layers)
        ckpt_ext.unswap(reference)
    expected = gradients(reference, x, plain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same(gradients(layers, x, functools.partial(run, use_reentrant=True)), expected)
    assert {"reentrant" in str(warning.message) for warning in caught} == ({True} if name.startswith("swapped") else set())


@pytest.mark.parametrize("name", MODELS)
def test_a_reentrant_region_that_draws_other_masks_is_refused(name):
    layers, x = MODELS[name]()
    for run in (functools.partial(by_layer, use_reentrant=True), functools.partial(wrapped, checkpoint_impl=CheckpointImpl.REENTRANT)):
        with pytest.raises(RuntimeError, match="preserve_rng_state must be True in a reentrant checkpoint"):
            gradients(layers, x, functools.partial(run, preserve_rng_state=False))


@pytest.mark.parametrize("name", ["native", "swapped"])
def test_without_dropout_nothing_is_refused(name):
    layers, x = MODELS[name]()
    layers.eval()
    expected = gradients(layers, x, plain)
    for run, reentrant in itertools.product((by_layer, at_once), (True, False)):
        found = gradients(layers, x, functools.partial(run, use_reentrant=reentrant, preserve_rng_state=False))
        assert all(torch.allclose(a, e, rtol=1e-12, atol=1e-13) for a, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["native", "swapped"])
def test_a_cache_of_products_that_blocks_write_over_is_refused(name):
    """torch looks for itself, unless it was told not to."""
    layers, x = MODELS[name]()
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    for allowed, message in ((False, "has been mutated"), (True, "allow_cache_entry_mutation must be False")):
        contexts = functools.partial(
            create_selective_checkpoint_contexts,
            lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE,
            allow_cache_entry_mutation=allowed,
        )
        with pytest.raises(RuntimeError, match=message):
            gradients(layers, x, functools.partial(at_once, use_reentrant=False, context_fn=contexts))


def test_functions_on_their_own_are_refused_alike():
    q, k, v = torch.randn(3, 2, 4, LENGTH, 8, dtype=torch.float64).unbind()
    weights = [torch.randn(*shape, dtype=torch.float64) for shape in ((44, DIM), (44, DIM), (DIM, 44))]
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64, requires_grad=True)
    q.requires_grad_()
    for function, leaf in (
        (lambda q: functional.attention(q, k, v, dropout_p=0.4), q),
        (lambda x: functional.mlp(x, *weights, activation="swiglu", dropout_p=0.3), x),
    ):
        y = checkpoint(function, leaf, use_reentrant=False, preserve_rng_state=False)
        with pytest.raises(ReplayMismatch, match="preserve_rng_state=True"):
            y.sum().backward()


def test_masks_that_others_drew_anew_are_noticed():
    """Someone's own hooks run the block a second time, from another state of the generator."""
    (block, *_), x = native()
    seen = []

    def unpack(index):
        if not again:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: again.append(t.detach()) or 0, lambda t: t), torch.enable_grad():
                block(x)
        return again[index]

    again = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(0) or len(seen) - 1, unpack):
        y = block(x)
    with pytest.raises(ReplayMismatch, match="other masks.*\n.*preserve_rng_state=True"):
        y.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        y = block(x)
    y.sum().backward()
