"""The layers of causal language models that can be blocks."""

from typing import Any

from .family import DropoutPlaces, Family
from .linears import Fused

_ROTARY = DropoutPlaces(attention="self_attn.attention_dropout")
_SANDWICH: dict[str, Any] = {
    "placement": "sandwich", "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm",
}  # fmt: skip
"""Where the layers of Gemma have their four norms."""

LLAMA = Family(
    "llama.modeling_llama", "LlamaDecoderLayer", (("self_attn", "LlamaAttention"), ("mlp", "LlamaMLP")),
    norm_class="LlamaRMSNorm", dropout=_ROTARY,
)  # fmt: skip

MISTRAL = Family(
    "mistral.modeling_mistral", "MistralDecoderLayer", (("self_attn", "MistralAttention"), ("mlp", "MistralMLP")),
    norm_class="MistralRMSNorm", dropout=_ROTARY, window="self_attn.config.sliding_window",
)  # fmt: skip

QWEN2 = Family(
    "qwen2.modeling_qwen2", "Qwen2DecoderLayer", (("self_attn", "Qwen2Attention"), ("mlp", "Qwen2MLP")),
    norm_class="Qwen2RMSNorm", dropout=_ROTARY, window="self_attn.sliding_window",
)  # fmt: skip

QWEN3 = Family(
    "qwen3.modeling_qwen3", "Qwen3DecoderLayer", (("self_attn", "Qwen3Attention"), ("mlp", "Qwen3MLP")),
    norm_class="Qwen3RMSNorm", dropout=_ROTARY, window="self_attn.sliding_window",
    qk_norm="head", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm",
)  # fmt: skip

SMOLLM3 = Family(
    "smollm3.modeling_smollm3", "SmolLM3DecoderLayer", (("self_attn", "SmolLM3Attention"), ("mlp", "SmolLM3MLP")),
    norm_class="SmolLM3RMSNorm", dropout=_ROTARY, window="self_attn.sliding_window", rope="self_attn.use_rope",
)  # fmt: skip

PHI3 = Family(
    "phi3.modeling_phi3", "Phi3DecoderLayer", (("self_attn", "Phi3Attention"), ("mlp", "Phi3MLP")),
    norm_class="Phi3RMSNorm", window="self_attn.config.sliding_window",
    qkv=Fused("self_attn.qkv_proj"), gate_up=Fused("mlp.gate_up_proj"), activation="mlp.activation_fn",
    dropout=DropoutPlaces("self_attn.attention_dropout", ("resid_attn_dropout", "resid_mlp_dropout")),
)  # fmt: skip

GPT2 = Family(
    "gpt2.modeling_gpt2", "GPT2Block", (("attn", "GPT2Attention"), ("mlp", "GPT2MLP")),
    attention="attn", norm="layer", attention_norm="ln_1", mlp_norm="ln_2",
    qkv=Fused("attn.c_attn"), out="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj", activation="mlp.act",
    dropout=DropoutPlaces("attn.attn_dropout", ("attn.resid_dropout", "mlp.dropout")), table=None,
)  # fmt: skip

GEMMA2 = Family(
    "gemma2.modeling_gemma2", "Gemma2DecoderLayer", (("self_attn", "Gemma2Attention"), ("mlp", "Gemma2MLP")),
    norm_class="Gemma2RMSNorm", norm_offset=1.0, dropout=_ROTARY, window="self_attn.sliding_window",
    softcap="self_attn.attn_logit_softcapping", **_SANDWICH,
)  # fmt: skip

# Gemma 3 has the attribute of a bound of scores, too, but computes without it.
GEMMA3 = Family(
    "gemma3.modeling_gemma3", "Gemma3DecoderLayer", (("self_attn", "Gemma3Attention"), ("mlp", "Gemma3MLP")),
    norm_class="Gemma3RMSNorm", norm_offset=1.0, dropout=_ROTARY, window="self_attn.sliding_window",
    qk_norm="head", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", **_SANDWICH,
)  # fmt: skip

OLMO2 = Family(
    "olmo2.modeling_olmo2", "Olmo2DecoderLayer", (("self_attn", "Olmo2Attention"), ("mlp", "Olmo2MLP")),
    norm_class="Olmo2RMSNorm", dropout=_ROTARY, placement="branch",
    attention_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm",
    qk_norm="row", q_norm="self_attn.q_norm", k_norm="self_attn.k_norm",
)  # fmt: skip

GPT_NEOX = Family(
    "gpt_neox.modeling_gpt_neox", "GPTNeoXLayer", (("attention", "GPTNeoXAttention"), ("mlp", "GPTNeoXMLP")),
    attention="attention", head_dim="head_size", norm="layer", parallel="use_parallel_residual",
    qkv=Fused("attention.query_key_value", "interleaved"), out="attention.dense",
    up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h", activation="mlp.act",
    dropout=DropoutPlaces("attention.attention_dropout", ("post_attention_dropout", "post_mlp_dropout")),
)  # fmt: skip

DECODERS = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, PHI3, GPT2, GEMMA2, GEMMA3, OLMO2, GPT_NEOX)
