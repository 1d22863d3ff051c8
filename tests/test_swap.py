"""Swapping whole models: what changes is how layers keep and rebuild their activations, and nothing else."""

import copy
import pickle
import sys
import warnings

import pytest
import torch

import ckpt_ext
from ckpt_ext import BlockSpec, Policy, TransformerBlock
from ckpt_ext.integrations import layer as layers

transformers = pytest.importorskip("transformers")

LLAMA = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    max_position_embeddings=32, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
GPT2 = transformers.GPT2Config(
    vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
BERT = transformers.BertConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=32,
    is_decoder=True, use_cache=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0, eos_token_id=2,
)  # fmt: skip
CONFIGS = {"llama": LLAMA, "gpt2": GPT2, "bert": BERT}


@pytest.fixture(autouse=True)
def one_thread():
    """For tensors this small threads do little but wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def model(request):
    return make(request.param)


def make(config, seed=0, **arguments):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), **arguments)


def ids(batch=2, length=9):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def step(model, **arguments):
    """Logits and all gradients."""
    model.zero_grad()
    out = model(input_ids=ids(), **arguments)
    out.logits.square().mean().backward()
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def equal(a, b):
    return len(a) == len(b) and all(torch.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in zip(a, b, strict=True))


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


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer)]


@pytest.fixture
def blocks_run(monkeypatch):
    """How many blocks have run."""
    count = []
    run = layers.functional.block
    monkeypatch.setattr(layers.functional, "block", lambda *args, **kwargs: count.append(1) or run(*args, **kwargs))
    return count


def test_swapped_layers_are_blocks_with_gradients_and_themselves_without(model, blocks_run):
    before = step(model)
    report = ckpt_ext.swap(model)
    assert len(report.swapped) == 2 and not report.refused and "2 swapped" in str(report)
    assert equal(step(model), before) and len(blocks_run) == 2
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids()).logits, before[0])
    assert len(blocks_run) == 2
    model.requires_grad_(False)
    assert torch.equal(model(input_ids=ids()).logits, before[0]) and len(blocks_run) == 2
    ckpt_ext.unswap(model)
    model.requires_grad_(True)
    assert all(torch.equal(a, b) for a, b in zip(step(model), before, strict=True)) and len(blocks_run) == 2


def test_identity_of_everything_else(model):
    names, parameters, config = list(model.state_dict()), list(model.parameters()), model.config.to_dict()
    kinds, attributes = [type(layer) for layer in layers_of(model)], [set(vars(layer)) for layer in layers_of(model)]
    ckpt_ext.swap(model)
    assert list(model.state_dict()) == names and model.config.to_dict() == config
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for layer, kind in zip(layers_of(model), kinds, strict=True):
        assert isinstance(layer, kind) and type(layer) is not kind
        assert (type(layer).__name__, type(layer).__module__) == (kind.__name__, kind.__module__)
    ckpt_ext.unswap(model)
    assert [type(layer) for layer in layers_of(model)] == kinds
    assert [set(vars(layer)) for layer in layers_of(model)] == attributes


def test_swapping_again_sets_the_policy(model):
    ckpt_ext.swap(model)
    kinds = [type(layer) for layer in layers_of(model)]
    report = ckpt_ext.swap(model, policy=Policy("attention"), backend="aten")
    assert len(report.swapped) == 2 and [type(layer) for layer in layers_of(model)] == kinds
    assert all(getattr(layer, layers.STATE).policy == Policy("attention") for layer in layers_of(model))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_are_swapped_models_of_their_own(model, again, blocks_run):
    ckpt_ext.swap(model)
    expected = step(model)
    other = again(model)
    assert all(a is not b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    blocks_run.clear()
    assert equal(step(other), expected) and len(blocks_run) == 2
    ckpt_ext.unswap(other)
    assert step(other) and len(blocks_run) == 2
    assert step(model) and len(blocks_run) == 4


def test_saved_models_load_as_plain_ones(model, tmp_path):
    ckpt_ext.swap(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(layers.STATE in vars(layer) for layer in layers_of(loaded))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_optimizer_state_survives(model):
    optimizer = torch.optim.AdamW(model.parameters())
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters())
    for swap_before in (False, True):
        if swap_before:
            ckpt_ext.swap(model)
        for each, its in ((model, optimizer), (twin, other)):
            step(each)
            its.step()
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_generate_uses_the_cache_and_agrees(model, blocks_run):
    prompt = ids(1, 4)
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
    ckpt_ext.swap(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True), expected)
    assert not blocks_run


def test_hidden_states_and_hooks_on_layers(model):
    seen = []
    expected = model(input_ids=ids(), output_hidden_states=True).hidden_states
    ckpt_ext.swap(model)
    layers_of(model)[0].register_forward_hook(lambda module, args, output: seen.append(output))
    actual = model(input_ids=ids(), output_hidden_states=True).hidden_states
    assert len(actual) == len(expected) == 3 and equal(actual, expected)
    assert len(seen) == 1 and equal(seen, expected[1:2])
    as_tuple = model(input_ids=ids(), output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple) and equal(as_tuple[-1], expected)
    assert isinstance(seen[0], torch.Tensor) and seen[0].shape == (2, 9, 32)


def test_attention_weights_come_from_the_original_forward(blocks_run):
    model = make(LLAMA, attn_implementation="eager")
    expected = model(input_ids=ids(), output_attentions=True).attentions
    ckpt_ext.swap(model)
    with pytest.warns(UserWarning, match="output_attentions"):
        actual = model(input_ids=ids(), output_attentions=True).attentions
    assert len(actual) == 2 and all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)) and not blocks_run
    model.config.output_attentions = True  # is no argument of the layers then
    ckpt_ext.swap(model)
    with pytest.warns(UserWarning, match="output_attentions"):
        assert len(model(input_ids=ids()).attentions) == 2 and not blocks_run
    model.config.output_attentions = False
    step(model)
    assert len(blocks_run) == 2  # the recorder's hooks stay, and are idle


def test_an_empty_cache_in_training_is_left_alone_with_one_warning(blocks_run):
    model = make(LLAMA)
    before = step(model)
    ckpt_ext.swap(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = step(model, use_cache=True)
        step(model, use_cache=True)
    assert equal(actual, before) and len(blocks_run) == 4
    assert len([w for w in caught if "use_cache=False" in str(w.message)]) == 1


def test_past_keys_are_attended_to(blocks_run):
    model = make(LLAMA)
    name, cache = cached(model)
    expected = model(input_ids=ids(2, 3), use_cache=True, **{name: copy.deepcopy(cache)}).logits
    ckpt_ext.swap(model)
    with pytest.warns(UserWarning, match="past keys"):
        actual = model(input_ids=ids(2, 3), use_cache=True, **{name: cache}).logits
    assert torch.equal(actual, expected) and not blocks_run


def test_the_models_own_checkpointing_does_not_recompute_again(model, blocks_run):
    before = step(model)
    ckpt_ext.swap(model)
    switch_checkpointing(model, True)
    assert equal(step(model), before) and len(blocks_run) == 2
    ckpt_ext.unswap(model)
    assert all(layer.gradient_checkpointing for layer in layers_of(model))
    switch_checkpointing(model, False)
    assert all(torch.equal(a, b) for a, b in zip(step(model), before, strict=True))


def test_classes_made_of_a_swapped_one_do_not_recompute_again(model, blocks_run):
    """As FSDP makes one for each sharded layer; the library wraps the forward of each such class."""
    before = step(model)
    ckpt_ext.swap(model)
    for layer in layers_of(model):
        layer.__class__ = type(f"FSDP{type(layer).__name__}", (type(layer),), {})
    switch_checkpointing(model, True)
    assert equal(step(model.train()), before) and len(blocks_run) == 2


@pytest.mark.parametrize("save", ["input", "attention", "all"])
def test_saved_bytes_are_the_input_and_what_the_policy_adds(save):
    model = make(LLAMA)
    ckpt_ext.swap(model, policy=Policy(save))
    kept, known = {}, {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    x = torch.randn(2, 9, 32, requires_grad=True)
    table = model.model.rotary_emb(x, torch.arange(9)[None])
    known |= {t.untyped_storage()._cdata for t in table}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model.model.layers[0](x, position_embeddings=table)
    saved = sum(storage.nbytes() for key, storage in kept.items() if key not in known)
    assert y.shape == x.shape
    if save == "input":
        assert x.nbytes <= saved <= x.nbytes + 64
    else:
        assert saved > 1.5 * x.nbytes


def test_dropout_is_replayed_whatever_is_kept():
    config = copy.deepcopy(GPT2)
    config.resid_pdrop, config.attn_pdrop, config.embd_pdrop = 0.2, 0.1, 0.1
    model = make(config).train()
    plain = step(model.eval())
    runs = []
    for save in ("input", "all"):
        ckpt_ext.swap(model.train(), policy=Policy(save))
        torch.manual_seed(5)
        runs.append(step(model))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)) and all(t.isfinite().all() for t in runs[0])
    assert not equal(runs[0], plain)
    assert equal(step(model.eval()), plain)


def test_our_own_blocks_take_the_policy():
    model = torch.nn.Sequential(*(TransformerBlock(BlockSpec(dim=16, heads=2, hidden_dim=24)) for _ in range(2)))
    report = ckpt_ext.swap(model, policy=Policy("all"), backend="aten")
    assert report.swapped == ["0", "1"] and all(block.policy.save == "all" for block in model)


def test_a_layer_on_its_own():
    layer = layers_of(make(LLAMA))[0]
    report = ckpt_ext.swap(layer)
    assert report.swapped == [""] and "(the model)" in str(report)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="without any"):
        ckpt_ext.swap(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="fallback must be"):
        ckpt_ext.swap(make(LLAMA), fallback="torch")
    with pytest.raises(ValueError, match="policy must be"):
        ckpt_ext.swap(make(LLAMA), policy="input")
    with pytest.raises(ValueError, match="model must be"):
        ckpt_ext.swap(None)


@pytest.mark.parametrize("version, fits", [("5.16.2", False), ("5.17.0", True), ("5.24.1", True), ("5.25.0.dev0", False), ("4.57.0", 0)])
def test_versions_are_checked(monkeypatch, version, fits):
    model = make(LLAMA)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # which may not be what was imported first
    if fits:
        assert ckpt_ext.swap(model).swapped
    else:
        with pytest.raises(NotImplementedError, match="5.17 to 5.24"):
            ckpt_ext.swap(model)
