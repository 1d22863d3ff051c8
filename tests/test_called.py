"""Projections that call a module: hooks, quantised weights, parametrisations, and adapters beside them."""

import dataclasses

import pytest
import torch
from torch import nn

from ckpt_ext import BlockSpec, Policy, functional, reference, rng, rope
from ckpt_ext.called import Called
from ckpt_ext.lora import Adapter, LoRA
from ckpt_ext.projections import Dense, InCall
from ckpt_ext.sites import PROJECTIONS
from ckpt_ext.testing import eager_block

SAVES = ("input", "attention", "all")
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
SPEC = BlockSpec(dim=24, heads=4, kv_heads=2, hidden_dim=20, rope_theta=1e4, residual_dropout=0.2, mlp_dropout=0.1)
SPECS = {
    "pre": SPEC, "gpt": dataclasses.replace(SPEC, activation="gelu", norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True),
    "sandwich": dataclasses.replace(SPEC, norm_placement="sandwich"), "post": dataclasses.replace(SPEC, norm_placement="post"),
}  # fmt: skip


def draw(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def inputs(dtype=F64, requires_grad=True):
    return draw(2, 5, 24, seed=1, dtype=dtype).requires_grad_(requires_grad), draw(2, 5, 24, seed=2, dtype=dtype)


def linear_of(dense):
    """A linear module that has the projection's own parameters."""
    module = nn.Linear(dense.weight.size(1), dense.weight.size(0), bias=dense.bias is not None, device="meta")
    module.weight, module.bias = dense.weight, dense.bias
    return module


class Bent(nn.Linear):
    """More than linear in its rows, so that a gradient at other rows is another."""

    def forward(self, x):
        return torch.tanh(super().forward(x)) * x.mean(-1, keepdim=True)


class Quantised(nn.Module):
    """Weights of 8 bits in a buffer, and no parameter."""

    def __init__(self, dense):
        super().__init__()
        self.scale = dense.weight.detach().abs().max().item() / 127
        self.register_buffer("codes", (dense.weight.detach() / self.scale).round().add(128).to(torch.uint8))

    def dense(self, dtype):
        return (self.codes.to(dtype) - 128) * self.scale

    def forward(self, x):
        return nn.functional.linear(x, self.dense(x.dtype))


def with_modules(weights, make, parts=PROJECTIONS):
    pieces = {name: getattr(weights, name) for name in parts if getattr(weights, name) is not None}
    return weights._replace(**{name: make(part) for name, part in pieces.items()})


def leaves_of(x, weights):
    return [t for t in (x, *weights.flatten()[1]) if t is not None and t.requires_grad]


def run(x, weights, spec, grad, **options):
    torch.manual_seed(7)
    y = functional.block(x, weights, spec, training=True, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves_of(x, weights), grad)]


def expected(x, weights, spec, grad):
    torch.manual_seed(7)
    state = rng.reserve(x.device)
    parts = {name: getattr(weights, name) for name in PROJECTIONS if getattr(weights, name) is not None}
    weights = weights._replace(**{name: part.in_call(InCall(PROJECTIONS.index(name), state)) for name, part in parts.items()})
    y = reference.block(x, weights, spec, rope.table(spec, x.size(1), x.dtype, x.device), state)
    return [y.detach(), *torch.autograd.grad(y, leaves_of(x, weights), grad)]


def assert_same(actual, wanted):
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("save, slices", [("input", 1), ("attention", 3), ("all", 3)])
def test_a_called_linear_is_a_dense_projection(spec, save, slices):
    weights, (x, grad) = eager_block(spec).weights(), inputs()
    called = with_modules(weights, lambda part: Called.of(linear_of(part)))
    assert_same(run(x, called, spec, grad, policy=Policy(save, slices)), run(x, weights, spec, grad))


@pytest.mark.parametrize("spec", [SPEC, SPECS["sandwich"]], ids=["pre", "sandwich"])
@pytest.mark.parametrize(
    "backend, save, slices", [("aten", "input", 1), ("aten", "all", 3), ("aten", "attention", 3), ("triton", "input", 2)]
)
def test_modules_that_are_more_than_linear_are_differentiated_at_their_rows(spec, backend, save, slices):
    weights, (x, grad) = eager_block(spec).weights(), inputs()

    def bent(part):
        module = linear_of(part)
        module.__class__ = Bent
        return Called.of(module)

    called = with_modules(weights, bent)
    assert_same(run(x, called, spec, grad, backend=backend, policy=Policy(save, slices)), expected(x, called, spec, grad))


@pytest.mark.parametrize("part", PROJECTIONS)
def test_one_alone_beside_dense_ones_of_which_nothing_is_trained(part):
    weights, (x, grad) = eager_block(SPEC).weights(), inputs()
    called = with_modules(weights, lambda dense: Called.of(linear_of(dense)), (part,))
    for t in weights.flatten()[1]:
        if t is not None:
            t.requires_grad_(False)
    assert_same(run(x, called, SPEC, grad), run(x, weights, SPEC, grad))
    getattr(weights, part).weight.requires_grad_()
    assert_same(run(x.detach(), called, SPEC, grad, policy=Policy(slices=3)), run(x.detach(), weights, SPEC, grad))


def test_bits_do_not_depend_on_what_is_saved():
    weights, (x, grad) = eager_block(SPEC, F32).weights(), inputs(F32)
    called = with_modules(weights, lambda part: LoRA(Called.of(Quantised(part)), lora_of(part, F32)))
    first, *others = (run(x, called, SPEC, grad, policy=Policy(save, 3)) for save in (*SAVES, "input"))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def lora_of(dense, dtype=F64):
    a, b = draw(3, dense.weight.size(1), seed=4, dtype=dtype), draw(dense.weight.size(0), 3, seed=5, dtype=dtype)
    return (Adapter(a.div_(5).requires_grad_(), b.div_(5).requires_grad_(), None, 0.5, 0.3),)


@pytest.mark.parametrize("slices", [1, 3])
def test_quantised_weights_without_and_with_adapters(slices):
    spec, (x, grad) = SPEC, inputs()
    weights = eager_block(spec).weights()
    for adapt in (lambda base, part: base, lambda base, part: LoRA(base, lora_of(part))):
        called = with_modules(weights, lambda part, adapt=adapt: adapt(Called.of(Quantised(part)), part))
        dense = with_modules(weights, lambda part, adapt=adapt: adapt(Dense(Quantised(part).dense(F64)), part))
        ours, theirs = run(x, called, spec, grad, policy=Policy(slices=slices)), run(x, dense, spec, grad)
        assert_same(ours, theirs)
    assert called.q.base.tensors == () and len(called.q.tensors) == 4


def test_hooks_run_and_parameters_get_their_gradient_once():
    weights, (x, grad) = eager_block(SPEC).weights(), inputs()
    modules = {name: linear_of(getattr(weights, name)) for name in PROJECTIONS}
    calls, fired = {}, []
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
        module.weight.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    called = weights._replace(**{name: Called.of(module) for name, module in modules.items()})
    y = functional.block(x, called, SPEC)
    assert calls == dict.fromkeys(PROJECTIONS, 1)
    y.backward(grad)
    assert sorted(fired) == sorted(PROJECTIONS)
    # Once to rebuild, but for down; then once for the gradient of the rows and once for those of the parameters.
    assert calls == {name: 3 if name == "down" else 4 for name in PROJECTIONS}


def test_a_hook_that_changes_the_output_is_honoured():
    weights, (x, grad) = eager_block(SPEC).weights(), inputs()
    module = linear_of(weights.down)
    module.register_forward_hook(lambda module, args, y: y * 2)
    doubled = weights._replace(down=Dense(weights.down.weight * 2))
    ours = run(x, weights._replace(down=Called.of(module)), SPEC, grad)
    theirs = run(x, doubled, SPEC, grad)
    assert_same(ours[:2], theirs[:2])
    torch.testing.assert_close(ours[-1], theirs[-1] * 2, rtol=1e-10, atol=1e-11)


def test_a_module_that_hands_on_its_rows_or_ignores_them():
    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    x, grad = draw(5, 6), draw(5, 6, seed=1)
    before = grad.clone()
    handed = Called.of(nn.Identity()).grad_input(grad, x=x)
    handed.zero_()
    assert torch.equal(grad, before)
    onto = draw(5, 6, seed=3)
    assert torch.equal(Called.of(nn.Identity()).grad_input(grad, onto.clone(), x), onto + grad)
    assert not Called.of(Constant()).grad_input(grad, x=x).any()
    assert torch.equal(Called.of(Constant()).grad_input(grad, onto.clone(), x), onto)


def test_parameters_that_are_unused_frozen_or_not_floating():
    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = (nn.Parameter(draw(6, 6, seed=seed)) for seed in range(2))
            self.codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)

        def forward(self, x):
            return x @ self.used

    called, x, grad = Called.of(Partial()), draw(5, 6), draw(5, 6, seed=1)
    assert len(called.tensors) == called.kind.arity == 2
    used, unused = called.grad_tensors(grad, x, [True, True])
    torch.testing.assert_close(used, x.T @ grad)
    assert unused is None
    assert called.grad_tensors(grad, x, [False, True]) == [None, None]
    onto = [torch.ones(6, 6, dtype=F64), torch.ones(6, 6, dtype=F64)]
    sums = called.grad_tensors(grad, x, [True, True], onto)
    torch.testing.assert_close(sums[0], 1 + x.T @ grad)
    assert torch.equal(sums[1], torch.ones(6, 6, dtype=F64))
    places = [torch.zeros(6, 6, dtype=F32), None]
    called.write_grads(grad, x, places)
    torch.testing.assert_close(places[0], used.float())


def test_a_change_of_its_weight_between_forward_and_backward_is_noticed():
    weights, (x, grad) = eager_block(SPEC).weights(), inputs()
    module = linear_of(weights.v)
    y = functional.block(x, weights._replace(v=Called.of(module)), SPEC)
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_under_autocast_the_module_runs_under_it_in_forward_and_backward(inside):
    """Backward inside, too, where autocast's cache still has what forward has cast without grad."""
    weights, (x, grad) = eager_block(SPEC, F32).weights(), inputs(F32)
    module, seen = linear_of(weights.up), []
    module.register_forward_hook(lambda module, args, y: seen.append((args[0].dtype, y.dtype, torch.is_autocast_enabled("cpu"))))
    called = weights._replace(up=Called.of(module))
    with torch.autocast("cpu", dtype=BF16):
        y = functional.block(x, called, SPEC)
        if inside:
            grads = torch.autograd.grad(y, [x, module.weight], grad)
        cast = functional.block(x, weights, SPEC)
    if not inside:
        grads = torch.autograd.grad(y, [x, module.weight], grad)
    theirs = torch.autograd.grad(cast, [x, module.weight], grad)
    assert set(seen) == {(BF16, BF16, True)} and len(seen) == 4
    for a, b in zip(grads, theirs, strict=True):
        assert a.dtype == F32
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_without_grad_nothing_is_differentiated():
    weights, (x, _) = eager_block(SPEC).weights(), inputs()
    called = with_modules(weights, lambda part: Called.of(linear_of(part)))
    with torch.no_grad():
        y = functional.block(x, called, SPEC)
    assert not y.requires_grad
    torch.testing.assert_close(y, functional.block(x, weights, SPEC).detach(), rtol=1e-12, atol=1e-12)
