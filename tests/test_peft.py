"""PEFT's adapters in swapped models: what is active in a call takes part in it, and what a block cannot be is refused by name."""

import warnings

import pytest
import torch

import ckpt_ext
from ckpt_ext import Policy
from ckpt_ext.integrations import layer as layers
from ckpt_ext.truth import Float64Throughout

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
TOKENS = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False)
LLAMA = transformers.LlamaConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, attention_bias=True, **TOKENS
)
GPT2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, **TOKENS)
NEOX = transformers.GPTNeoXConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, hidden_dropout=0.0, **TOKENS
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(config=LLAMA, dtype=torch.float64, **options):
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    options = dict(target_modules=TARGETS, r=4, lora_alpha=12, init_lora_weights=False, lora_dropout=0.0) | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GPT-2's transposed layers
        return peft.get_peft_model(base, peft.LoraConfig(**options)).to(dtype)


def ids():
    return torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def step(model, **arguments):
    model.zero_grad()
    torch.manual_seed(3)
    logits = model(input_ids=ids(), **arguments).logits
    logits.square().sum().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    largest = max(t.abs().max() for name, t in expected.items() if name != "logits")
    for name, truth in expected.items():
        scale = truth.abs().max() if truth.abs().max() > 1e-6 * largest else largest
        assert (actual[name] - truth).abs().max() <= 1e-9 * scale, name


def swapped(model, **options):
    report = ckpt_ext.swap(model, **options)
    assert len(report.swapped) == 2 and not report.refused, report
    return model


def compare(model, **arguments):
    """The swapped model against itself, in whatever state its adapters are; silent, so that no layer falls back."""
    with Float64Throughout(), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = step(model, **arguments)
        actual = step(swapped(model), **arguments)
    ckpt_ext.unswap(model)
    assert_equal(actual, expected)
    return expected


@pytest.mark.parametrize("config, options", [
    (LLAMA, {}), (LLAMA, dict(use_rslora=True)), (LLAMA, dict(lora_bias=True, target_modules=["q_proj", "k_proj"])),
    (LLAMA, dict(bias="all")), (GPT2, dict(target_modules=["c_attn", "c_proj", "c_fc"])),
    (NEOX, dict(target_modules=["query_key_value", "dense_4h_to_h"])),
], ids=["plain", "rslora", "bias", "biases-trained", "gpt2-fused", "neox-interleaved"])  # fmt: skip
def test_gradients_of_adapters(config, options):
    expected = compare(make(config, **options))
    assert all(value.any() for name, value in expected.items() if "lora_" in name)
    assert sum("lora_A" in name for name in expected) >= 4


def test_switched_merged_and_several_adapters_after_the_swap():
    model = make()
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=3, lora_alpha=5, init_lora_weights=False))
    model.to(torch.float64)
    twin = make()
    twin.add_adapter("other", peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=3, lora_alpha=5, init_lora_weights=False))
    twin.to(torch.float64).load_state_dict(model.state_dict())
    swapped(model)
    seen = []
    changes = {
        "one": lambda m: None, "other": lambda m: m.set_adapter("other"), "both": lambda m: m.base_model.set_adapter(["default", "other"]),
        "merged": lambda m: m.merge_adapter(), "unmerged": lambda m: m.unmerge_adapter(),
    }  # fmt: skip
    with Float64Throughout(), warnings.catch_warnings():
        for name, change in changes.items():
            warnings.simplefilter("ignore")  # PEFT's, of merging
            change(model), change(twin)
            warnings.simplefilter("error")
            if name == "merged":
                for each in (model, twin):
                    each.get_input_embeddings().requires_grad_(True)
            actual, expected = step(model), step(twin)
            assert_equal(actual, expected)
            seen.append(actual["logits"])
    assert not torch.allclose(seen[0], seen[1]) and not torch.allclose(seen[0], seen[2]) and torch.allclose(seen[3], seen[2])


def test_adapters_that_are_off_are_off_in_backward_too():
    model = make()
    model.get_input_embeddings().requires_grad_(True)

    def off():
        model.zero_grad()
        with model.disable_adapter():
            logits = model(input_ids=ids()).logits
        logits.square().sum().backward()  # adapters are on again
        return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    with Float64Throughout():
        expected = off()
        swapped(model)
        actual = off()
        on = step(model)
    assert_equal(actual, expected)
    assert not any("lora_" in name for name in actual) and not torch.allclose(on["logits"], actual["logits"])


def test_dropout_of_adapters_is_replayed_and_off_in_eval():
    model = make(dtype=torch.float32, lora_dropout=0.5).train()
    runs = [step(swapped(model, policy=Policy(save))) for save in ("input", "all")]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    in_eval = step(model.eval())
    ckpt_ext.unswap(model)
    plain = step(model)
    assert all(torch.allclose(in_eval[name], plain[name], rtol=1e-3, atol=1e-3 * plain[name].abs().max()) for name in plain)
    assert not torch.allclose(runs[0]["logits"], plain["logits"], rtol=1e-2)


@pytest.mark.parametrize("options, why", [
    (dict(use_dora=True), "DoraLinearVariant"), (dict(target_modules=["c_attn"], lora_dropout=0.1), "no dropout"),
], ids=["dora", "dropout-of-fused"])  # fmt: skip
def test_what_is_no_plain_adapter_is_refused_and_checkpointed(options, why):
    config = GPT2 if "target_modules" in options else LLAMA
    model = make(config, dtype=torch.float32, **options)
    expected = step(model)
    report = ckpt_ext.swap(model)
    assert len(report.refused) == 2 and all(why in reason for reason in report.refused.values()) and "checkpoint" in str(report)
    assert all(torch.equal(a, b) for a, b in zip(step(model).values(), expected.values(), strict=True))
    report = ckpt_ext.swap(model, fallback="none")
    assert len(report.refused) == 2 and not any(layers.STATE in vars(module) for module in model.modules())


def test_checkpointed_layers_replay_with_the_adapters_of_their_forward():
    model = make(dtype=torch.float32, use_dora=True)
    model.get_input_embeddings().requires_grad_(True)

    def off():
        model.zero_grad()
        with model.disable_adapter():
            logits = model(input_ids=ids()).logits
        logits.square().sum().backward()
        return model.get_input_embeddings().weight.grad.clone()

    expected = off()
    assert ckpt_ext.swap(model).refused
    assert torch.equal(off(), expected)


def test_adapters_by_row_run_in_the_original_forward():
    model = make(dtype=torch.float32)
    model.add_adapter("other", peft.LoraConfig(target_modules=TARGETS, r=3, init_lora_weights=False))
    rows = ["default", "other"]
    model.eval()  # where PEFT allows it
    expected = step(model, adapter_names=rows)
    swapped(model)
    with pytest.warns(UserWarning, match="adapter_names"):
        actual = step(model, adapter_names=rows)
    assert all(torch.equal(a, b) for a, b in zip(actual.values(), expected.values(), strict=True))


def test_adapters_added_and_taken_away_after_the_swap():
    base = transformers.AutoModelForCausalLM.from_config(LLAMA).to(torch.float64)
    swapped(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of names that transformers is about to drop
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False)).to(torch.float64)
    with Float64Throughout(), warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = step(model)
        ckpt_ext.unswap(model)
        assert_equal(actual, step(model))
        swapped(model)
        merged = model.merge_and_unload()
        actual = step(merged.requires_grad_(True))
        ckpt_ext.unswap(merged)
        assert_equal(actual, step(merged))


def test_a_layer_saves_its_input_and_no_more_with_frozen_weights():
    model = swapped(make(dtype=torch.float32, lora_dropout=0.1).train())
    layer = next(module for module in model.modules() if layers.STATE in vars(module))
    x = torch.randn(2, 9, 32, requires_grad=True)
    table = model.base_model.model.model.rotary_emb(x, torch.arange(9)[None])
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *table)}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, position_embeddings=table)
    assert x.nbytes <= sum(storage.nbytes() for key, storage in kept.items() if key not in known) <= x.nbytes + 64
