"""The whole block on a GPU, by Triton: truth, equal bits, CUDA graphs, memory, streams. The same bodies run small on a CPU, by ATen."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ckpt_ext import BlockSpec, EagerBlock, Policy, TransformerBlock, extension
from ckpt_ext.kernels.launch import INTERPRETED
from ckpt_ext.memory import LiveStorages
from ckpt_ext.testing import assert_accurate, captured, eager_block, twin

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SAVES = ("input", "attention", "all")
DROPOUT = {"attn_dropout": 0.2, "residual_dropout": 0.3, "mlp_dropout": 0.1}
TINY = BlockSpec(dim=32, heads=2, kv_heads=1, hidden_dim=40, rope_theta=1e4, **DROPOUT)
LLAMA = BlockSpec(dim=512, heads=8, kv_heads=2, hidden_dim=1408, rope_theta=1e4, **DROPOUT)
WIDE_HEADS = replace(LLAMA, heads=4, kv_heads=4)
GPT = BlockSpec(dim=384, heads=6, hidden_dim=1536, norm="layer", activation="gelu", qkv_bias=True, out_bias=True, mlp_bias=True, **DROPOUT)
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU, and Triton without its interpreter"),
]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])


def length_on(device: str) -> int:
    """More than one tile of rows, and no multiple of one."""
    return 18 if device == "cpu" else 300


def spec_on(device: str) -> BlockSpec:
    return TINY if device == "cpu" else LLAMA


def build(spec, device, dtype=BF16, kind=TransformerBlock, **arguments):
    return twin(eager_block(spec, dtype, device), kind, device=device, **arguments)


def inputs(spec, device, dtype=BF16, batch=2, length=None):
    torch.manual_seed(5)
    x = torch.randn(batch, length or length_on(device), spec.dim, device=device).to(dtype)
    return x.requires_grad_(), torch.randn_like(x)


def results(block, x, grad, seed=11):
    """Output and all gradients, by name; masks as after one seed."""
    torch.manual_seed(seed)
    y = block(x)
    wanted = {"x": x, **dict(block.named_parameters())}
    return {"y": y.detach(), **dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), grad), strict=True))}


@pytest.mark.parametrize(
    "device, spec, dtype",
    [
        ("cpu", TINY, F32),
        *(pytest.param("cuda", LLAMA, dtype, marks=GPU) for dtype in (BF16, F16, F32, F64)),
        *(pytest.param("cuda", spec, BF16, marks=GPU) for spec in (WIDE_HEADS, GPT)),
    ],
)
def test_as_accurate_as_eager(device, spec, dtype):
    block = build(spec, device, dtype)
    eager, exact = (build(spec, device, dtype, EagerBlock).to(wide) for wide in (dtype, F64))
    x, grad = inputs(spec, device, dtype)
    truth = results(exact, x.detach().double().requires_grad_(), grad.double())
    rival = results(eager, x, grad)
    actual = results(block, x, grad)
    for name, exactly in truth.items():
        assert actual[name].dtype == dtype
        # Without rotary embedding a bias of the keys changes no softmax: its gradient is zero, a sum of terms as large as the queries'.
        cancelling = truth["q_proj.bias"].abs().max().item() if name == "k_proj.bias" and spec.rope_theta is None else 0.0
        assert_accurate(actual[name], rival[name], exactly, terms=max(spec.hidden_dim, x.shape[:-1].numel()), magnitude=cancelling)


@devices
@pytest.mark.parametrize("slices", ["auto", 3])
def test_what_is_saved_changes_no_bit(device, slices):
    x, grad = inputs(spec_on(device), device)
    runs = [results(build(spec_on(device), device, policy=Policy(save, slices)), x, grad) for save in SAVES]
    for name, expected in runs[0].items():
        assert all(torch.equal(run[name], expected) for run in runs), name


@pytest.mark.parametrize("device, runs", [("cpu", 2), pytest.param("cuda", 30, marks=GPU)])
def test_same_bits_every_time(device, runs):
    block, (x, grad) = build(spec_on(device), device), inputs(spec_on(device), device)
    first = results(block, x, grad)
    for _ in range(runs - 1):
        again = results(block, x, grad)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=[*GPU, pytest.mark.skipif(not extension.status().cuda, reason="needs the extension's CUDA part")]),
    ],
)
@pytest.mark.parametrize("save", ["input", "all"])
def test_a_graph_replays_with_the_masks_of_the_seed(device, save):
    block, (x, grad) = build(spec_on(device), device, policy=Policy(save)), inputs(spec_on(device), device)

    def step():
        y = block(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *block.parameters()], grad)]

    static, replay = captured(step, device)
    seen = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        expected = step()
        torch.manual_seed(seed)
        replay()
        seen.append([tensor.clone() for tensor in static])
        assert all(map(torch.equal, seen[-1], expected))
    assert not any(map(torch.equal, *seen))
    replay()  # without a new seed, new masks all the same
    assert not any(map(torch.equal, static, seen[-1]))


def peak_of_a_step(run, blocks, x, device) -> int:
    """The most that was alive in a forward and backward pass beyond parameters, their finished gradients and x."""
    for parameter in blocks.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))

    def step():
        y = x
        for block in blocks:
            y = run(block, y)
        y.sum().backward()
        x.grad = None

    step()
    if device == "cpu":
        with LiveStorages() as memory:
            step()
        return memory.peak
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


@devices
def test_less_is_kept_with_each_policy_and_less_than_by_checkpointing(device):
    if device == "cpu":
        spec, length, dtype = replace(TINY, attn_dropout=0.0), 96, F32
    else:
        spec, length, dtype = BlockSpec(dim=1024, heads=8, kv_heads=2, hidden_dim=3584, rope_theta=1e4, **DROPOUT), 8192, BF16
        spec = replace(spec, attn_dropout=0.0)  # eager attention with a mask would hold every weight
    x, _ = inputs(spec, device, dtype, batch=1, length=length)

    def peak(run=lambda block, x: block(x), kind=TransformerBlock, **arguments):
        blocks = torch.nn.ModuleList(build(spec, device, dtype, kind, **arguments) for _ in range(4))
        return peak_of_a_step(run, blocks, x, device)

    peaks = [peak(policy=Policy(save)) for save in SAVES]
    stock = peak(lambda block, x: checkpoint(block, x, use_reentrant=False), EagerBlock)
    assert peaks == sorted(set(peaks)), peaks
    assert peaks[0] < stock


@devices
def test_another_stream_gives_the_same_bits(device):
    spec = spec_on(device)
    block, (x, grad) = build(spec, device), inputs(spec, device)
    expected = results(block, x, grad)
    late = torch.full_like(x, torch.nan)
    stream = torch.cuda.Stream() if device != "cpu" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        if stream is not None:
            torch.cuda._sleep(100_000_000)  # a kernel of another stream would meet the NaN
        with torch.no_grad():
            late.copy_(x)
        actual = results(block, late.requires_grad_(), grad)
    if stream is not None:
        torch.cuda.synchronize()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2 or INTERPRETED, reason="needs two GPUs, and Triton without its interpreter")
@pytest.mark.parametrize("save", SAVES)
def test_a_block_runs_where_its_tensors_are(save):
    assert torch.cuda.current_device() == 0
    block, (x, grad) = build(LLAMA, "cuda:0", policy=Policy(save)), inputs(LLAMA, "cuda:0")
    expected = results(block, x, grad)
    moved = x.detach().to("cuda:1").requires_grad_()
    actual = results(block.to("cuda:1"), moved, grad.to("cuda:1"))
    for name, result in actual.items():
        assert result.device == torch.device("cuda:1")
        assert result.isfinite().all()
        torch.testing.assert_close(result.cpu(), expected[name].cpu(), rtol=2e-2, atol=2e-2)
