"""What a swap must not lose in silence, where nothing of the layer itself has changed: patches, hooks on everything, odd masks."""

import copy
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import ckpt_ext
from ckpt_ext import cli, functional

transformers = pytest.importorskip("transformers")

CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    max_position_embeddings=32, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
MODULE = "transformers.models.llama.modeling_llama"


@pytest.fixture(autouse=True)
def one_thread():
    """For tensors this small threads do little but wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def blocks(monkeypatch):
    """The calls of blocks."""
    calls = []
    block = functional.block
    monkeypatch.setattr(functional, "block", lambda *args, **options: (calls.append(1), block(*args, **options))[1])
    return calls


def make(implementation="sdpa"):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(copy.deepcopy(CONFIG), attn_implementation=implementation).double()


def step(model, **arguments):
    """Logits and all gradients."""
    model.zero_grad()
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, **arguments).logits
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_identical(actual, expected):
    assert len(actual) == len(expected)
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def scaled(function):
    """What somebody puts in the place of a function: another result, by code that is defined elsewhere."""

    def patch(*args, **options):
        result = function(*args, **options)
        return (result[0] * 1.1, *result[1:]) if isinstance(result, tuple) else result * 1.1

    return patch


def patch_class(monkeypatch, name):
    owner = nn.Linear if name == "Linear" else getattr(sys.modules[MODULE], name)
    monkeypatch.setattr(owner, "forward", scaled(owner.forward))


def patch_function(monkeypatch, name):
    monkeypatch.setattr(sys.modules[MODULE], name, scaled(getattr(sys.modules[MODULE], name)))


def patch_implementation(monkeypatch, name):
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._global_mapping, name, scaled(functions[name]))


PATCHES = {
    "LlamaDecoderLayer": patch_class, "LlamaAttention": patch_class, "LlamaMLP": patch_class, "LlamaRMSNorm": patch_class,
    "Linear": patch_class, "apply_rotary_pos_emb": patch_function, "eager_attention_forward": patch_function, "sdpa": patch_implementation,
}  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", PATCHES)
def test_patches_of_the_library_are_not_stepped_around(name, when, monkeypatch, blocks):
    """Sequence parallelism registers its attention under the name that is there; others give classes another forward."""
    model = make("eager" if name.startswith("eager") else "sdpa")
    plain = step(model)
    if when == "before":
        PATCHES[name](monkeypatch, name)
        assert any(name in reason for reason in ckpt_ext.swap(model).refused.values())
        patched = step(model)
    else:
        ckpt_ext.swap(model)
        PATCHES[name](monkeypatch, name)
        with pytest.warns(UserWarning, match=name):
            patched = step(model)
    assert not blocks
    ckpt_ext.unswap(model)
    expected = step(model)
    assert not torch.equal(expected[0], plain[0])
    assert_identical(patched, expected)


REGISTER = {
    "forward": nn.modules.module.register_module_forward_hook,
    "backward": nn.modules.module.register_module_full_backward_hook,
}


@pytest.mark.filterwarnings("ignore:For backward hooks to be called", "ignore:Full backward hook is firing")  # of torch, about the model
@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_on_all_modules_are_not_skipped(kind, blocks):
    model = make()

    def hook(module, given, result):
        if isinstance(module, nn.Linear):
            return result * 1.1 if kind == "forward" else tuple(grad * 1.1 for grad in given)

    handle = REGISTER[kind](hook)
    try:
        expected = step(model)
        ckpt_ext.swap(model)
        with pytest.warns(UserWarning, match=f"on all modules, got {kind}_hooks"):
            assert_identical(step(model), expected)
    finally:
        handle.remove()
    assert not blocks
    step(model)
    assert len(blocks) == 2


def test_hooks_that_only_watch_change_nothing(blocks):
    """PyTorch's counter of operations has hooks on all modules, too; it is to count blocks."""
    model = make()
    ckpt_ext.swap(model)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        step(model)
    assert len(blocks) == 2


def test_a_bool_mask_is_no_mask_to_eager_attention(blocks):
    """Eager attention adds what it is given: of a bool mask, 1 to the scores that others would keep."""
    mask = (torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(2)) < 0.6) | torch.eye(9, dtype=torch.bool)
    model = make("eager")
    expected = step(model, attention_mask=mask)
    ckpt_ext.swap(model)
    with pytest.warns(UserWarning, match="for eager attention, which adds it"):
        assert_identical(step(model, attention_mask=mask), expected)
    assert not blocks


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_learned_bias_of_scores_gets_its_gradient(implementation, blocks):
    """One that starts at zero holds what a mask holds, at first: read as one it would never learn."""
    hidden = ~torch.ones(9, 9, dtype=torch.bool).tril()
    bias = torch.zeros(2, 1, 9, 9, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min).requires_grad_()
    model = make(implementation)
    expected = step(model, attention_mask=bias)
    gradient, bias.grad = bias.grad, None
    ckpt_ext.swap(model)
    with pytest.warns(UserWarning, match="attention_mask must not require grad"):
        assert_identical(step(model, attention_mask=bias), expected)
    assert torch.equal(bias.grad, gradient) and gradient.any() and not blocks


def test_learned_frequencies_get_their_gradient(blocks):
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.frequencies = nn.Parameter(torch.tensor([1.0, 0.5, 0.2, 0.1], dtype=torch.float64))

        def forward(self, x, position_ids):
            angles = (position_ids[..., None] * self.frequencies).repeat(1, 1, 2)
            return angles.cos(), angles.sin()

    model = make()
    model.model.rotary_emb = Learned()
    expected = step(model)
    ckpt_ext.swap(model)
    with pytest.warns(UserWarning, match="position_embeddings must not require grad"):
        assert_identical(step(model), expected)
    assert model.model.rotary_emb.frequencies.grad.any() and not blocks


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about the other library
def test_parametrisations_for_the_time_of_a_call_are_replayed():
    """PEFT's adapters of parameters parametrise the base in each call, which writes to it: its stand-in must be a parameter, too."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.down_proj.weight"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(make(), options)
    expected = step(model)
    assert "got ParamWrapper" in str(ckpt_ext.swap(model))
    for _ in range(2):
        assert_identical(step(model), expected)
    names = [name for name, _ in model.named_buffers()]
    assert not any(name.endswith("weight") for name in names)


def test_two_classes_of_one_name_are_told_apart():
    model = make()
    other = type("Linear", (nn.Linear,), {"__module__": "elsewhere"})
    model.model.layers[0].mlp.up_proj = other(32, 48, bias=False).double()
    assert "got elsewhere.Linear" in str(ckpt_ext.swap(model))


def test_dropout_that_is_lost_is_found(monkeypatch):
    """Eval mode has none, and a run that drops nothing replays itself bit for bit."""
    config = copy.deepcopy(CONFIG)
    config.attention_dropout = 0.2
    model = transformers.LlamaForCausalLM(config).train()
    batch = {"input_ids": torch.arange(3, 12)[None]}
    assert ckpt_ext.verify(model, batch, memory=False).ok
    block = functional.block
    monkeypatch.setattr(functional, "block", lambda x, w, spec, **options: block(x, w, replace(spec, attn_dropout=0.0), **options))
    assert [v.claim for v in ckpt_ext.verify(model, batch, memory=False).verdicts if v.ok is False] == [
        "in training, the same layers draw random numbers"
    ]


@pytest.mark.parametrize("option, message", [
    (("--slices", "x"), "slices must be a number or auto, got x"), (("--length", "0"), "length must be a positive int, got 0"),
    (("--batch", "0"), "batch must be a positive int, got 0"),
])  # fmt: skip
def test_options_of_the_command_are_checked_by_name(option, message, capsys):
    assert cli.main(["verify", "tiny-llama", *option]) == 2
    assert message in " ".join("".join(capsys.readouterr()).split())


def test_what_is_no_model_is_refused_by_name():
    with pytest.raises(ValueError, match="model must be a Module, got 'x'"):
        ckpt_ext.verify("x", {})
