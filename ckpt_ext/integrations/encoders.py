"""The layers of encoders that can be blocks. Kin have the same layer under another name, line by line."""

from .family import DropoutPlaces, Family


def _vit(module: str, prefix: str) -> Family:
    return Family(
        f"{module}.modeling_{module}", f"{prefix}Layer", (("attention", f"{prefix}Attention"), ("mlp", f"{prefix}MLP")),
        attention="attention", norm="layer", attention_norm="layernorm_before", mlp_norm="layernorm_after",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"), out="attention.o_proj",
        up="mlp.fc1", down="mlp.fc2", activation="mlp.activation_fn",
        dropout=DropoutPlaces("attention.attention_dropout", ("dropout",)), table=None,
    )  # fmt: skip


def _bert(module: str, prefix: str, model: str | None = None) -> Family:
    return Family(
        f"{module}.modeling_{model or module}", f"{prefix}Layer",
        (
            ("attention", f"{prefix}Attention"), ("attention.self", f"{prefix}SelfAttention"),
            ("attention.output", f"{prefix}SelfOutput"), ("intermediate", f"{prefix}Intermediate"), ("output", f"{prefix}Output"),
        ),
        attention="attention.self", head_dim="attention_head_size", norm="layer", placement="post",
        attention_norm="attention.output.LayerNorm", mlp_norm="output.LayerNorm",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"), out="attention.output.dense",
        up="intermediate.dense", down="output.dense", activation="intermediate.intermediate_act_fn",
        dropout=DropoutPlaces("attention.self.dropout", ("attention.output.dropout", "output.dropout")), table=None,
    )  # fmt: skip


VIT = _vit("vit", "ViT")
BERT = _bert("bert", "Bert")

ENCODERS = (
    VIT, _vit("audio_spectrogram_transformer", "AST"), _vit("deit", "DeiT"), _vit("ijepa", "IJepa"), _vit("vit_mae", "ViTMAE"),
    _vit("vit_msn", "ViTMSN"), _vit("vivit", "Vivit"),
    BERT, _bert("bert_generation", "BertGeneration"), _bert("camembert", "Camembert"), _bert("data2vec", "Data2VecText", "data2vec_text"),
    _bert("electra", "Electra"), _bert("ernie", "Ernie"), _bert("roberta", "Roberta"), _bert("roc_bert", "RoCBert"),
    _bert("xlm_roberta", "XLMRoberta"),
)  # fmt: skip
