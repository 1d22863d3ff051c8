import json
import math

import pytest
import torch

import ckpt_ext
from ckpt_ext import Policy, rng, verify_models
from ckpt_ext.cli import main
from ckpt_ext.integrations import layer as swapped_layer
from ckpt_ext.integrations.family import Family
from ckpt_ext.verification import verify
from ckpt_ext.verify_run import default_loss

pytest.importorskip("transformers", reason="the models are its")


def model_and_batch(kind, dtype=torch.float32, batch=2, length=24):
    return verify_models.load(f"tiny-{kind}", batch=batch, length=length, layers=2, dtype=dtype, seed=0)


def failed(found):
    return {verdict.claim for verdict in found.verdicts if verdict.ok is False}


GRADIENTS = "gradients are as near to the truth as the original's"
OUTPUTS = "outputs and loss are as near to the truth as the original's"
REPLAY = "in training, dropout's replay gives the bits of a run that keeps everything"
SAME = "the same parameters get gradients"
HOOKS = "each gradient is handed over as often"
GENERATORS = "random generators end in the same state"


@pytest.mark.parametrize("kind", verify_models.TINY)
def test_every_tiny_model_passes(kind):
    found = verify(*model_and_batch(kind), memory=False)
    assert found.ok and len(found.swap.swapped) == 2, str(found)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_right_swap_passes(kind):
    model, batch = model_and_batch(kind)
    found = verify(model, batch)
    assert found.ok, str(found)
    assert found.swap.swapped and not found.swap.refused
    assert found.memory.saved < found.original_memory.saved and found.memory.peak < found.original_memory.peak
    assert {entry.name for entry in found.tensors} >= {"loss", "output['logits']", *dict(model.named_parameters())}
    assert [entry.share for entry in found.tensors] == sorted((entry.share for entry in found.tensors), reverse=True)
    replay = next(verdict for verdict in found.verdicts if verdict.claim == REPLAY)
    assert replay.ok is (True if kind == "gpt2" else None)


@pytest.mark.parametrize("policy", [Policy("attention"), Policy("all"), Policy(slices=3), Policy(offload=True)])
def test_every_policy_passes(policy):
    found = verify(*model_and_batch("gpt2"), policy, memory=False)
    assert found.ok, str(found)
    assert found.memory is None and found.original_memory is None


@pytest.mark.parametrize("truth", ["float32", "original"])
def test_other_truths(truth):
    found = verify(*model_and_batch("llama"), truth=truth, memory=False)
    assert found.ok, str(found)
    assert all(entry.original_error == 0 for entry in found.tensors)


@pytest.mark.parametrize("segments", [1, "auto", (1, 1)])
def test_segments_pass(segments):
    found = verify(*model_and_batch("gpt2"), segments=segments)
    assert found.ok, str(found)


def test_float64_is_held_to_its_own_rounding():
    found = verify(*model_and_batch("llama", torch.float64), memory=False)
    assert found.ok, str(found)
    assert max(entry.error for entry in found.tensors) < 1e-6


def test_it_leaves_everything_as_it_was():
    model, batch = model_and_batch("gpt2")
    ckpt_ext.swap(model, policy=Policy("attention"))
    kinds = [type(module) for module in model.modules()]
    states = [vars(module).get("_ckpt_ext") for module in model.modules()]
    next(model.parameters()).grad = gradient = torch.ones_like(next(model.parameters()))
    model.transformer.h[0].eval()
    before, modes = rng.capture(), [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    verify(model, batch, memory=True)
    assert [type(module) for module in model.modules()] == kinds
    assert [vars(module).get("_ckpt_ext") for module in model.modules()] == states
    assert next(model.parameters()).grad is gradient and (gradient == 1).all()
    assert all(parameter.grad is None for parameter in list(model.parameters())[1:])
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before.generators, rng.capture().generators, strict=True))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.config.use_cache


def test_the_model_is_as_it_was_after_an_error():
    model, batch = model_and_batch("llama")
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="loss"):
        verify(model, batch, loss=lambda output: (_ for _ in ()).throw(ValueError("no loss")))
    assert [type(module) for module in model.modules()] == kinds and model.config.use_cache


# Each of the following plants a mistake, which must be found.


def test_a_dropped_mask_is_found(monkeypatch):
    read = swapped_layer.model_masks.read
    monkeypatch.setattr(swapped_layer.model_masks, "read", lambda *args, **kwargs: read(*args, **kwargs)._replace(mask=None, causal=True))
    found = verify(*model_and_batch("llama"), memory=False)
    assert not found.ok and failed(found) >= {GRADIENTS, OUTPUTS}


@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_that_is_off_by_one_is_found(monkeypatch, change):
    spec = Family.spec

    def moved(self, layer, causal, window, *more):
        return spec(self, layer, causal, window and window + change, *more)

    monkeypatch.setattr(Family, "spec", moved)
    model, batch = model_and_batch("mistral", batch=1)
    del batch["attention_mask"]
    found = verify(model, batch, memory=False)
    assert not found.ok and failed(found) >= {GRADIENTS, OUTPUTS}


def test_a_replay_with_other_masks_is_found(monkeypatch):
    from ckpt_ext import autograd

    differentiate = autograd.differentiate_block

    def other_masks(*arguments):
        *others, shared = arguments
        return differentiate(*others, shared._replace(state=None if shared.state is None else shared.state + 1))

    monkeypatch.setattr(autograd, "differentiate_block", other_masks)
    found = verify(*model_and_batch("gpt2"), memory=False)
    assert not found.ok and failed(found) == {REPLAY}


def test_a_gradient_that_is_lost_is_found(monkeypatch):
    weights = Family.weights

    def frozen(self, layer, spec):
        found = weights(self, layer, spec)
        return found._replace(up=type(found.up)(found.up.weight.detach(), found.up.bias))

    monkeypatch.setattr(Family, "weights", frozen)
    found = verify(*model_and_batch("llama"), memory=False)
    assert not found.ok and failed(found) >= {SAME, GRADIENTS, HOOKS}
    assert math.isinf(found.tensors[0].error) and found.tensors[0].name.endswith("mlp.up_proj.weight")


def test_a_changed_generator_is_found(monkeypatch):
    block = swapped_layer.functional.block

    def drawing(*args, **kwargs):
        torch.rand(1)
        return block(*args, **kwargs)

    monkeypatch.setattr(swapped_layer.functional, "block", drawing)
    found = verify(*model_and_batch("llama"), memory=False)
    assert failed(found) == {GENERATORS}


def test_a_norm_scaled_otherwise_is_found(monkeypatch):
    from dataclasses import replace

    spec = Family.spec
    monkeypatch.setattr(Family, "spec", lambda self, *args: replace(spec(self, *args), norm_offset=1e-3))
    found = verify(*model_and_batch("llama"), memory=False)
    assert failed(found) >= {GRADIENTS, OUTPUTS}


def adapted():
    peft = pytest.importorskip("peft", reason="the adapters are its")
    model, batch = model_and_batch("llama")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config), batch


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about the other library
def test_adapters_pass():
    found = verify(*adapted(), memory=False)
    assert found.ok, str(found)
    assert next(verdict.ok for verdict in found.verdicts if verdict.claim == REPLAY)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_dropped_adapters_are_found(monkeypatch):
    from ckpt_ext.lora import LoRA

    weights = Family.weights

    def base_alone(self, layer, spec):
        parts = weights(self, layer, spec)
        return parts._replace(**{name: part.base for name, part in parts._asdict().items() if isinstance(part, LoRA)})

    monkeypatch.setattr(Family, "weights", base_alone)
    found = verify(*adapted(), memory=False)
    assert failed(found) >= {SAME, GRADIENTS, OUTPUTS}


def test_a_missing_offset_of_a_norm_is_found(monkeypatch):
    from dataclasses import replace

    spec = Family.spec
    monkeypatch.setattr(Family, "spec", lambda self, *args: replace(spec(self, *args), norm_offset=0.0))
    found = verify(*model_and_batch("gemma2"), memory=False)
    assert failed(found) >= {GRADIENTS, OUTPUTS}


def test_padding_is_not_compared():
    model, batch = model_and_batch("llama")
    found = verify(model, batch, memory=False)
    assert found.ok
    # eager attention spreads a token without any key over all of them; blocks, like scaled_dot_product_attention, give zeros.
    model.set_attn_implementation("eager")
    found = verify(model, batch, memory=False)
    assert found.ok, str(found)


def test_nothing_swapped_is_a_failure():
    model, batch = model_and_batch("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    model.model.layers[1].mlp.register_forward_hook(lambda *args: None)
    found = verify(model, batch, memory=False)
    assert failed(found) == {"layers are swapped"}
    assert "mlp" in next(verdict.detail for verdict in found.verdicts if verdict.claim == "layers are swapped")


def test_a_users_loss_and_positional_batch():
    model, batch = model_and_batch("llama")
    found = verify(model, (batch["input_ids"],), loss=lambda output: output.logits.square().mean(), memory=False)
    assert found.ok, str(found)


def test_what_cannot_be_differentiated_is_refused():
    model, batch = model_and_batch("llama")
    with pytest.raises(ValueError, match="pass loss="):
        default_loss({"ids": batch["input_ids"]})
    with pytest.raises(ValueError, match="requires grad"):
        verify(model.requires_grad_(False), {"input_ids": batch["input_ids"]})


# The command.


def run(*arguments):
    return main(["verify", *arguments, "--length", "20"])


def test_the_command_prints_a_table(capsys):
    assert run("tiny-llama", "--segments", "1") == 0
    shown = capsys.readouterr().out
    assert "layers are swapped" in shown and "model.layers.0.mlp.gate_proj.weight" in shown and "WRONG" not in shown


def test_the_command_says_what_is_wrong(capsys, monkeypatch):
    spec = Family.spec
    monkeypatch.setattr(Family, "spec", lambda self, layer, causal, window, *more: spec(self, layer, causal, window and window - 1, *more))
    assert run("tiny-mistral", "--batch", "1", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and any(not tensor["ok"] for tensor in found["tensors"])


@pytest.mark.parametrize("name", ["nothing-of-this-name", "tiny-nothing", "no_such_module:make", "ckpt_ext:no_such_function"])
def test_the_command_refuses_what_is_no_model(name, capsys):
    assert run(name) == 2
    assert "model must" in capsys.readouterr().err


def test_reports_and_a_directory(tmp_path, capsys):
    model, _ = model_and_batch("llama")
    model.save_pretrained(tmp_path / "model")
    assert run(str(tmp_path / "model"), "--layers", "1", "--out", str(tmp_path / "out")) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["ok"] and found["swapped"] == ["model.layers.0"]
    assert "| model.layers.0.mlp.up_proj.weight |" in (tmp_path / "out" / "report.md").read_text()
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    capsys.readouterr()
    assert run(str(tmp_path / "model"), "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["swapped"]) == 2



def test_a_users_function(monkeypatch, tmp_path):
    (tmp_path / "users_model.py").write_text(
        "from ckpt_ext import verify_models\nimport torch\n"
        "def make():\n    return verify_models.load('tiny-llama', batch=1, length=12, layers=1, dtype=torch.float32, seed=1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run("users_model:make") == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_held_to_its_own_rounding(dtype):
    found = verify(*model_and_batch("llama", dtype, length=8), memory=False)
    assert found.ok, str(found)
    assert max(entry.allowed for entry in found.tensors) < 100 * torch.finfo(dtype).eps
