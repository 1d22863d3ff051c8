"""The whole block: against the eager reference in float64 and in lower precision, and against itself under each policy."""

import itertools

import pytest
import torch

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock
from ckpt_ext.testing import assert_accurate, eager_block, twin

SAVES = ("input", "attention", "all")
GQA = {"dim": 32, "heads": 4, "kv_heads": 2, "hidden_dim": 44}
DROPOUT = {"attn_dropout": 0.2, "residual_dropout": 0.3, "mlp_dropout": 0.1}
SPECS = {
    "llama": BlockSpec(**GQA, rope_theta=1e4),
    "llama-dropout": BlockSpec(**GQA, rope_theta=1e4, **DROPOUT),
    "gemma": BlockSpec(**GQA, head_dim=12, rope_theta=1e4, norm_offset=1.0, activation="geglu_tanh"),
    "gpt": BlockSpec(
        **{**GQA, "kv_heads": 4}, norm="layer", activation="gelu", qkv_bias=True, out_bias=True, mlp_bias=True, **DROPOUT
    ),
    "bidirectional-partial-rope": BlockSpec(**GQA, causal=False, rope_theta=1e4, rope_dim=4, activation="relu2"),
}
spec_cases = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
backends = pytest.mark.parametrize("backend", ["aten", "triton"])


def inputs(spec, *, batch=1, length=9, dtype=torch.float64):
    torch.manual_seed(5)
    x = torch.randn(batch, length, spec.dim, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), torch.randn_like(x).to(dtype)


def results(block, x, grad):
    """Output and all gradients, by name; masks as after one seed."""
    torch.manual_seed(11)
    y = block(x)
    wanted = {"x": x, **dict(block.named_parameters())}
    return {"y": y.detach(), **dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), grad), strict=True))}


@spec_cases
@backends
def test_equals_the_reference_in_float64(spec, backend):
    reference = eager_block(spec)
    x, grad = inputs(spec, batch=2)
    expected = results(reference, x, grad)
    actual = results(twin(reference, backend=backend), x, grad)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", [SPECS["llama-dropout"], SPECS["gpt"]], ids=["llama", "gpt"])
@backends
def test_low_precision_is_as_accurate_as_eager(spec, backend, dtype):
    low = eager_block(spec, dtype)
    x, grad = inputs(spec, dtype=dtype)
    truth = results(twin(low, EagerBlock, torch.float64), x.detach().double().requires_grad_(), grad.double())
    rival = results(low, x, grad)
    actual = results(twin(low, backend=backend), x, grad)
    for name in truth:
        assert actual[name].dtype == dtype
        # Without rotary embedding a bias of the keys changes no softmax: its gradient is zero, a sum of terms as large as the queries'.
        cancelling = truth["q_proj.bias"].abs().max().item() if name == "k_proj.bias" else 0.0
        assert_accurate(actual[name], rival[name], truth[name], terms=spec.hidden_dim, magnitude=cancelling)


@spec_cases
@backends
@pytest.mark.parametrize("length", [1, 17])
def test_gradients_do_not_depend_on_what_is_saved(spec, backend, length):
    base = eager_block(spec, torch.float32)
    x, grad = inputs(spec, length=length, dtype=torch.float32)
    runs = {save: results(twin(base, policy=Policy(save), backend=backend), x, grad) for save in SAVES}
    again = results(twin(base, backend=backend), x, grad)
    for name in again:
        for save in SAVES:
            assert torch.equal(runs[save][name], again[name]), (save, name)


@backends
@pytest.mark.parametrize("spec", [SPECS["llama-dropout"], SPECS["gpt"]], ids=["llama", "gpt"])
@pytest.mark.parametrize("slices", [1, 3, 100])
def test_slices_change_no_mask_and_repeat_bit_for_bit(spec, backend, slices):
    reference = eager_block(spec)
    x, grad = inputs(spec, batch=2, length=5)
    expected = results(reference, x, grad)
    runs = [results(twin(reference, policy=Policy(save, slices), backend=backend), x, grad) for save in ("input", "all")]
    for name in expected:
        torch.testing.assert_close(runs[0][name], expected[name], rtol=1e-11, atol=1e-12, msg=name)
        assert torch.equal(runs[0][name], runs[1][name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_slices_in_low_precision_are_as_accurate_as_eager(dtype):
    spec = SPECS["llama-dropout"]
    low = eager_block(spec, dtype)
    x, grad = inputs(spec, batch=2, length=32, dtype=dtype)
    truth = results(twin(low, EagerBlock, torch.float64), x.detach().double().requires_grad_(), grad.double())
    rival = results(low, x, grad)
    actual = results(twin(low, policy=Policy(slices=16), backend="aten"), x, grad)
    for name in truth:
        assert_accurate(actual[name], rival[name], truth[name], terms=64)


@backends
def test_a_chain_of_blocks_replays_each_its_own_masks(backend):
    spec = SPECS["llama-dropout"]
    bases = [eager_block(spec) for _ in range(3)]
    x, grad = inputs(spec, length=5)

    def run(kind, **arguments):
        chain = torch.nn.Sequential(*(twin(base, kind, **arguments) for base in bases))
        return results(chain, x, grad)

    expected = run(EagerBlock)
    for save in SAVES:
        actual = run(TransformerBlock, policy=Policy(save), backend=backend)
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-11, atol=1e-12, msg=name)


def test_masks_differ_between_layers_and_steps_and_repeat_after_reseeding():
    spec = BlockSpec(**GQA, residual_dropout=0.5)
    block = eager_block(spec)
    twin_block = twin(block)
    x, _ = inputs(spec)
    torch.manual_seed(0)
    first, second = twin_block(x), twin_block(x)
    torch.manual_seed(0)
    assert torch.equal(twin_block(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_no_mask_is_drawn_in_eval_or_without_dropout(backend):
    x, _ = inputs(SPECS["llama"])
    with_dropout = twin(eager_block(SPECS["llama-dropout"]), backend=backend)
    without = twin(eager_block(SPECS["llama"]), backend=backend)
    state = torch.get_rng_state()
    y = with_dropout.eval()(x)
    torch.testing.assert_close(y, without.train()(x))
    assert y.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    with_dropout.train()(x)
    assert not torch.equal(torch.get_rng_state(), state)


@backends
def test_dropping_everything_leaves_the_residual_stream(backend):
    spec = BlockSpec(**GQA, residual_dropout=1.0)
    block = twin(eager_block(spec), backend=backend)
    x, grad = inputs(spec)
    actual = results(block, x, grad)
    assert torch.equal(actual["y"], x) and torch.equal(actual["x"], grad)
    assert all(not actual[name].any() for name, _ in block.named_parameters())


@backends
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (1, 1)])
def test_empty_and_single_token_inputs(backend, shape):
    spec = SPECS["llama-dropout"]
    block = twin(eager_block(spec), backend=backend)
    x, grad = inputs(spec, batch=shape[0], length=shape[1])
    for value in results(block, x, grad).values():
        assert value.isfinite().all()


@backends
@pytest.mark.parametrize(
    "layout",
    [lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: torch.cat((x, x), -1)[..., ::2], lambda x: x[:, :1].expand_as(x)],
    ids=["transposed", "strided", "expanded"],
)
def test_inputs_of_any_layout(backend, layout):
    spec = SPECS["llama-dropout"]
    block = twin(eager_block(spec), backend=backend)
    x, grad = inputs(spec, batch=2)
    view = layout(x.detach()).requires_grad_()
    dense = view.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    actual, expected = results(block, view, layout(grad)), results(block, dense, layout(grad).contiguous())
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-13, msg=name)


@backends
def test_gradients_of_sums_slices_and_transposes(backend):
    spec = SPECS["llama"]
    reference = eager_block(spec)
    block = twin(reference, backend=backend)
    x, _ = inputs(spec)
    reductions = [lambda y: y.sum(), lambda y: y[:, ::2].sum(), lambda y: y.transpose(1, 2).square().sum()]
    for reduce in reductions:
        expected, actual = (torch.autograd.grad(reduce(b(x)), [x, *b.parameters()]) for b in (reference, block))
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@backends
@pytest.mark.parametrize("spec", [SPECS["llama"], SPECS["llama-dropout"], SPECS["gpt"]], ids=["llama", "llama-dropout", "gpt"])
def test_gradcheck(spec, backend):
    block = twin(eager_block(spec), backend=backend)
    x, _ = inputs(spec, batch=1, length=5)
    names, parameters = zip(*block.named_parameters(), strict=True)

    def run(x, *tensors):
        torch.manual_seed(1)
        return torch.func.functional_call(block, dict(zip(names, tensors, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


def test_every_combination_of_options_runs_forward_and_backward():
    switches = itertools.product(SAVES, (True, False), (True, False), (0.0, 0.1), (True, False))
    for save, training, grad_mode, p, x_needs_grad in switches:
        spec = BlockSpec(**GQA, attn_dropout=p, residual_dropout=p, mlp_dropout=p)
        block = TransformerBlock(spec, policy=Policy(save)).train(training)
        x = torch.randn(1, 3, spec.dim, requires_grad=x_needs_grad)
        with torch.set_grad_enabled(grad_mode):
            y = block(x)
        assert y.requires_grad == grad_mode
        if grad_mode:
            y.sum().backward()
            assert all(parameter.grad is not None for parameter in block.parameters())
