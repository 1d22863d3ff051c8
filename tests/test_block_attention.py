"""Blocks whose attention is more than causal: window, softcap, sinks, norms of queries and keys, documents, padding, dense masks."""

import pytest
import torch

from ckpt_ext import BlockSpec, EagerBlock, Policy, attention_mask
from ckpt_ext.testing import assert_accurate, eager_block, twin

GQA = {"dim": 32, "heads": 4, "kv_heads": 2, "hidden_dim": 44}
DROPOUT = {"attn_dropout": 0.2, "residual_dropout": 0.3, "mlp_dropout": 0.1}
SPECS = {
    "mistral": BlockSpec(**GQA, rope_theta=1e4, window=3),
    "gemma2": BlockSpec(**GQA, rope_theta=1e4, norm_offset=1.0, activation="geglu_tanh", softcap=2.0, attn_scale=0.4, window=4, **DROPOUT),
    "gpt-oss": BlockSpec(**GQA, rope_theta=1e4, sinks=True, window=4, qkv_bias=True, out_bias=True, **DROPOUT),
    "qwen3": BlockSpec(**GQA, rope_theta=1e4, qk_norm="head"),
    "olmo2": BlockSpec(**GQA, rope_theta=1e4, qk_norm="row", **DROPOUT),
    "bidirectional": BlockSpec(**GQA, causal=False, window=3, norm="layer", qk_norm="head", sinks=True),
}
spec_cases = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
backends = pytest.mark.parametrize("backend", ["aten", "triton"])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, -1], [3, 3, 3, 3, 3, 3, 7, 7, 7]])
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0]]).bool()
MASKS = {
    "documents": attention_mask(segment_ids=DOCUMENTS),
    "padding": attention_mask(key_mask=PADDED),
    "dense": attention_mask(mask=(torch.arange(81).view(1, 1, 9, 9) % 3 > 0)),
    "all": attention_mask(segment_ids=DOCUMENTS, key_mask=PADDED, mask=(torch.arange(4 * 81).view(1, 4, 9, 9) % 5 > 0)),
}


def inputs(dtype=torch.float64, length=9):
    torch.manual_seed(5)
    x = torch.randn(2, length, 32, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), torch.randn_like(x).to(dtype)


def results(block, x, grad, mask=None):
    """Output and all gradients, by name; dropout as after one seed."""
    torch.manual_seed(11)
    y = block(x, mask=mask)
    wanted = {"x": x, **dict(block.named_parameters())}
    return {"y": y.detach(), **dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), grad), strict=True))}


def assert_same(actual, expected):
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-11, atol=1e-12, msg=name)


@spec_cases
@backends
def test_equals_the_reference_in_float64(spec, backend):
    reference = eager_block(spec)
    x, grad = inputs()
    assert_same(results(twin(reference, backend=backend), x, grad), results(reference, x, grad))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", ["mistral", "gemma2", "bidirectional"])
def test_masks_equal_the_reference_in_float64(name, mask):
    reference = eager_block(SPECS[name])
    x, grad = inputs()
    assert_same(results(twin(reference, backend="aten"), x, grad, mask), results(reference, x, grad, mask))


@pytest.mark.parametrize("name", ["documents", "all"])
def test_masks_through_triton_equal_the_reference_in_float64(name):
    reference = eager_block(SPECS["gpt-oss"])
    x, grad = inputs()
    assert_same(results(twin(reference, backend="triton"), x, grad, MASKS[name]), results(reference, x, grad, MASKS[name]))


@spec_cases
@pytest.mark.parametrize("slices", [1, 3])
def test_gradients_do_not_depend_on_what_is_saved(spec, slices):
    base = eager_block(spec, torch.float32)
    x, grad = inputs(torch.float32)
    policies = (Policy(save, slices) for save in ("input", "attention", "all"))
    runs = [results(twin(base, policy=policy, backend="aten"), x, grad, MASKS["all"]) for policy in policies]
    for name in runs[0]:
        assert torch.equal(runs[0][name], runs[1][name]) and torch.equal(runs[0][name], runs[2][name]), name


@pytest.mark.parametrize("name", ["gpt-oss", "olmo2"])
def test_gradients_through_triton_do_not_depend_on_what_is_saved(name):
    base = eager_block(SPECS[name], torch.float32)
    x, grad = inputs(torch.float32)
    runs = [results(twin(base, policy=Policy(save, 2), backend="triton"), x, grad, MASKS["documents"]) for save in ("input", "all")]
    for part in runs[0]:
        assert torch.equal(runs[0][part], runs[1][part]), part


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "qwen3"])
def test_low_precision_is_as_accurate_as_eager(name, dtype):
    low = eager_block(SPECS[name], dtype)
    x, grad = inputs(dtype)
    truth = results(twin(low, EagerBlock, torch.float64), x.detach().double().requires_grad_(), grad.double(), MASKS["documents"])
    rival = results(low, x, grad, MASKS["documents"])
    actual = results(twin(low, backend="aten"), x, grad, MASKS["documents"])
    for part in truth:
        assert_accurate(actual[part], rival[part], truth[part], terms=low.spec.hidden_dim)


@backends
def test_a_packed_row_equals_its_documents_one_by_one(backend):
    """Rotary embedding sees distances only, so positions need not start anew with each document."""
    block = twin(eager_block(BlockSpec(**GQA, rope_theta=1e4, window=3)), backend=backend)
    x, grad = inputs()
    x, grad = x[:1].detach().requires_grad_(), grad[:1]
    bounds = [0, 4, 5, 9]
    packed = results(block, x, grad, attention_mask(cu_seqlens=torch.tensor(bounds), length=9))
    pieces = [results(block, x[:, a:b], grad[:, a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    for name in packed:
        whole = torch.cat([piece[name] for piece in pieces], 1) if name in ("x", "y") else sum(piece[name] for piece in pieces)
        torch.testing.assert_close(packed[name], whole, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch", [1, 2])
def test_padding_on_either_side_changes_nothing_else(side, batch):
    block = twin(eager_block(BlockSpec(**GQA, rope_theta=1e4, sinks=True)))
    x, _ = inputs()
    x = x[:batch].detach()
    padding = torch.full((batch, 2, 32), 7.0, dtype=x.dtype)
    real = slice(2, None) if side == "left" else slice(0, 9)
    padded = torch.cat((padding, x) if side == "left" else (x, padding), 1).requires_grad_()
    key_mask = torch.zeros(batch, 11, dtype=torch.bool)
    key_mask[:, real] = True
    y = block(padded, mask=attention_mask(key_mask=key_mask))
    torch.testing.assert_close(y[:, real], block(x), rtol=1e-10, atol=1e-11)
    y[:, real].sum().backward()
    outside = torch.ones(11, dtype=torch.bool)
    outside[real] = False
    assert padded.grad.isfinite().all() and not padded.grad[:, outside].any()


def test_frozen_parts_get_no_gradient():
    block = twin(eager_block(SPECS["bidirectional"]))
    x, grad = inputs()
    expected = results(block, x, grad)
    for frozen in ("sinks", "q_norm.weight", "k_norm.bias"):
        block.requires_grad_(True)
        block.get_parameter(frozen).requires_grad_(False)
        block.zero_grad()
        block(x).backward(grad)
        assert block.get_parameter(frozen).grad is None
        for name, parameter in block.named_parameters():
            assert name == frozen or torch.equal(parameter.grad, expected[name]), (frozen, name)
