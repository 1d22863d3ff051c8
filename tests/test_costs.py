"""Counted costs of blocks against chains that really run, the Triton launchers' allocations, transformers' layers, and FLOPs by hand."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ckpt_ext
from ckpt_ext import BlockSpec, Policy, TransformerBlock, rope
from ckpt_ext.costs import POLICIES, BlockCosts, Rates, block_costs, shared_bytes, visible_pairs
from ckpt_ext.shapes import from_config
from ckpt_ext.stock import stock_bytes
from ckpt_ext.tracing import fake_tensors, trace

BATCH, LENGTH, DIM = 2, 100, 32
SPECS = [
    BlockSpec(dim=DIM, heads=4, kv_heads=2, hidden_dim=128, rope_theta=1e4),
    BlockSpec(dim=DIM, heads=2, kv_heads=2, hidden_dim=40, rope_theta=1e4, head_dim=8, qk_norm="head"),
    BlockSpec(dim=DIM, heads=8, kv_heads=2, hidden_dim=200, rope_theta=1e4, activation="gelu", norm="layer", mlp_bias=True),
    BlockSpec(dim=DIM, heads=4, kv_heads=4, hidden_dim=64, rope_theta=1e4, head_dim=16, window=33),
]
DROPPING = [replace(spec, residual_dropout=0.1, mlp_dropout=0.1) for spec in SPECS]


def chain_peak(chain: list[BlockCosts], policies: list[Policy]) -> int:
    peak = saved = 0
    gradients = sum(block.gradients for block in chain)
    for block, policy in zip(chain, policies, strict=True):
        cost = block.options[policy]
        gradients -= block.gradients
        peak = max(peak, saved + max(cost.forward, cost.backward + gradients))
        saved += cost.saved
    return peak


def real_peak(specs, policies, trained):
    blocks = [TransformerBlock(spec, policy=policy).requires_grad_(trained) for spec, policy in zip(specs, policies, strict=True)]
    shared = [t for spec in specs for t in rope.table(spec, LENGTH, torch.float32, torch.device("cpu")) if t is not None]
    ignored = [*shared, *(p for block in blocks for p in block.parameters())]
    return max(trace(torch.nn.Sequential(*blocks), (BATCH, LENGTH, DIM), torch.float32, "cpu", ignored))


@pytest.mark.parametrize("specs, saves, trained", [
    (SPECS, "input", True), (SPECS, "input all attention input", True), (SPECS, "all input input attention", False),
    (DROPPING[:2], "attention all", True),
], ids=["input", "mixed", "mixed, frozen", "dropout"])
def test_a_chain_of_unequal_blocks_takes_what_its_costs_say(specs, saves, trained):
    names = saves.split()
    policies = [Policy(names[index % len(names)], slices=2) for index in range(len(specs))]
    options = {policy: None for policy in policies}
    costs = [block_costs(spec, BATCH, LENGTH, dtype=torch.float32, trained=trained, policies=options) for spec in specs]
    real = real_peak(specs, policies, trained)
    assert real <= chain_peak(costs, policies) <= 1.03 * real


@pytest.mark.parametrize("save", ["input", "attention", "all"])
@pytest.mark.parametrize("spec", [*SPECS[:3], DROPPING[0], replace(SPECS[0], sinks=True, softcap=20.0, window=8)], ids=range(5))
def test_meta_tensors_take_what_the_triton_backend_allocates(monkeypatch, spec, save):
    """Its launchers run, and launch nothing: the interpreter would keep the operands of its last kernels."""
    pytest.importorskip("triton")
    length, policy = 96, Policy(save, slices=2)
    block = TransformerBlock(spec, policy=policy, backend="triton")
    for path in (Path(ckpt_ext.__file__).parent / "kernels").glob("*.py"):
        module = importlib.import_module(f"ckpt_ext.kernels.{path.stem}")
        if path.stem != "launch" and hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    table = [t for t in rope.table(spec, length, torch.float32, torch.device("cpu")) if t is not None]
    real = trace(block, (1, length, DIM), torch.float32, "cpu", [*block.parameters(), *table])
    cost = block_costs(spec, 1, length, dtype=torch.float32, policies=[policy], device="cuda").options[policy]
    assert cost.saved == real.saved
    for counted, measured in zip(cost[1:3], real[1:], strict=True):
        # The sums of norms are made by fewer programs here than on a GPU.
        assert measured <= counted <= 1.05 * measured


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", ["plain", "torch checkpoint"])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_stock_blocks_take_what_transformers_layers_do(model, kind, trained):
    transformers = pytest.importorskip("transformers")
    length, dtype = 512, torch.bfloat16
    config = transformers.AutoConfig.for_model(
        model, hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_hidden_layers=1,
        vocab_size=8, attn_implementation="sdpa",
    )  # fmt: skip
    spec = from_config(config.to_dict(), model).layers[0]
    with fake_tensors():
        decoder = transformers.AutoModel.from_config(config, dtype=dtype).requires_grad_(trained)
        positions = torch.arange(length)[None]
        table = decoder.rotary_emb(torch.empty(1, length, 256, dtype=dtype), positions)

        def layer(x):
            return decoder.layers[0](x, position_embeddings=table, attention_mask=None, position_ids=positions)

        def checkpointed(x):
            return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)

        run = layer if kind == "plain" else checkpointed
        theirs = trace(run, (1, length, 256), dtype, "cpu", [*decoder.parameters(), *table, positions])
    ours = stock_bytes(spec, 1, length, kind, dtype, trained=trained)
    assert ours.saved == pytest.approx(theirs.saved, rel=0.02)
    assert ours.backward == pytest.approx(theirs.backward, rel=0.02)


def test_adapters_keep_what_their_gradients_are_made_of():
    frozen = stock_bytes(SPECS[0], 1, 512, "plain", trained=False)
    adapted = stock_bytes(SPECS[0], 1, 512, "plain", trained=False, rank=2)
    # What the linear layers take in: two normed rows and the hidden layer (attention's output is saved anyhow); and their two-wide outputs.
    assert adapted.saved - frozen.saved == 512 * 2 * (2 * DIM + 128 + 7 * 2)
    assert stock_bytes(SPECS[0], 1, 512, "torch checkpoint", trained=False, rank=2).saved == 512 * 2 * DIM


def test_forward_and_backward_have_a_peak_of_their_own():
    found = trace(lambda x: (torch.zeros(1000) + x.sum()).sum() * 2, (10, 10), torch.float32, "cpu", [])
    assert found.forward >= 8000 and found.backward < 1000


def test_saved_bytes_are_those_of_the_policies():
    costs = block_costs(SPECS[0], BATCH, LENGTH, dtype=torch.float32, device="cuda")
    row = BATCH * LENGTH * 4
    assert costs.input == row * DIM
    assert costs.gradients == 4 * sum(p.numel() for p in TransformerBlock(SPECS[0]).parameters())
    assert costs.options[Policy("input")].saved == row * DIM
    assert costs.options[Policy("attention")].saved == row * (2 * DIM + 4)
    assert costs.options[Policy("input", offload=True)].saved == 0
    assert costs.options[Policy("input", offload=True)].backward == costs.options[Policy("input")].backward + row * DIM
    assert set(costs.options) == set(POLICIES)
    # The log-sum-exp stays in float32.
    assert block_costs(SPECS[0], BATCH, LENGTH, device="cuda").options[Policy("attention")].saved == row // 4 * (2 * DIM * 2 + 4 * 4)
    assert shared_bytes(SPECS, LENGTH) == LENGTH * 4 * (8 + 4 + 16)
    assert block_costs(SPECS[0], 1, 8, trained=False).gradients == 0


def test_seconds_are_flops_over_a_rate():
    spec, tokens = SPECS[0], BATCH * LENGTH
    product = 2 * tokens * (2 * DIM * DIM + 2 * DIM * 16 + 3 * DIM * 128)
    pair = 2 * BATCH * DIM * (LENGTH * (LENGTH + 1) // 2)
    costs = block_costs(spec, BATCH, LENGTH, rates=Rates(flops=1.0, host=1e30), device="cuda")
    assert costs.forward_seconds == product + 2 * pair
    assert costs.options[Policy("all")].seconds == 3 * product + 9 * pair
    # All but the down projection is made again.
    assert costs.options[Policy("input")].seconds == 4 * product - 2 * tokens * DIM * 128 + 11 * pair
    assert costs.options[Policy("attention")].seconds == costs.options[Policy("input")].seconds - 2 * pair
    assert costs.options[Policy("input", offload=True)].seconds == costs.options[Policy("input")].seconds
    slow = block_costs(spec, BATCH, LENGTH, rates=Rates(flops=1e30, host=2.0), device="cuda")
    assert slow.options[Policy("input", offload=True)].seconds == pytest.approx(2 * costs.input / 2)
    frozen = block_costs(spec, BATCH, LENGTH, rates=Rates(flops=1.0), trained=False, device="cuda")
    assert frozen.options[Policy("all")].seconds == 2 * product + 9 * pair


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_visible_pairs_by_hand(causal, window):
    spec = BlockSpec(dim=8, heads=1, hidden_dim=8, causal=causal, window=window)
    bound = window or 99
    seen = sum(abs(q - k) < bound and (k <= q or not causal) for q in range(11) for k in range(11))
    assert visible_pairs(spec, 11) == seen


def test_a_small_block_can_be_timed_and_a_large_one_not():
    costs = block_costs(SPECS[0], 1, 16, dtype=torch.float32, policies=[Policy()], timed=True)
    assert 0 < costs.forward_seconds < costs.options[Policy()].seconds < 10
    with pytest.raises(ValueError, match="timed must be False where"):
        block_costs(BlockSpec(dim=4096, heads=32, hidden_dim=14336), 1, 32768, policies=[Policy()], device="cuda", timed=True)


def test_refusals():
    with pytest.raises(ValueError, match="length must be a positive int, got 0"):
        block_costs(SPECS[0], 1, 0)
    with pytest.raises(ValueError, match="device must be one of 'cpu', 'cuda', got 'tpu'"):
        block_costs(SPECS[0], 1, 8, device="tpu")
    with pytest.raises(ValueError, match="kind must be one of 'plain'"):
        stock_bytes(SPECS[0], 1, 8, "fast")
