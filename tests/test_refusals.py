"""What the public edge refuses, in which words, and children that the engine would step around."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ckpt_ext import AttentionMask, BlockSpec, Policy, TransformerBlock, functional


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def qkv():
    return randn(2, 4, 7, 16), randn(2, 2, 7, 16), randn(2, 2, 7, 16)


def spec(**changes):
    return BlockSpec(**{"dim": 32, "heads": 4, "hidden_dim": 48, **changes})


@pytest.mark.parametrize("changes, message", [
    ({"causal": "no"}, "causal must be a bool, got 'no'"),
    ({"sinks": 2}, "sinks must be a bool, got 2"),
    ({"window": -1}, "window must be a positive int, got -1"),
    ({"softcap": 0.0}, "softcap must be between 1e-30 and 1e30, got 0.0"),
    ({"attn_scale": float("inf")}, "attn_scale must be a finite number, got inf"),
    ({"qk_norm": "all"}, "qk_norm must be one of 'head', 'row', got 'all'"),
    ({"dim": 0}, "dim must be a positive int, got 0"),
    ({"heads": 2.0}, "heads must be a positive int, got 2.0"),
    ({"heads": 5}, "dim must be a multiple of heads=5"),
    ({"kv_heads": 3}, "kv_heads must divide heads=4, got 3"),
    ({"rope_theta": -1.0}, "rope_theta must be positive, got -1.0"),
    ({"rope_theta": 1e4, "rope_dim": 3}, "rope_dim must be even and at most head_dim=8, got 3"),
    ({"rope_theta": 1e4, "rope_dim": 10}, "rope_dim must be even and at most head_dim=8, got 10"),
    ({"norm": "batch"}, "norm must be one of 'rms', 'layer', got 'batch'"),
    ({"norm_eps": -1.0}, "norm_eps must be non-negative, got -1.0"),
    ({"activation": "swish"}, "activation must be one of 'swiglu'.* got 'swish'"),
    ({"attn_dropout": 1.5}, r"attn_dropout must be a probability in \[0, 1\], got 1.5"),
    ({"mlp_dropout": float("nan")}, r"mlp_dropout must be a probability in \[0, 1\], got nan"),
    ({"residual_dropout": -0.1}, r"residual_dropout must be a probability in \[0, 1\], got -0.1"),
])
def test_spec_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_policy_refuses():
    with pytest.raises(ValueError, match="save must be one of 'input', 'attention', 'all', got 'nothing'"):
        Policy("nothing")


@pytest.mark.parametrize("x, message", [
    (torch.zeros(3, 32), r"x must have shape \[B, T, 32\], got \[3, 32\]"),
    (torch.zeros(1, 3, 31), r"x must have shape \[B, T, 32\], got \[1, 3, 31\]"),
    (torch.zeros(1, 3, 32, dtype=torch.int64), "x must be float64, float32, bfloat16 or float16, got torch.int64"),
    (torch.zeros(1, 3, 32, dtype=torch.float8_e4m3fn), "x must be float64, float32, bfloat16 or float16, got torch.float8"),
    (torch.zeros(1, 3, 32, device="meta"), "must be on x's device meta, got cpu"),
])
def test_block_refuses(x, message):
    with pytest.raises(ValueError, match=message):
        TransformerBlock(spec())(x)


def test_dropout_on_a_device_without_generator_is_refused():
    with pytest.raises(NotImplementedError, match="meta"):
        TransformerBlock(spec(residual_dropout=0.1), device="meta")(torch.zeros(1, 3, 32, device="meta"))


def test_attention_refuses():
    q, k, v = qkv()
    cases = [
        ((q[0], k, v), {}, r"q must have shape \[B, H, T, D\]"),
        ((q, k.float(), v), {}, "k must have q's dtype torch.float64, got torch.float32"),
        ((q, k, v[:, :, 1:]), {}, r"v must have k's shape \[2, 2, 7, 16\], got \[2, 2, 6, 16\]"),
        ((q, k[..., 1:], v[..., 1:]), {}, "k must have q's batch and head size 2 and 16"),
        ((q[:, :3], k, v), {}, "k must have a number of heads that divides q's 3, got 2"),
        ((q, k, v), {"scale": -1e300}, "scale must be at most 1e30 in size, got -1e\\+300"),
        ((q, k, v), {"scale": torch.tensor(0.5)}, "scale must be a finite number"),
        ((q, None, v), {}, "k must be a Tensor, got None"),
        ((q, k, v), {"sinks": [0.0]}, r"sinks must be a Tensor, got \[0.0\]"),
        ((q, k, v), {"sinks": q[0, :3, 0, 0]}, r"sinks must have shape \[4\], got \[3\]"),
        ((q, k, v), {"softcap": 1e39}, "softcap must be between 1e-30 and 1e30, got 1e\\+39"),
        ((q, k, v), {"window": 0}, "window must be a positive int, got 0"),
        ((q, k, v), {"mask": "causal"}, "mask must be a Tensor, got 'causal'"),
        ((q, k, v), {"segment_ids": (q, q, q)}, "segment_ids must be a Tensor or a pair of them, got 3"),
        ((q, k, v), {"cu_seqlens": torch.tensor([0, 7])}, "cu_seqlens must come with a batch of one, got 2"),
        ((q, k, v), {"mask": AttentionMask(dense=torch.ones(1, 1, 7, 7))}, "mask's dense must be torch.bool, as attention_mask makes it"),
        ((q, k, v), {"dropout_p": 2.0}, r"dropout_p must be a probability in \[0, 1\], got 2.0"),
        ((q, k, v), {"backend": "cuda"}, "backend must be one of 'auto', 'triton', 'aten', got 'cuda'"),
        ((q, k.to("meta"), v.to("meta")), {}, "k must be on q's device cpu, got meta"),
    ]
    for tensors, options, message in cases:
        with pytest.raises(ValueError, match=message):
            functional.attention(*tensors, **options)


def test_mlp_and_norm_refuse():
    x, w_gate, w_up, w_down = randn(4, 8), randn(20, 8), randn(20, 8), randn(8, 20)
    cases = [
        (lambda: functional.mlp(x, w_gate, w_up, w_down, activation="gelu"), "w_gate must be None for activation 'gelu'"),
        (lambda: functional.mlp(x, None, w_up, w_down), "w_gate must be given for activation 'swiglu'"),
        (lambda: functional.mlp(x, w_gate, w_up, w_down, activation="?"), "activation must be one of"),
        (lambda: functional.mlp(x, w_gate[:, 1:], w_up, w_down), r"w_gate must have shape \[\*, 8\], got \[20, 7\]"),
        (lambda: functional.mlp(x, w_gate[1:], w_up, w_down), r"w_gate must have w_up's shape \[20, 8\], got \[19, 8\]"),
        (lambda: functional.mlp(x, w_gate, w_up, w_down[:, 1:]), r"w_down must have shape \[\*, 20\], got \[8, 19\]"),
        (lambda: functional.mlp(x, w_gate, w_up, w_down, dropout_p=-1), "dropout_p must be a probability"),
        (lambda: functional.norm(x, w_up), r"weight must have shape \[8\], got \[20, 8\]"),
        (lambda: functional.norm(x, x[0], kind="group"), "kind must be one of 'rms', 'layer', got 'group'"),
        (lambda: functional.norm(x.long(), x[0]), "x must be float64"),
        (lambda: functional.norm(x, x[0].to(torch.complex128)), "weight must be float64.* got torch.complex128"),
        (lambda: functional.norm(x, None), "weight must be a Tensor, got None"),
        (lambda: functional.norm(x, x[0], eps="a"), "eps must be a finite number, got 'a'"),
        (lambda: functional.norm(x[:, :0], x[0, :0]), r"x must have at least one element in a row, got shape \[4, 0\]"),
        (lambda: functional.mlp(x, None, w_up.long(), w_down, activation="gelu"), "w_up must be float64.* got torch.int64"),
        (lambda: functional.mlp(x, None, w_up[0, 0], w_down, activation="gelu"), "w_up must be a matrix"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


# --- children that the engine would step around ---


class Doubled(torch.nn.Linear):
    """Stands for any subclass with a forward of its own: an adapter, a quantised or parametrised linear."""

    def forward(self, x):
        return 2 * super().forward(x)


def hooked(block):
    block.up_proj.register_forward_hook(lambda *_: None)


def pre_hooked(block):
    block.q_proj.register_forward_pre_hook(lambda *_: None)


def backward_hooked(block):
    block.mlp_norm.register_full_backward_hook(lambda *_: None)


def replaced(block):
    block.v_proj = Doubled(32, 32)


def parametrized(block):
    torch.nn.utils.parametrizations.weight_norm(block.out_proj)


def patched(block):
    block.down_proj.forward = lambda x: x


def another_norm(block):
    block.mlp_norm = torch.nn.LayerNorm(32)


def another_epsilon(block):
    block.attention_norm.eps = 10.0


def eight_bits(block):
    block.v_proj.to(torch.float8_e4m3fn)


def quantised(block):
    block.k_proj.weight = torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.uint8), requires_grad=False)


@pytest.mark.parametrize("change, name", [
    (hooked, "up_proj"), (pre_hooked, "q_proj"), (backward_hooked, "mlp_norm"), (replaced, "v_proj"), (parametrized, "out_proj"),
    (patched, "down_proj"), (quantised, "k_proj"), (another_norm, "mlp_norm"), (another_epsilon, "attention_norm.eps"),
    (eight_bits, "v_proj"),
])  # fmt: skip
def test_a_child_that_does_more_than_multiply_is_refused_by_name(change, name):
    block = TransformerBlock(spec())
    change(block)
    with pytest.raises(NotImplementedError, match=name):
        block(torch.zeros(1, 3, 32))


def test_hooks_on_all_modules_are_refused_but_for_those_that_watch():
    block, x = TransformerBlock(spec()), torch.randn(1, 3, 32)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output)
    try:
        with pytest.raises(NotImplementedError, match="no hooks must be on all modules, got forward_hooks"):
            block(x)
    finally:
        handle.remove()
    with FlopCounterMode(display=False) as counter:
        block(x)
    assert counter.get_total_flops() > 0


def test_a_weight_of_another_shape_is_refused_by_name():
    block = TransformerBlock(spec())
    block.up_proj.weight = torch.nn.Parameter(torch.zeros(47, 32))
    with pytest.raises(ValueError, match=r"up_proj.weight must have shape \[48, 32\], got \[47, 32\]"):
        block(torch.zeros(1, 3, 32))


@pytest.mark.parametrize("options, message", [
    ({"policy": "input"}, "policy must be a Policy, got 'input'"),
    ({"backend": "cuda"}, "backend must be one of 'auto', 'triton', 'aten', got 'cuda'"),
])
def test_a_block_refuses_what_is_no_policy_or_backend(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerBlock(spec(), **options)
