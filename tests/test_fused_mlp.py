"""Blocks and MLPs whose hidden layer is made in one kernel, which a GPU's shapes decide: here they are told that it pays."""

import pytest
import torch

from ckpt_ext import BlockSpec, EagerBlock, Policy, functional
from ckpt_ext.kernels import tiles
from ckpt_ext.testing import assert_accurate, eager_block, twin

GQA = {"dim": 32, "heads": 4, "kv_heads": 2, "hidden_dim": 44}
DROPOUT = {"attn_dropout": 0.2, "residual_dropout": 0.3, "mlp_dropout": 0.1}
SPECS = {
    "llama": BlockSpec(**GQA, rope_theta=1e4, norm_offset=1.0, **DROPOUT),
    "gpt": BlockSpec(**GQA, norm="layer", activation="gelu", mlp_bias=True, **DROPOUT),
}
spec_cases = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.fixture(autouse=True)
def it_pays(monkeypatch):
    monkeypatch.setattr(tiles, "fused_mlp", lambda *_: True)


def inputs(dtype=torch.float64, length=9):
    torch.manual_seed(5)
    x = torch.randn(2, length, 32, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), torch.randn_like(x).to(dtype)


def results(block, x, grad):
    torch.manual_seed(11)
    y = block(x)
    wanted = {"x": x, **{name: p for name, p in block.named_parameters() if p.requires_grad}}
    return {"y": y.detach(), **dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), grad), strict=True))}


@spec_cases
@pytest.mark.parametrize("slices", [1, 3])
def test_equals_the_reference_in_float64(spec, slices):
    reference = eager_block(spec)
    x, grad = inputs()
    expected = results(reference, x, grad)
    actual = results(twin(reference, policy=Policy(slices=slices), backend="triton"), x, grad)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-11, atol=1e-12, msg=name)


@spec_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_do_not_depend_on_what_is_saved(spec, dtype):
    base = eager_block(spec, dtype)
    x, grad = inputs(dtype, 7)
    runs = [results(twin(base, policy=Policy(save, 2), backend="triton"), x, grad) for save in ("input", "attention", "all")]
    for name in runs[0]:
        assert torch.equal(runs[0][name], runs[1][name]) and torch.equal(runs[0][name], runs[2][name]), name


def test_low_precision_is_as_accurate_as_eager():
    low = eager_block(SPECS["llama"], torch.bfloat16)
    x, grad = inputs(torch.bfloat16)
    truth = results(twin(low, EagerBlock, torch.float64), x.detach().double().requires_grad_(), grad.double())
    rival, actual = results(low, x, grad), results(twin(low, backend="triton"), x, grad)
    for name in truth:
        assert_accurate(actual[name], rival[name], truth[name], terms=low.spec.hidden_dim)


def test_normed_rows_gate_and_up_reach_memory_only_where_they_are_saved(monkeypatch):
    base = eager_block(SPECS["llama"], torch.float32)
    x, grad = inputs(torch.float32)
    calls = []
    for name in ("activation", "activation_backward", "add_norm"):
        monkeypatch.setattr(f"ckpt_ext.backends.triton.{name}", lambda *_, name=name, **__: calls.append(name))
    results(twin(base, backend="triton").requires_grad_(True), x, grad)
    assert calls == []


def test_frozen_weights_and_autocast():
    base = twin(eager_block(SPECS["llama"], torch.float32), backend="triton")
    x, grad = inputs(torch.float32)
    expected = results(base, x, grad)
    base.up_proj.requires_grad_(False)
    base.gate_proj.requires_grad_(False)
    actual = results(base, x, grad)
    assert "up_proj.weight" not in actual and all(torch.equal(actual[name], expected[name]) for name in actual)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = results(base, x, grad)
    for name in mixed:
        assert mixed[name].dtype == torch.float32
        torch.testing.assert_close(mixed[name], actual[name], rtol=0.1, atol=0.2 * actual[name].abs().max().item(), msg=name)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_the_mlp_on_its_own(activation):
    torch.manual_seed(0)
    gated = activation == "swiglu"
    x, w_up, w_down = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5, 12), (20, 12), (7, 20)))
    w_gate = torch.randn(20, 12, dtype=torch.float64, requires_grad=True) if gated else None
    wanted = [t for t in (x, w_gate, w_up, w_down) if t is not None]
    found = []
    for backend in ("triton", "aten"):
        torch.manual_seed(4)
        y = functional.mlp(x, w_gate, w_up, w_down, activation=activation, dropout_p=0.3, backend=backend)
        found.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
