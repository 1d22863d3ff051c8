"""The layers of encoders that can be blocks."""

from .family import DropoutPlaces, Family

VIT = Family(
    "vit.modeling_vit", "ViTLayer", (("attention", "ViTAttention"), ("mlp", "ViTMLP")),
    attention="attention", norm="layer", attention_norm="layernorm_before", mlp_norm="layernorm_after",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"), out="attention.o_proj",
    up="mlp.fc1", down="mlp.fc2", activation="mlp.activation_fn",
    dropout=DropoutPlaces("attention.attention_dropout", ("dropout",)), table=None,
)  # fmt: skip

ENCODERS = (VIT,)
