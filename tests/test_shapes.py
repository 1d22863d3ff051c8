"""Shapes of models against the models of transformers, built without memory, and against public parameter counts."""

import json

import pytest
import torch

from ckpt_ext import BlockSpec, TransformerBlock
from ckpt_ext.shapes import SHAPES, ModelShape, block_parameters, from_config, linear_shapes, load

TINY = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "vocab_size": 99, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama tied": {"tie_word_embeddings": True, "head_dim": 16},
    "mistral": {"sliding_window": 32},
    "qwen2": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
    "qwen3": {"head_dim": 16, "attention_bias": True},
    "gemma2": {"head_dim": 16, "sliding_window": 24},
    "gemma3_text": {"head_dim": 16, "sliding_window": 24, "sliding_window_pattern": 2},
    "phi3": {"sliding_window": 20},
    "smollm3": {},
    "olmo2": {},
}
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360, "mistral-7b": 7_248_023_552, "gemma-2-9b": 9_241_705_984, "smollm2-135m": 134_515_008,
    "phi-3-mini": 3_821_079_552, "smollm3-3b": 3_075_098_624,
}  # fmt: skip
"""Parameters that the model cards on the Hugging Face hub count."""


def config_of(name):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(name.split()[0], **TINY, **CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_the_parameters_of_transformers_models(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = config_of(name)
    config.save_pretrained(tmp_path)
    shape = load(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layer_parameters == tuple(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
    assert (shape.dim, shape.vocab, shape.max_length, shape.tied) == (48, 99, 512, config.tie_word_embeddings)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma2", "gemma3_text", "phi3"])
def test_windows_are_those_of_the_layers(name, tmp_path):
    config = config_of(name)
    config.save_pretrained(tmp_path)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 4
    expected = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.window for layer in load(tmp_path).layers] == expected and any(expected)


def test_layer_types_need_not_be_written_out():
    kinds = {"gemma2": [9, None, 9, None], "gemma3_text": [9, 9, 9, 9, 9, None]}
    for kind, expected in kinds.items():
        config = {**TINY, "model_type": kind, "sliding_window": 9, "num_hidden_layers": len(expected)}
        assert [layer.window for layer in from_config(config, "x").layers] == expected


def test_what_else_matters_is_read():
    gemma = from_config({**TINY, "model_type": "gemma2", "head_dim": 16}, "x")
    assert (gemma.softcap, gemma.layers[0].softcap, gemma.layers[0].norm_offset, gemma.tied) == (30.0, 50.0, 1.0, True)
    assert gemma.layers[0].activation == "geglu_tanh" and gemma.layers[0].scale == 256**-0.5
    smollm = from_config({**TINY, "model_type": "smollm3"}, "x")
    assert [layer.rope_theta for layer in smollm.layers] == [2e6, 2e6, 2e6, None]
    phi = from_config({**TINY, "model_type": "phi3", "partial_rotary_factor": 0.5, "resid_pdrop": 0.1}, "x")
    assert phi.layers[0].rope_dim == 4 and phi.layers[0].residual_dropout == 0.1
    assert from_config({**TINY, "model_type": "llama", "rope_parameters": {"rope_theta": 7.0}}, "x").layers[0].rope_theta == 7.0


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_models_have_the_parameters_that_their_cards_say(name):
    assert load(name).parameters == PUBLISHED[name]


def test_every_name_can_be_loaded():
    for name in SHAPES:
        assert load(name).name == name and load(name).parameters > 1e8


@pytest.mark.parametrize("spec", [
    BlockSpec(dim=24, heads=6, kv_heads=2, hidden_dim=40),
    BlockSpec(dim=24, heads=6, hidden_dim=40, norm="layer", activation="gelu", qkv_bias=True, out_bias=True, mlp_bias=True),
    BlockSpec(dim=24, heads=6, kv_heads=3, head_dim=10, hidden_dim=40, qk_norm="head", sinks=True, mlp_bias=True),
    BlockSpec(dim=24, heads=6, kv_heads=3, head_dim=10, hidden_dim=40, qk_norm="row", norm="layer"),
])  # fmt: skip
def test_counts_the_parameters_of_a_block(spec):
    block = TransformerBlock(spec, device="meta")
    assert block_parameters(spec) == sum(p.numel() for p in block.parameters())
    assert linear_shapes(spec) == {name: (m.out_features, m.in_features) for name, m in block.named_children() if hasattr(m, "in_features")}


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="one of .*llama-3.1-8b.*, got 'no-such'"):
        load("no-such")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(NotImplementedError, match="'mamba' is not supported, only gemma2, .*qwen3"):
        load(tmp_path)
    with pytest.raises(ValueError, match="must have the entry 'num_attention_heads'"):
        from_config({"model_type": "llama", "hidden_size": 8}, "x")
    with pytest.raises(NotImplementedError, match="'swish42' is not supported"):
        from_config({**TINY, "model_type": "llama", "hidden_act": "swish42"}, "x")
    with pytest.raises(NotImplementedError, match="chunked_attention are not supported"):
        from_config({**TINY, "model_type": "qwen3", "layer_types": ["chunked_attention"] * 4}, "x")
    spec = BlockSpec(dim=8, heads=2, hidden_dim=8)
    with pytest.raises(ValueError, match="layers must not be empty"):
        ModelShape("x", (), 8, False)
    with pytest.raises(ValueError, match="same dim"):
        ModelShape("x", (spec, BlockSpec(dim=16, heads=2, hidden_dim=8)), 8, False)
    with pytest.raises(ValueError, match="vocab must be positive"):
        ModelShape("x", (spec,), 0, False)
