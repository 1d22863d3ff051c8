"""CUDA graphs: no host reads of what is on the device, in whatever a step is made of. On a CPU a mode refuses what a capture would."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt_ext
from ckpt_ext import BlockSpec, Policy, TransformerBlock, attention_mask, extension, functional, rng, verify_models
from ckpt_ext.kernels.launch import INTERPRETED
from ckpt_ext.testing import captured

DROPS = {"attn_dropout": 0.2, "residual_dropout": 0.3, "mlp_dropout": 0.1}
TINY = BlockSpec(dim=32, heads=2, kv_heads=1, hidden_dim=40, rope_theta=1e4, **DROPS)
LARGE = BlockSpec(dim=512, heads=8, kv_heads=2, hidden_dim=1408, rope_theta=1e4, **DROPS)
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU, and Triton without its interpreter"),
    pytest.mark.skipif(not extension.status().cuda, reason="needs the extension's CUDA part"),
]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten._unique2.default,
}


class NoReads(TorchDispatchMode):
    """Refuses operators that on a GPU would wait for it, to read values or to learn a shape."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            raise AssertionError(f"{func} reads a tensor's values")
        return func(*args, **(kwargs or {}))


def block_step(device, policy=None, spec=None, mask=None, **options):
    spec = spec or (TINY if device == "cpu" else LARGE)
    torch.manual_seed(3)
    block = TransformerBlock(spec, policy=policy or Policy(), device=device, **options)
    x = torch.randn(2, 18, spec.dim, device=device, requires_grad=True)

    def step():
        y = block(x, mask=mask)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])]

    return step


def documents(device):
    ids = torch.tensor([[0] * 7 + [1] * 11, [0] * 12 + [1] * 6], device=device)
    return block_step(device, mask=attention_mask(segment_ids=ids))


def padding(device):
    keep = torch.ones(2, 18, dtype=torch.bool, device=device)
    keep[1, 13:] = False
    return block_step(device, mask=attention_mask(key_mask=keep))


def segments(device):
    spec = TINY if device == "cpu" else LARGE
    torch.manual_seed(3)
    blocks = nn.ModuleList(TransformerBlock(spec, device=device) for _ in range(3))
    x = torch.randn(2, 18, spec.dim, device=device, requires_grad=True)

    def step():
        y = ckpt_ext.checkpoint_sequential(blocks, x, segments=1)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *blocks.parameters()])]

    return step


def loss(device):
    torch.manual_seed(3)
    x, weight = (torch.randn(rows, 32, device=device, requires_grad=True) for rows in (40, 70))
    target = torch.randint(70, (40,), device=device)
    target[5] = -100

    def step():
        value = functional.linear_cross_entropy(x, weight, target, softcap=5.0, label_smoothing=0.1, z_loss=1e-3)
        return [value.detach(), *torch.autograd.grad(value, [x, weight])]

    return step


def functions(device):
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 4, 12, 16, device=device, requires_grad=True) for _ in range(3))
    x, up = torch.randn(9, 16, device=device, requires_grad=True), torch.randn(16, 16, device=device, requires_grad=True)

    def step():
        a = functional.attention(q, k, v, dropout_p=0.2)
        y = functional.mlp(functional.norm(x, up[0]), None, up, up, activation="gelu", dropout_p=0.1)
        return [a.detach(), y.detach(), *torch.autograd.grad(a.sum() + y.square().sum(), [q, k, v, x, up])]

    return step


def swapped(device):
    pytest.importorskip("transformers", reason="the model is its")
    model, batch = verify_models.load("tiny-llama", batch=2, length=12, layers=2, dtype=torch.float32, seed=0)
    model.config.use_cache = False
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.to(device).train()
    ids = batch["input_ids"].to(device)
    assert len(ckpt_ext.swap(model).swapped) == 2

    def step():
        y = model(input_ids=ids).logits
        return [y.detach(), *torch.autograd.grad(y.square().mean(), list(model.parameters()))]

    return step


STEPS = {
    "input": block_step,
    "attention": lambda device: block_step(device, Policy("attention")),
    "all": lambda device: block_step(device, Policy("all")),
    "slices": lambda device: block_step(device, Policy("input", slices=3)),
    "documents": documents,
    "padding": padding,
    "segments": segments,
    "loss": loss,
    "functions": functions,
    "swapped": swapped,
}


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_a_step_reads_nothing(make, monkeypatch):
    if make is swapped:  # the model's own code looks at positions and masks, but not while a stream is captured
        pytest.importorskip("transformers", reason="the model is its")
        monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)
    step = make("cpu")
    step()  # tables are made, and masks are looked at, once
    with NoReads():
        step()


@pytest.mark.parametrize("save", ["input", "all"])
def test_a_step_by_triton_reads_nothing(save):
    step = block_step("cpu", Policy(save), backend="triton")
    step()
    with NoReads():
        step()


def test_a_read_is_seen():
    with NoReads(), pytest.raises(AssertionError, match="reads a tensor's values"):
        rng.reserve("cpu")[1].item()


@devices
@pytest.mark.parametrize("name", ["documents", "padding", "segments", "loss", "functions", "swapped"])
def test_a_graph_replays_as_eager(name, device):
    step = STEPS[name](device)
    static, replay = captured(step, device)
    for seed in (0, 1):
        torch.manual_seed(seed)
        expected = step()
        torch.manual_seed(seed)
        replay()
        assert all(map(torch.equal, static, expected))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU, and Triton without its interpreter")
def test_graphed_callables():
    spec = BlockSpec(dim=512, heads=8, kv_heads=2, hidden_dim=1408, rope_theta=1e4)
    block = TransformerBlock(spec, device="cuda")
    x = torch.randn(2, 300, 512, device="cuda", requires_grad=True)
    wanted = [x, *block.parameters()]
    expected = torch.autograd.grad(block(x).square().sum(), wanted)
    graphed = torch.cuda.make_graphed_callables(block, (torch.randn_like(x, requires_grad=True),))
    actual = torch.autograd.grad(graphed(x).square().sum(), wanted)
    assert all(map(torch.equal, actual, expected))
