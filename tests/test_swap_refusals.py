"""Layers that are no blocks, from the start or from some call on: refused by name, and right all the same."""

import copy
import warnings

import pytest
import torch

import ckpt_ext
from ckpt_ext.integrations import layer as layers
from ckpt_ext.integrations import model_masks

transformers = pytest.importorskip("transformers")

TOKENS = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, use_cache=False)
LLAMA = transformers.LlamaConfig(**SIZES, **TOKENS)
MIXTRAL = transformers.MixtralConfig(**SIZES, **TOKENS, num_local_experts=2, num_experts_per_tok=1)
T5 = transformers.T5Config(
    d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    dropout_rate=0.2, use_cache=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(config=LLAMA, kind=transformers.AutoModelForCausalLM, implementation="sdpa"):
    torch.manual_seed(0)
    return kind.from_config(copy.deepcopy(config), attn_implementation=implementation)


def ids(length=9):
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(1))


def step(model, **arguments):
    model.zero_grad()
    torch.manual_seed(3)
    logits = model(input_ids=ids(), **arguments).logits
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def identical(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a, b):
    return len(a) == len(b) and all(torch.allclose(x, y, rtol=1e-3, atol=1e-3 * y.abs().max().item()) for x, y in zip(a, b, strict=True))


def switch_checkpointing(model, on):
    """The model's own checkpointing, under the name that its version has for it."""
    verb = "enable" if on else "disable"
    name = f"activation_checkpointing_{verb}" if hasattr(model, "activation_checkpointing_enable") else f"gradient_checkpointing_{verb}"
    getattr(model, name)()


def cached(model):
    """A cache with keys of `ids()`, and the name of the argument that takes it."""
    with torch.no_grad():
        out = model(input_ids=ids(), use_cache=True)
    name = "cache" if "cache" in out else "past_key_values"
    return name, out[name]


def first(model):
    return next(module for module in model.modules() if isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer))


@pytest.fixture
def runs(monkeypatch):
    """Names of what has run: blocks, and layers that were checkpointed."""
    names = []
    for name, owner in (("block", layers.functional), ("checkpoint", layers)):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, name=name, original=original, **k: names.append(name) or original(*a, **k))
    return names


@pytest.mark.parametrize("fallback", ["checkpoint", "none"])
@pytest.mark.parametrize("config, kind", [
    (MIXTRAL, transformers.AutoModelForCausalLM), (T5, transformers.AutoModelForSeq2SeqLM)
], ids=["experts", "t5"])  # fmt: skip
def test_families_without_a_table(config, kind, fallback, runs):
    model = make(config, kind).train()
    more = {"labels": ids()} if kind is transformers.AutoModelForSeq2SeqLM else {}
    before = step(model, **more)
    report = ckpt_ext.swap(model, fallback=fallback)
    assert len(report.refused) == 2 and not report.swapped and all("no table" in reason for reason in report.refused.values())
    assert identical(step(model, **more), before)
    assert runs == (["checkpoint"] * 2 if fallback == "checkpoint" else [])
    ckpt_ext.unswap(model)
    assert identical(step(model, **more), before)


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Quantised(torch.nn.Module):
    """As a quantised layer is: bytes, and scales that do not train."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.detach().abs().amax() / 127
        self.weight = torch.nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).T


def hook_down(model):
    first(model).mlp.down_proj.register_forward_hook(lambda module, args, output: output * 1.5)


def hook_attention(model):
    first(model).self_attn.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)


def patch_forward(model):
    norm = first(model).input_layernorm
    original = norm.forward
    norm.forward = lambda x: original(x) * 1.5


def subclass_linear(model):
    mlp = first(model).mlp
    scaled = Scaled(32, 48, bias=False)
    scaled.load_state_dict(mlp.up_proj.state_dict())
    mlp.up_proj = scaled


def other_norm(model):
    layer = first(model)
    layer.post_attention_layernorm = torch.nn.LayerNorm(32)


def other_epsilon(model):
    first(model).post_attention_layernorm.variance_epsilon = 1e-2


def parametrise(model):
    torch.nn.utils.parametrizations.weight_norm(first(model).self_attn.q_proj)


def other_scores(model):
    first(model).self_attn.config._attn_implementation = "flex_attention"


DEPARTURES = {
    "mlp.down_proj must have no hooks": hook_down, "self_attn must have no hooks": hook_attention,
    "input_layernorm must keep its class's forward": patch_forward, "mlp.up_proj must be exactly Linear, got Scaled": subclass_linear,
    "post_attention_layernorm must be exactly LlamaRMSNorm": other_norm, "post_attention_layernorm must have the epsilon": other_epsilon,
    "self_attn.q_proj must be exactly Linear, got ParametrizedLinear": parametrise,
}  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("reason", DEPARTURES)
def test_departures_from_the_table(reason, when, runs):
    """Known by name, before the swap by the report, after it by a warning; the layer is checkpointed, the other a block."""
    model = make()
    if when == "before":
        DEPARTURES[reason](model)
        report = ckpt_ext.swap(model)
        assert report.swapped == ["model.layers.1"] and reason in report.refused["model.layers.0"]
        actual = step(model)
    else:
        ckpt_ext.swap(model)
        step(model)
        runs.clear()
        DEPARTURES[reason](model)
        with pytest.warns(UserWarning, match=reason):
            actual = step(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once
            step(model)
    assert runs[:2] == ["checkpoint", "block"]
    ckpt_ext.unswap(model)
    assert close(actual, step(model))


def test_a_layer_with_a_forward_of_its_own_stays_as_it_was(runs):
    model = make()
    layer = first(model)
    layer.forward = lambda *args, original=layer.forward, **kwargs: original(*args, **kwargs)
    report = ckpt_ext.swap(model)
    assert "forward of its own" in report.refused["model.layers.0"] and report.swapped == ["model.layers.1"]
    assert step(model) and runs == ["block"]


def test_quantised_linears_are_called(runs, monkeypatch):
    monkeypatch.setattr(Quantised, "__module__", "bitsandbytes.nn.modules")
    model = make()
    for layer in model.model.layers:
        layer.mlp.up_proj, layer.self_attn.q_proj = Quantised(layer.mlp.up_proj), Quantised(layer.self_attn.q_proj)
    before = step(model)
    assert not ckpt_ext.swap(model).refused
    assert close(step(model), before) and runs == ["block"] * 2


def test_arguments_that_a_block_does_not_know(runs):
    model = make()
    layer, x = first(model), torch.randn(2, 9, 32, requires_grad=True)
    table = model.model.rotary_emb(x, torch.arange(9)[None])
    ckpt_ext.swap(model)
    with pytest.warns(UserWarning, match="is_causal"):
        y = layer(x, position_embeddings=table, is_causal=False)
    assert runs == ["checkpoint"]
    ckpt_ext.unswap(model)
    assert torch.equal(y, layer(x, position_embeddings=table, is_causal=False))
    assert not torch.equal(y, layer(x, position_embeddings=table))
    with pytest.raises(TypeError):
        ckpt_ext.swap(model) and layer()


def test_positional_arguments_and_those_that_do_not_matter(runs):
    model = make()
    layer, x = first(model), torch.randn(2, 9, 32, requires_grad=True)
    table = model.model.rotary_emb(x, torch.arange(9)[None])
    ckpt_ext.swap(model)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None].expand(2, 1, 9, 9)
    plain = layer(x, position_embeddings=table)
    assert torch.equal(layer(x, mask, torch.arange(9)[None], None, False, table, num_items_in_batch=3, output_attentions=False), plain)
    assert torch.equal(layer(hidden_states=x, attention_mask=mask, position_embeddings=table), plain)
    assert runs == ["block"] * 3


def biased(mask):
    return mask.float().log().clamp(min=-3.0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_of_other_numbers_run_in_the_original_forward(implementation, runs):
    model = make(implementation=implementation)
    mask = biased(torch.ones(9, 9).tril())[None, None]
    before = step(model, attention_mask=mask)
    ckpt_ext.swap(model)
    with pytest.warns(UserWarning, match="biases"):
        actual = step(model, attention_mask=mask)
    assert identical(actual, before) and runs == ["checkpoint"] * 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_that_are_not_causal_are_read_as_they_are(implementation, runs):
    """A prefix that sees itself whole, as in PrefixLM."""
    model = make(implementation=implementation)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    seen[:4, :4] = True
    mask = seen[None, None].expand(2, 1, 9, 9)
    if implementation == "eager":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    before, causal = step(model, attention_mask=mask), step(model)
    ckpt_ext.swap(model)
    assert close(step(model, attention_mask=mask), before) and runs == ["block"] * 2
    assert not close(before, causal)


def read(mask, **options):
    defaults = dict(implementation="sdpa", causal=True, window=None, batch=mask.size(0), length=mask.size(-1))
    return model_masks.read(mask, None, **defaults | options)


def test_what_masks_are_read_as():
    causal = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    window = causal & ~causal.tril(-3)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2]])
    packed = causal & (documents[:, None, :, None] == documents[:, None, None])
    assert read(causal) == model_masks.Reading(True, None)
    assert read(window, window=3) == model_masks.Reading(True, 3)
    assert read(window).is_dense and read(window).causal
    for mask in (causal & padding[:, None, None], torch.where(causal & padding[:, None, None], 0.0, -torch.inf)):
        reading = read(mask)
        assert (reading.causal, reading.is_dense) == (True, False)
        assert torch.equal(reading.mask.key_segments >= 0, padding)
    reading = read(packed)
    assert reading.mask.dense is None and torch.equal(reading.mask.query_segments, torch.tensor([[0, 0, 0, 1, 1, 2]], dtype=torch.int32))
    assert read(packed & padding[:, None, None]).mask.dense is None
    assert read(~causal, causal=False).is_dense
    everything = torch.ones_like(causal)
    assert read(everything) == model_masks.Reading(False, None, ckpt_ext.AttentionMask(dense=everything), True)
    assert read(everything, causal=False) == model_masks.Reading(False, None)


def test_a_mask_is_read_once_and_forgotten_with_it():
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[0, :, :, 0] = False
    assert read(mask).mask.key_segments is read(mask).mask.key_segments
    mask[0, :, :, 1] = False  # changed in place: read again
    assert read(mask).mask.key_segments[0, 1] == -1
    count = len(model_masks._READ)
    dense = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    assert read(dense).is_dense and len(model_masks._READ) == count + 1
    del mask, dense
    assert len(model_masks._READ) == count - 1


def test_masks_of_flash_attention():
    padding = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    flash = dict(implementation="flash_attention_2", causal=True, window=2, batch=2, length=4)
    reading = model_masks.read(padding, None, **flash)
    assert (reading.causal, reading.window) == (True, 2) and torch.equal(reading.mask.key_segments >= 0, padding.bool())
    assert model_masks.read(None, None, **flash).mask is None
    positions = torch.tensor([[0, 1, 0, 1]])
    assert torch.equal(model_masks.read(None, positions, **flash | {"batch": 1}).mask.key_segments, torch.tensor([[0, 0, 1, 1]]))
    assert model_masks.read(None, torch.arange(4)[None], **flash | {"batch": 1}).mask is None


@pytest.mark.parametrize("mask, options, message", [
    (torch.ones(2, 1, 3, 6), {}, "must have shape"), (torch.ones(2, 6), {}, "must have shape"),
    (torch.ones(2, 1, 6, 6, dtype=torch.long), {}, "bool or floating"), (torch.ones(2, 1, 6, 6), {}, "biases"),
    (torch.ones(2, 1, 6, 6), dict(implementation="flex_attention"), "implementation must be one of"),
    (torch.ones(2, 1, 6, 6), dict(implementation="flash_attention_2"), "for flash attention"),
])  # fmt: skip
def test_masks_that_are_refused(mask, options, message):
    with pytest.raises(NotImplementedError, match=message):
        read(mask, **dict(batch=2, length=6) | options)


def test_no_mask_in_eager_attention_is_no_causality(runs):
    """As in the library: its eager function has no causality of its own."""
    model = make(implementation="eager")
    layer, x = first(model), torch.randn(2, 9, 32, requires_grad=True)
    table = model.model.rotary_emb(x, torch.arange(9)[None])
    expected = layer(x, position_embeddings=table)
    ckpt_ext.swap(model)
    assert torch.allclose(layer(x, position_embeddings=table), expected, atol=1e-5) and runs == ["block"]


def test_a_checkpointed_layer_with_a_cache(runs):
    model = make(MIXTRAL)
    before = step(model)
    ckpt_ext.swap(model)
    with pytest.warns(UserWarning, match="use_cache=False"):
        assert identical(step(model, use_cache=True), before)
    assert runs == ["checkpoint"] * 2
    name, cache = cached(model)
    assert cache.get_seq_length() == 9
    model(input_ids=ids(3), use_cache=True, **{name: cache}).logits.sum().backward()
    assert cache.get_seq_length() == 12 and runs == ["checkpoint"] * 2


def test_a_cache_by_position_is_not_written_twice(runs):
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, activation_function="quick_gelu", **TOKENS)
    model = make(config).eval()
    before = step(model, use_cache=False)
    assert len(ckpt_ext.swap(model).refused) == 2
    with pytest.warns(UserWarning, match="use_cache=False"):
        assert identical(step(model, use_cache=True), before) and runs == ["checkpoint"] * 2
    name, cache = cached(model)
    model(input_ids=ids(3), use_cache=True, **{name: cache}).logits.sum().backward()
    assert cache.get_seq_length() == 12 and runs == ["checkpoint"] * 2


def test_gradients_of_what_routers_record_in_checkpointed_layers(runs):
    """The auxiliary loss of experts is of tensors that leave the layers by hooks."""
    config = copy.deepcopy(MIXTRAL)
    config.output_router_logits, config.router_aux_loss_coef = True, 1.0
    model = make(config)

    def router_grads():
        model.zero_grad()
        model(input_ids=ids(), labels=ids()).aux_loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    before = router_grads()
    ckpt_ext.swap(model)
    assert identical(router_grads(), before) and before and runs == ["checkpoint"] * 2


def test_the_models_own_checkpointing_of_layers_that_stay(runs):
    model = make()
    before = step(model)
    ckpt_ext.swap(model, fallback="none")
    hook_down(model)
    switch_checkpointing(model, True)
    with pytest.warns(UserWarning, match="no hooks"):
        assert not close(step(model), before)
    assert runs == ["checkpoint", "block"]
