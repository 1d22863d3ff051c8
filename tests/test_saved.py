"""The table in `ckpt_ext.autograd` against what autograd saves, byte by byte."""

import re

import pytest
import torch

from ckpt_ext import BlockSpec, Policy, TransformerBlock, attention_mask, autograd

SPECS = {
    "gqa": BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=48, rope_theta=1e4, residual_dropout=0.1),
    "plain-mlp": BlockSpec(dim=32, heads=4, hidden_dim=48, activation="gelu", mlp_dropout=0.1),
    "head-norm": BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=48, qk_norm="head", attn_dropout=0.1),
    "row-norm": BlockSpec(dim=32, heads=4, kv_heads=2, hidden_dim=48, norm="layer", qk_norm="row", attn_dropout=0.1),
    "layer-norm": BlockSpec(dim=24, heads=2, hidden_dim=40, norm="layer", attn_dropout=0.1),
}
SAVES = ("input", "attention", "all")


def table():
    """Rows of the docstring's table: `{tensor: (bytes, {save: verdict})}`."""
    lines = re.search(r"-{40,}\n(.*?)\n\n", autograd.__doc__, re.DOTALL)[1].splitlines()
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines if not line.startswith(" " * 8)]  # others continue the row above
    return {name: (size, dict(zip(SAVES, verdicts, strict=False))) for name, size, *verdicts in rows}


def sizes(spec, itemsize):
    """What the table's formulas give, in bytes a token."""
    attention_width, key_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    norm_rows = {None: 0, "head": spec.heads + spec.kv_heads, "row": 2}[spec.qk_norm]
    return {
        "raw q, k": (attention_width + key_width) * itemsize if spec.qk_norm else 0,
        "qk statistics": norm_rows * (4 if spec.norm == "rms" else 8),
        "x": spec.dim * itemsize,
        "attention out": attention_width * itemsize,
        "log-sum-exp": spec.heads * 4,
        "normed rows, x2": 2 * spec.dim * itemsize,
        "norm statistics": 2 * 4 if spec.norm == "rms" else 4 * 4,
        "q, k, v": (attention_width + 2 * key_width) * itemsize,
        "mid residual": spec.dim * itemsize,
        "gate, up": (2 if spec.gated else 1) * spec.hidden_dim * itemsize,
    }


def saved_storages(block, x):
    """Bytes of the storages that are packed, beyond the parameters and the shared table."""
    shared = {t.untyped_storage()._cdata for t in block.parameters()}
    kept = {}

    def pack(t):
        kept[t.untyped_storage()._cdata] = (t.untyped_storage(), t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(x)
    half = block.spec.rope_dim // 2 if block.spec.rope_theta else None
    return sum(storage.nbytes() for key, (storage, shape) in kept.items() if key not in shared and tuple(shape) != (x.size(1), half))


def test_the_table_names_every_tensor():
    assert set(sizes(SPECS["gqa"], 4)) <= set(table())
    assert {"RNG state", "hidden", "P, scores", "down(hidden)", "parameters", "cos, sin"} <= set(table())


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_is_saved_is_what_the_table_says(spec, save):
    block = TransformerBlock(spec, policy=Policy(save))
    x = torch.randn(3, 7, spec.dim, requires_grad=True)
    rows = table()
    per_token = sum(size for name, size in sizes(spec, 4).items() if rows[name][1][save] == "saved")
    assert rows["RNG state"] == ("16 a block, if dropout is on", dict.fromkeys(SAVES, "saved"))
    assert saved_storages(block, x) == 3 * 7 * per_token + 16


def test_a_stack_saves_an_input_and_a_few_bytes_a_block():
    spec = SPECS["gqa"]
    blocks = [TransformerBlock(spec) for _ in range(8)]
    x = torch.randn(2, 6, spec.dim, requires_grad=True)
    stack = torch.nn.Sequential(*blocks)
    stack.spec = spec
    saved = saved_storages(stack, x)
    inputs = 8 * 2 * 6 * spec.dim * 4
    assert inputs <= saved <= inputs + 8 * 64


def test_a_mask_is_saved_once_for_all_blocks():
    spec = BlockSpec(dim=32, heads=4, hidden_dim=48)
    stack = torch.nn.ModuleList(TransformerBlock(spec) for _ in range(4))
    x = torch.randn(2, 6, spec.dim, requires_grad=True)
    ids = torch.tensor([[0, 0, 1, 1, 2, -1]]).expand(2, 6)
    dense = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    mask = attention_mask(segment_ids=ids, key_mask=ids >= 0, mask=dense)

    def through(y):
        for block in stack:
            y = block(y, mask=mask)

    through.parameters, through.spec = stack.parameters, spec
    of_mask = sum(t.untyped_storage().nbytes() for t in mask)
    assert saved_storages(through, x) == 4 * 2 * 6 * spec.dim * 4 + of_mask


def test_nothing_is_reserved_without_dropout():
    spec = BlockSpec(dim=32, heads=4, hidden_dim=48)
    assert saved_storages(TransformerBlock(spec), torch.randn(1, 4, 32, requires_grad=True)) == 4 * 32 * 4
