"""The loss of a head without its logits, against PyTorch's cross entropy of all of them."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from ckpt_ext import cross_entropy
from ckpt_ext.functional import linear_cross_entropy
from ckpt_ext.memory import LiveStorages
from ckpt_ext.testing import assert_accurate


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_TILE_BYTES", {"cpu": 4 * 24, "other": 4 * 24})
    monkeypatch.setattr(cross_entropy, "_LEAST_SIDE", 4)


def inputs(tokens=(2, 7), symbols=13, dim=8, dtype=torch.float64, bias=True):
    torch.manual_seed(tokens[-1] * 100 + symbols)
    x, weight, b = torch.randn(*tokens, dim), torch.randn(symbols, dim), torch.randn(symbols)
    target = torch.randint(symbols, tokens)
    target.view(-1)[::3] = -100
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight, b)[: 3 if bias else 2]]
    return (*leaves, *([] if bias else [None])), target


def eager(x, weight, bias, target, *, softcap=None, z_loss=0.0, label_smoothing=0.0, reduction="mean", ignore_index=-100):
    """All logits in memory, as one writes it by hand."""
    logits = F.linear(x, weight, bias).flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows = target.flatten()
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    losses = F.cross_entropy(logits, rows, reduction="none", **options)
    losses = losses + z_loss * torch.where(rows != ignore_index, logits.logsumexp(-1).square(), 0)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (rows != ignore_index).sum()


def with_gradients(loss, tensors):
    torch.manual_seed(1)
    grad = torch.randn_like(loss)
    return [loss.detach(), *torch.autograd.grad(loss, [t for t in tensors if t is not None], grad)]


OPTIONS = [
    {},
    {"reduction": "sum", "label_smoothing": 0.2},
    {"reduction": "none", "softcap": 1.5},
    {"z_loss": 1e-2, "label_smoothing": 0.1, "softcap": 2.0},
    {"ignore_index": 3, "reduction": "none"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("tokens, symbols", [((2, 7), 13), ((1,), 40), ((3, 9), 5), ((4,), 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_loss_of_whole_logits(tokens, symbols, bias, options):
    tensors, target = inputs(tokens, symbols, bias=bias)
    if "ignore_index" in options:
        target = target.clamp_min(0)
    if tokens == (1,):
        target = target.clamp_min(0)
    actual = with_gradients(linear_cross_entropy(tensors[0], tensors[1], target, bias=tensors[2], **options), tensors)
    expected = with_gradients(eager(*tensors, target, **options), tensors)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_as_accurate_as_eager(dtype):
    tensors, target = inputs((2, 17), 33, 16, dtype)
    high = [t.detach().double().requires_grad_() for t in tensors]
    options = {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 1e-3}
    actual = with_gradients(linear_cross_entropy(tensors[0], tensors[1], target, bias=tensors[2], **options), tensors)
    rival = with_gradients(eager(*tensors, target, **options), tensors)
    truth = with_gradients(eager(*high, target, **options), high)
    assert [t.dtype for t in actual] == [torch.float32, dtype, dtype, dtype]
    for a, b, c in zip(actual, rival, truth, strict=True):
        assert_accurate(a, b, c, terms=34)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_that_are_not_needed_cost_nothing(needed):
    tensors, target = inputs()
    expected = with_gradients(eager(*tensors, target), tensors)[1:]
    for index, tensor in enumerate(tensors):
        tensor.requires_grad_(index in needed)
    with FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(tensors[0], tensors[1], target, bias=tensors[2])
        torch.manual_seed(1)
        loss.backward(torch.randn_like(loss))
    for index, tensor in enumerate(tensors):
        if index in needed:
            torch.testing.assert_close(tensor.grad, expected[index], rtol=1e-11, atol=1e-12)
        else:
            assert tensor.grad is None
    products = 2 + sum(index in needed for index in (0, 1))
    assert counter.get_total_flops() == products * 2 * 14 * 13 * 8


def test_logits_are_never_whole(monkeypatch):
    tokens, symbols, dim = 256, 512, 8
    monkeypatch.setattr(cross_entropy, "_TILE_BYTES", {"cpu": 4 * 64 * 64, "other": 0})
    x, weight = (torch.randn(size, dim, requires_grad=True) for size in (tokens, symbols))
    target = torch.randint(symbols, (tokens,))
    memory = LiveStorages([x, weight, target])
    with memory:
        loss = linear_cross_entropy(x, weight, target)
        kept = memory.live
        loss.backward()
    assert kept <= 4 * tokens + 64  # lse and the loss
    assert memory.peak < 4 * tokens * symbols / 2


def test_gradcheck():
    tensors, target = inputs((5,), 7)
    assert torch.autograd.gradcheck(
        lambda x, w, b: linear_cross_entropy(x, w, target, bias=b, label_smoothing=0.1, softcap=2.0, z_loss=0.01), tensors
    )


def test_large_logits_do_not_overflow():
    x, weight = torch.tensor([[1000.0, 0.0]], requires_grad=True), torch.eye(2).repeat(3, 1)[:5].requires_grad_()
    target = torch.tensor([1])
    loss = linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(loss, F.cross_entropy(x @ weight.T, target))
    loss.backward()
    assert x.grad.isfinite().all() and weight.grad.isfinite().all()


def test_symbols_that_cannot_be_and_losses_too_large_to_square():
    (x, weight, _), target = inputs(symbols=13)
    bias = torch.zeros(13, dtype=x.dtype)
    bias[:8] = -torch.inf  # two tiles of symbols
    target = torch.where(target >= 0, target.clamp_min(8), target)
    actual = with_gradients(linear_cross_entropy(x, weight, target, bias=bias), (x, weight))
    expected = with_gradients(eager(x, weight, bias, target), (x, weight))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    (x, weight, _), target = inputs(dtype=torch.float32)
    huge = x.detach() * 1e20
    expected = F.cross_entropy((huge @ weight.T).flatten(0, 1), target.flatten())
    torch.testing.assert_close(linear_cross_entropy(huge, weight, target), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_targets_of_any_integers(dtype):
    (x, weight, _), target = inputs()
    target = target.clamp_min(0)
    assert torch.equal(linear_cross_entropy(x, weight, target.to(dtype)), linear_cross_entropy(x, weight, target))


def test_only_ignored_tokens():
    tensors, target = inputs()
    target = torch.full_like(target, -100)
    assert linear_cross_entropy(*tensors[:2], target, reduction="sum") == 0
    assert linear_cross_entropy(*tensors[:2], target).isnan()  # as torch has it
    assert not any(t.any() for t in with_gradients(linear_cross_entropy(*tensors[:2], target, reduction="sum"), tensors[:2]))


def test_refusals():
    (x, weight, bias), target = inputs()
    cases = [
        ((x, weight[:, 1:], target), {}, r"weight must have shape \[V, 8\], got \[13, 7\]"),
        ((x, weight, target[:1]), {}, r"target must be integers of shape \[2, 7\], got torch.int64 \[1, 7\]"),
        ((x, weight, target.double()), {}, "target must be integers"),
        ((x, weight, target), {"bias": bias[1:]}, r"bias must have shape \[13\], got \[12\]"),
        ((x, weight, target), {"reduction": "max"}, "reduction must be one of 'mean', 'sum', 'none', got 'max'"),
        ((x, weight, target), {"label_smoothing": 1.5}, "label_smoothing must be a probability"),
        ((x, weight, target), {"softcap": 0.0}, "softcap must be between 1e-30 and 1e30, got 0.0"),
        ((x, weight, target), {"z_loss": float("inf")}, "z_loss must be a finite number"),
        ((x, weight, target), {"ignore_index": None}, "ignore_index must be an int, got None"),
        ((x, weight, target.tolist()), {}, "target must be a Tensor"),
        ((x, weight, target.to(torch.complex64)), {}, "target must be integers"),
        ((x, weight.to("meta"), target), {}, "weight must be on x's device cpu, got meta"),
        ((x, weight, target.to("meta")), {}, "target must be on x's device cpu, got meta"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(*arguments, **options)
    for wrong in (13, -1):
        with pytest.raises(RuntimeError, match=r"target must be ignore_index=-100 or in \[0, 13\)"):
            linear_cross_entropy(x, weight, target.clone().fill_(wrong))
    with pytest.raises(RuntimeError, match="double backward"):
        (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, target), x, create_graph=True)
        grad.sum().backward()
