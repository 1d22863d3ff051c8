"""The autograd contract of the block's Function: which gradients come, once, from what is saved, and what is refused."""

import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ckpt_ext
from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock

SPEC = BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=48, rope_theta=1e4)
SAVES = ("input", "attention", "all")
saves = pytest.mark.parametrize("save", SAVES)


def pair(spec=SPEC, save="input"):
    """The engine's block and the eager one with the same parameters, float64."""
    torch.manual_seed(0)
    eager = EagerBlock(spec, dtype=torch.float64)
    block = TransformerBlock(spec, policy=Policy(save), dtype=torch.float64)
    block.load_state_dict(eager.state_dict())
    return block, eager


def rows(spec=SPEC, **options):
    return torch.randn(2, 5, spec.dim, dtype=torch.float64, **options)


def assert_same_gradients(actual, expected):
    for (name, a), b in zip(actual.named_parameters(), expected.parameters(), strict=True):
        if b.grad is None:
            assert a.grad is None, name
        else:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-12, msg=name)


@saves
@pytest.mark.parametrize("trained", ["attention_norm", "q_proj", "v_proj", "out_proj", "mlp_norm", "gate_proj", "up_proj", "down_proj"])
def test_one_trained_parameter_in_a_frozen_block_whose_input_needs_no_gradient(trained, save):
    block, eager = pair(save=save)
    x = rows()
    for module in (block, eager):
        module.requires_grad_(False)
        module.get_submodule(trained).requires_grad_(True)
        y = module(x)
        assert y.requires_grad
        y.square().sum().backward()
    assert_same_gradients(block, eager)


@saves
@pytest.mark.parametrize("frozen", [("q_proj", "attention_norm"), ("gate_proj", "down_proj"), ("mlp_norm", "out_proj")])
def test_frozen_parameters_get_no_gradient_and_the_others_the_right_one(frozen, save):
    block, eager = pair(save=save)
    x = rows(requires_grad=True)
    grads = []
    for module in (block, eager):
        for name in frozen:
            module.get_submodule(name).requires_grad_(False)
        module(x).square().sum().backward()
        grads.append(x.grad)
        x.grad = None
    assert_same_gradients(block, eager)
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


def test_wholly_frozen_block_builds_no_graph_and_saves_nothing(recwarn):
    block, _ = pair()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = block.requires_grad_(False)(rows())
    assert not y.requires_grad and not packed and not recwarn.list


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_built_or_saved(mode, recwarn):
    block, _ = pair(BlockSpec(dim=32, heads=4, hidden_dim=48, rope_theta=1e4, residual_dropout=0.1))
    x = rows(requires_grad=True)
    packed = []
    with mode(), torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        state = torch.get_rng_state()
        y = block.eval()(x)
    assert y.grad_fn is None and not packed and not recwarn.list
    assert torch.equal(torch.get_rng_state(), state)
    block.train()(x).sum().backward()  # a table made under inference mode must not spoil a later training step
    assert x.grad is not None


def test_autograd_grad_leaves_parameters_alone_and_backward_inputs_fills_only_those():
    block, eager = pair()
    x = rows(requires_grad=True)
    grads = [torch.autograd.grad(module(x).square().sum(), x)[0] for module in (block, eager)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)
    assert all(parameter.grad is None for parameter in block.parameters())
    block(x).square().sum().backward(inputs=[block.up_proj.weight])
    filled = [name for name, parameter in block.named_parameters() if parameter.grad is not None]
    assert filled == ["up_proj.weight"] and x.grad is None


@saves
def test_double_backward_is_refused(save):
    block, _ = pair(save=save)
    x = rows(requires_grad=True)
    (gradient,) = torch.autograd.grad(block(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("function", [
    lambda x: ckpt_ext.functional.attention(*(x.view(1, 2, 5, 32),) * 3),
    lambda x: ckpt_ext.functional.mlp(x, None, *torch.ones(2, 32, 32, dtype=x.dtype), activation="gelu"),
    lambda x: ckpt_ext.functional.norm(x, torch.ones(32, dtype=x.dtype)),
    lambda x: pair()[0](x),
], ids=["attention", "mlp", "norm", "block"])
def test_gradient_penalty_beside_another_loss_is_refused_not_lost(function):
    x = rows(requires_grad=True)
    y = function(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not implemented"):
        torch.autograd.grad(x.sum() + gradient.square().sum(), x)


@saves
def test_gradient_of_the_output_and_saved_tensors_are_not_written(save):
    block, eager = pair(save=save)
    h = rows(requires_grad=True)
    grads = []
    for module in (block, eager):
        x = h.exp()  # exp's backward reads its own output
        y = module(x)
        grad = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        before, kept = grad.clone(), x.detach().clone()
        first = torch.autograd.grad(y, [h, *module.parameters()], grad, retain_graph=True)
        assert torch.equal(grad, before) and torch.equal(x, kept)
        second = torch.autograd.grad(y, [h, *module.parameters()], grad)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        grads.append(first)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@saves
@pytest.mark.parametrize("changed", ["x", "q_proj.weight", "mlp_norm.weight", "down_proj.weight"])
def test_change_in_place_between_forward_and_backward_is_detected(changed, save):
    block, _ = pair(save=save)
    x = rows().requires_grad_()
    tensors = {"x": x, **dict(block.named_parameters())}
    y = block(x)
    with torch.no_grad():
        tensors[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_weights_and_input_go_through_saved_tensor_hooks():
    block, _ = pair()
    x = rows(requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        block(x)
    assert {t.data_ptr() for t in (x, *block.parameters())} <= set(packed)


def test_hooks_of_a_shared_parameter_fire_once_a_backward():
    first, _ = pair()
    second, _ = pair()
    second.up_proj.weight = first.up_proj.weight
    fired = []
    for parameter in (first.up_proj.weight, first.q_proj.weight):
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(id(p)))
    second(first(rows())).sum().backward()
    assert sorted(fired) == sorted([id(first.up_proj.weight), id(first.q_proj.weight)])


def test_internals_are_freed_after_backward_and_the_input_with_the_graph():
    block, _ = pair(save="all")
    x = rows(requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(weakref.ref(t.untyped_storage())) or t, lambda t: t):
        y = block(x)
    own = {t.untyped_storage()._cdata for t in (x, *block.parameters())}
    y.sum().backward()
    gc.collect()
    alive = [ref() for ref in kept if ref() is not None]
    assert all(storage._cdata in own or storage.nbytes() == 5 * 4 * 8 for storage in alive)  # the shared table stays


# --- floating-point operations ---


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
ATTENTION_FLOPS = {  # torch counts these kernels on a GPU only: two products forward, five backward
    FLASH: lambda q, k, *_, **__: 2 * 2 * q[0] * q[1] * q[2] * k[2] * q[3],
    FLASH_BACKWARD: lambda grad, q, k, *_, **__: 5 * 2 * q[0] * q[1] * q[2] * k[2] * q[3],
}


def flops(run):
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as counter:
        run()
    return counter.get_total_flops(), counter.get_flop_counts()["Global"]


def backward_flops(block, x):
    y = block(x)
    return flops(lambda: y.sum().backward())


LARGE = BlockSpec(dim=64, heads=4, kv_heads=2, hidden_dim=176, rope_theta=1e4)


def test_backward_costs_no_more_than_stock_checkpointing_with_early_stop():
    x = torch.randn(2, 64, LARGE.dim, requires_grad=True)
    eager = EagerBlock(LARGE)
    y = torch.utils.checkpoint.checkpoint(eager, x, use_reentrant=False)
    stock, _ = flops(lambda: y.sum().backward())
    ours, by_operator = backward_flops(TransformerBlock(LARGE), x)
    tokens, dim, hidden = 128, LARGE.dim, LARGE.hidden_dim
    projections = 2 * tokens * (dim * dim * 3 + 3 * dim * hidden)  # q, out and half-width k, v; gate, up, down
    assert ours == 3 * projections - 2 * tokens * dim * hidden + by_operator[FLASH] + by_operator[FLASH_BACKWARD]
    assert ours <= stock


def test_nothing_is_run_again_where_all_is_saved_and_no_attention_where_it_is():
    x = torch.randn(2, 64, LARGE.dim, requires_grad=True)
    plain, _ = backward_flops(EagerBlock(LARGE), x)
    everything, _ = backward_flops(TransformerBlock(LARGE, policy=Policy("all")), x)
    without, by_operator = backward_flops(TransformerBlock(LARGE, policy=Policy("attention")), x)
    whole, whole_by_operator = backward_flops(TransformerBlock(LARGE), x)
    assert everything == plain
    assert FLASH not in by_operator
    assert whole - without == whole_by_operator[FLASH] > 0


@pytest.mark.parametrize("trained", ["nothing", "q_proj", "down_proj"])
def test_frozen_weights_cost_no_weight_gradient(trained):
    x = torch.randn(2, 64, LARGE.dim, requires_grad=True)
    block = TransformerBlock(LARGE)
    whole, _ = backward_flops(block, x)
    for name, module in block.named_children():
        module.requires_grad_(name == trained)
    frozen, _ = backward_flops(block, x)
    tokens = 128
    skipped = sum(2 * tokens * m.weight.numel() for n, m in block.named_children() if n.endswith("proj") and n != trained)
    assert whole - frozen == skipped


def test_gradient_of_parameters_alone_skips_what_only_the_input_needs():
    x = torch.randn(2, 64, LARGE.dim)
    block = TransformerBlock(LARGE)
    block.requires_grad_(False)
    block.down_proj.requires_grad_(True)
    only_down, _ = backward_flops(block, x)
    block.requires_grad_(True)
    whole, by_operator = backward_flops(block, x)
    assert FLASH_BACKWARD in by_operator
    recompute = 2 * 128 * (LARGE.dim**2 * 3 + 2 * LARGE.dim * LARGE.hidden_dim)
    # The gradient of down's weight, its hidden gradient (of no use here, but part of the activation's kernel), and the rebuilding.
    assert only_down == recompute + by_operator[FLASH] + 2 * 2 * 128 * LARGE.dim * LARGE.hidden_dim
    assert only_down < whole
