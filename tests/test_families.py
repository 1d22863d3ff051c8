"""Each family of models, swapped, against itself: logits and every gradient in float64, under every kind of mask, and in float32.

Models are made of their configurations. `Float64Throughout` undoes the casts to float32 that they make on their way.
"""

import copy
import functools
import importlib
import warnings
from typing import NamedTuple

import pytest
import torch

import ckpt_ext
from ckpt_ext import Policy
from ckpt_ext.integrations import layer as layers
from ckpt_ext.integrations import parts
from ckpt_ext.integrations.encoders import ENCODERS
from ckpt_ext.testing import assert_accurate
from ckpt_ext.truth import Float64Throughout

transformers = pytest.importorskip("transformers")

LENGTH = 11
TOKENS = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=64)
GROUPED = dict(num_key_value_heads=2, use_cache=False) | SIZES | TOKENS
CAUSAL = transformers.AutoModelForCausalLM


class Case(NamedTuple):
    """A family's model."""

    config: transformers.PreTrainedConfig
    kind: type = CAUSAL
    implementations: tuple[str, ...] = ("sdpa", "eager")
    packs: bool = True
    """Whether positions that start again make documents of a row."""


def rope(**options):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **options}}


def decoder(name, *, implementations=("sdpa", "eager"), packs=True, **options):
    config = getattr(transformers, f"{name}Config")(**GROUPED | options)
    return Case(config, CAUSAL, implementations, packs)


def encoder(name, kind=transformers.AutoModelForMaskedLM, **options):
    config = getattr(transformers, f"{name}Config")(**SIZES | TOKENS | options)
    return Case(config, kind, packs=False)


NO_DROPOUT = dict(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
ENCODER_NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
NEOX = dict(hidden_dropout=0.0, attention_dropout=0.0)
GEMMA = dict(head_dim=16, sliding_window=4, query_pre_attn_scalar=10)
CASES = {
    "llama": decoder("Llama", attention_bias=True, mlp_bias=True),
    "llama-yarn": decoder("Llama", head_dim=12, hidden_act="gelu_new", **rope(rope_type="yarn", factor=4.0)),
    "mistral": decoder("Mistral", sliding_window=4),
    "qwen2": decoder("Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": decoder("Qwen3", head_dim=16),
    "phi3": decoder("Phi3", **NO_DROPOUT, **rope(partial_rotary_factor=0.5)),
    "smollm3": decoder("SmolLM3", no_rope_layers=[1, 0]),
    "gpt2": Case(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False, **NO_DROPOUT, **TOKENS)),
    "gpt2-scaled": Case(transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=40, use_cache=False, activation_function="relu",
        scale_attn_by_inverse_layer_idx=True, **NO_DROPOUT, **TOKENS,
    )),
    "gemma2": decoder("Gemma2", implementations=("eager",), attn_logit_softcapping=2.0, **GEMMA),
    "gemma3": decoder("Gemma3Text", layer_types=["sliding_attention", "full_attention"], **GEMMA),
    "olmo2": decoder("Olmo2"),
    "neox": Case(transformers.GPTNeoXConfig(
        use_parallel_residual=True, use_cache=False, **NEOX, **SIZES, **TOKENS, **rope(partial_rotary_factor=0.5)
    )),
    "neox-serial": Case(transformers.GPTNeoXConfig(
        use_parallel_residual=False, use_cache=False, attention_bias=False, **NEOX, **SIZES, **TOKENS, **rope(partial_rotary_factor=0.25)
    )),
    "bert": encoder("Bert", **ENCODER_NO_DROPOUT),
    "bert-decoder": encoder("Bert", CAUSAL, is_decoder=True, use_cache=False, hidden_act="gelu_pytorch_tanh", **ENCODER_NO_DROPOUT),
    "roberta": encoder("Roberta", **ENCODER_NO_DROPOUT),
}  # fmt: skip
VIT = transformers.ViTConfig(image_size=12, patch_size=4, num_labels=5, qkv_bias=True, **ENCODER_NO_DROPOUT, **{
    name: size for name, size in SIZES.items() if name != "max_position_embeddings"
})  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """For tensors this small threads do little but wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(case, implementation="sdpa", dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = copy.deepcopy(case.config)
    for name, value in options.items():
        setattr(config, name, value)
    model = case.kind.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():  # no weight of a norm is 1 or 0 then, which would hide that it is not used
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype)


def ids(batch, length=LENGTH):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def padded(batch, side):
    """1 where a token is; the last row is whole, as is the first of a batch of one."""
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    for row, padding in zip(mask, (3, 0) if batch > 1 else (4,), strict=True):
        row[slice(0, padding) if side == "left" else slice(LENGTH - padding, None)] = 0
    return mask


def packed(batch):
    """Positions of three documents a row, of other lengths in the second row."""
    rows = [[*range(4), *range(1), *range(6)], [*range(2), *range(6), *range(3)]]
    return torch.tensor(rows[:batch])


def step(model, inputs, valid=None):
    """Logits, at tokens that are no padding, and all gradients."""
    model.zero_grad()
    torch.manual_seed(3)
    logits = model(**inputs).logits
    if valid is not None:
        logits = logits * valid[..., None]
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def swapped_step(model, inputs, valid=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layer that falls back warns
        report = ckpt_ext.swap(model, **options)
        assert len(report.swapped) == 2 and not report.refused, report
        results = step(model, inputs, valid)
    ckpt_ext.unswap(model)
    return results


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    largest = max(t.abs().max() for name, t in expected.items() if name != "logits")
    for name, truth in expected.items():
        # Where terms cancel (keys' biases, which softmax does not see), what is left is of the others' rounding.
        scale = truth.abs().max() if truth.abs().max() > 1e-6 * largest else largest
        assert (actual[name] - truth).abs().max() <= 1e-9 * scale, name


def scenarios(case):
    yield {"input_ids": ids(1)}, None
    for side, batch in (("left", 1), ("left", 2), ("right", 2)):
        mask = padded(batch, side)
        positions = {} if side == "right" or not case.packs else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        yield {"input_ids": ids(batch), "attention_mask": mask, **positions}, mask
    if case.packs:
        yield {"input_ids": ids(2), "position_ids": packed(2)}, None


MODELS = [(name, implementation) for name, case in CASES.items() for implementation in case.implementations]


@pytest.mark.parametrize("name, implementation", MODELS)
def test_logits_and_all_gradients_in_float64(name, implementation):
    case = CASES[name]
    model = make(case, implementation)
    with Float64Throughout():
        for inputs, valid in scenarios(case):
            assert_equal(swapped_step(model, inputs, valid), step(model, inputs, valid))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_vit_in_float64(implementation):
    model = make(Case(VIT, transformers.AutoModelForImageClassification), implementation)
    for batch in (1, 2):
        inputs = {"pixel_values": torch.randn(batch, 3, 12, 12, dtype=torch.float64)}
        with Float64Throughout():
            assert_equal(swapped_step(model, inputs), step(model, inputs))


@pytest.mark.parametrize("name", ["llama", "mistral", "phi3", "gemma3", "neox", "olmo2", "bert", "gpt2"])
def test_triton_under_the_interpreter(name):
    case = CASES[name]
    model = make(case, num_hidden_layers=1) if name not in ("gemma3", "gpt2") else make(case)
    mask = padded(2, "left")
    inputs = {"input_ids": ids(2), "attention_mask": mask}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt_ext.swap(model, backend="triton")
        actual = step(model, inputs, mask)
    ckpt_ext.unswap(model)
    expected = step(model, inputs, mask)
    # Without `Float64Throughout`, which kernels would not pass: the library's float32 is what is left.
    for key, value in expected.items():
        assert (actual[key] - value).abs().max() <= 1e-4 * max(t.abs().max() for t in expected.values()), key


@pytest.mark.parametrize("name", ["llama", "gemma3", "bert"])
def test_float32_is_as_accurate_as_the_original(name):
    case = CASES[name]
    exact, model = make(case), make(case, dtype=torch.float32)
    model.load_state_dict(exact.state_dict())
    exact.load_state_dict(model.state_dict())
    mask = padded(2, "left")
    inputs = {"input_ids": ids(2), "attention_mask": mask}
    with Float64Throughout():
        truth = step(exact, inputs, mask)
    actual, eager = swapped_step(model, inputs, mask), step(model, inputs, mask)
    for key, value in truth.items():
        assert_accurate(actual[key], eager[key], value, terms=SIZES["intermediate_size"])


DROPOUTS = {
    "llama": dict(attention_dropout=0.2), "gpt2": dict(resid_pdrop=0.2, attn_pdrop=0.2),
    "phi3": dict(attention_dropout=0.2, resid_pdrop=0.2),
    "bert": dict(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2), "neox": dict(hidden_dropout=0.2, attention_dropout=0.2),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_replays_and_ends_in_eval(name):
    case = CASES[name]
    model = make(case, dtype=torch.float32, **DROPOUTS[name])
    inputs = {"input_ids": ids(2)}
    runs = [swapped_step(model.train(), inputs, policy=Policy(save)) for save in ("input", "all")]
    assert all(torch.equal(runs[0][key], runs[1][key]) and runs[0][key].isfinite().all() for key in runs[0])
    in_eval, plain = swapped_step(model.eval(), inputs), step(model, inputs)
    for key, value in plain.items():
        assert torch.allclose(in_eval[key], value, rtol=1e-3, atol=1e-4 * plain["logits"].abs().max()), key
    assert not torch.allclose(runs[0]["logits"], plain["logits"], rtol=1e-2)


@pytest.mark.parametrize("name, place, at", [("llama", "attention_dropout", 1.0), ("bert", "hidden_dropout_prob", 1.0)])
def test_a_probability_of_one_leaves_nothing(name, place, at):
    """Each probability reaches its place: at one, the gradients of what it drops are exactly zero, as in the original."""
    model = make(CASES[name], dtype=torch.float32, **{place: at}).train()
    inputs = {"input_ids": ids(2)}
    actual, expected = swapped_step(model, inputs), step(model, inputs)
    zero = {key for key, value in expected.items() if not value.any()}
    assert zero and {key for key, value in actual.items() if not value.any()} == zero


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "gpt2"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "mish"])
def test_activations_are_those_of_the_config_or_refused(name, activation):
    case, key = CASES[name], {"gemma2": "hidden_activation", "gpt2": "activation_function"}.get(name, "hidden_act")
    model = make(case, case.implementations[0], **{key: activation})
    if activation in ("quick_gelu", "mish"):
        report = ckpt_ext.swap(model, fallback="none")
        assert len(report.refused) == 2 and all("must be one of" in reason for reason in report.refused.values())
        return
    inputs = {"input_ids": ids(1)}
    with Float64Throughout():
        assert_equal(swapped_step(model, inputs), step(model, inputs))


@pytest.mark.parametrize("path", [family.path for family in ENCODERS])
def test_kin_are_the_same_layer_under_another_name(path):
    """Layers on their own, one with the table's parameters: same output, same gradients."""
    module_name, _, class_name = path.rpartition(".")
    layer_class = getattr(importlib.import_module(module_name), class_name)
    config_class = next(
        value for name, value in vars(importlib.import_module(module_name)).items()
        if name.endswith("Config") and name != "PreTrainedConfig" and name.lower().startswith(class_name.removesuffix("Layer").lower()[:3])
    )  # fmt: skip
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size")} | ENCODER_NO_DROPOUT
    if not hasattr(config_class(), "intermediate_size"):
        pytest.skip(f"{config_class.__name__} has no sizes of a layer")
    config = config_class(**sizes)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layer = layer_class(config).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)

    def run():
        y = layer(x)
        return y, torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    with Float64Throughout(), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, expected_grads = run()
        assert not ckpt_ext.swap(layer).refused and parts.class_path(layers.original_class(layer)) == path
        actual, grads = run()
    assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(grads, expected_grads, strict=True))


@functools.cache
def kept(name):
    """Bytes saved a layer, less parameters and what layers share, of one and of both layers."""
    model = make(CASES[name], CASES[name].implementations[0], dtype=torch.float32)
    ckpt_ext.swap(model)
    first = next(module for module in model.modules() if layers.STATE in vars(module))
    sizes, known = {}, {p.untyped_storage()._cdata for p in model.parameters()}
    known |= {b.untyped_storage()._cdata for b in model.buffers()}

    def pack(tensor):
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    held = []

    def within(module, args, kwargs):
        held.extend(t for t in (kwargs.get("position_embeddings") or ()))
        hooks.append(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        hooks[-1].__enter__()

    hooks = []
    first.register_forward_pre_hook(within, with_kwargs=True)
    first.register_forward_hook(lambda *_: hooks[-1].__exit__(None, None, None))
    model(input_ids=ids(2))
    known |= {t.untyped_storage()._cdata for t in held}
    return sum(storage.nbytes() for key, storage in sizes.items() if key not in known)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_saves_its_input(name):
    x = 2 * LENGTH * 32 * 4
    assert x <= kept(name) <= x + 64
