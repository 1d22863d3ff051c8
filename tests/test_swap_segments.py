"""Segments within swapped models: fewer inputs kept, the same bits."""

import copy
import pickle

import pytest
import torch

import ckpt_ext
from ckpt_ext import Policy, verify_models
from ckpt_ext.memory import saved_bytes
from ckpt_ext.plan import Plan, PlannedBlock

pytest.importorskip("transformers", reason="the models are its")

LAYERS, BATCH, LENGTH = 5, 2, 16


def model_and_batch(kind="gpt2"):
    model, batch = verify_models.load(f"tiny-{kind}", batch=BATCH, length=LENGTH, layers=LAYERS, dtype=torch.float32, seed=0)
    model.config.use_cache = False
    return model, batch


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    model(**batch).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def kept(model, batch):
    return saved_bytes(lambda: model(**batch).loss, [*model.parameters(), *model.buffers(), *batch.values()])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "bert"])
@pytest.mark.parametrize("segments", [1, 2, (3, 1, 1), "auto"])
def test_the_bits_are_those_without_segments(kind, segments):
    model, batch = model_and_batch(kind)
    ckpt_ext.swap(model)
    expected, without = gradients(model, batch), kept(model, batch)
    report = ckpt_ext.swap(model, segments=segments)
    assert len(report.swapped) == LAYERS
    for _ in range(2):
        found = gradients(model, batch)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    inputs = BATCH * LENGTH * 64 * 4
    fewer = {1: LAYERS - 1, 2: LAYERS - 2, (3, 1, 1): 2}.get(segments)
    spared = without - kept(model, batch)
    assert spared == fewer * inputs if fewer is not None else spared >= 0


def test_a_layer_that_gets_something_else_begins_anew():
    model, batch = model_and_batch()
    model.transformer.h[1].register_forward_hook(lambda module, args, output: output * 1.5)
    ckpt_ext.swap(model)
    expected, without = gradients(model, batch), kept(model, batch)
    ckpt_ext.swap(model, segments=1)
    found = gradients(model, batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Layers 0 and 1, then 2 to 4; the hook keeps its factor alone.
    assert without - kept(model, batch) == 3 * BATCH * LENGTH * 64 * 4


def test_an_output_that_is_changed_in_place_begins_anew():
    model, batch = model_and_batch()
    model.transformer.h[1].register_forward_hook(lambda module, args, output: output.mul_(1.5))
    ckpt_ext.swap(model)
    expected = gradients(model, batch)
    ckpt_ext.swap(model, segments=1)
    found = gradients(model, batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_models_that_take_turns():
    (model, batch), (other, _) = model_and_batch(), model_and_batch()
    expected = gradients(copy.deepcopy(model), batch)
    del expected
    ckpt_ext.swap(model)
    expected = gradients(model, batch)
    for each in (model, other):
        ckpt_ext.swap(each, segments=2)
    other.load_state_dict(model.state_dict())
    model.zero_grad(set_to_none=True)
    other.zero_grad(set_to_none=True)
    losses = []
    for each in (model, other):
        torch.manual_seed(3)
        losses.append(each(**batch).loss)
    for loss in losses:
        loss.backward()
    for each in (model, other):
        assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in each.named_parameters())


def test_frozen_layers_come_before_the_first_segment():
    model, batch = model_and_batch()
    model.transformer.wte.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    for layer in model.transformer.h[:2]:
        layer.requires_grad_(False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    ckpt_ext.swap(model)
    model(**batch).loss.backward()
    torch.manual_seed(3)
    model.zero_grad()
    model(**batch).loss.backward()
    expected = {name: model.get_parameter(name).grad.clone() for name in trained}
    ckpt_ext.swap(model, segments=1)
    model.zero_grad()
    torch.manual_seed(3)
    model(**batch).loss.backward()
    assert all(torch.equal(model.get_parameter(name).grad, expected[name]) for name in trained)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_have_their_segments(make):
    model, batch = model_and_batch()
    ckpt_ext.swap(model, segments=2)
    other = make(model)
    expected = gradients(model, batch)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(other, batch).items())
    assert kept(other, batch) == kept(model, batch)


def planned(policies, lengths):
    blocks = tuple(PlannedBlock(policy, 1, 1, 1, 1, 1.0) for policy in policies)
    return Plan(blocks, tuple(lengths), 10**9, 1, 1)


def test_a_plan_sets_both():
    model, batch = model_and_batch()
    ckpt_ext.swap(model)
    expected = gradients(model, batch)
    policies = [Policy(), Policy(), Policy("attention"), Policy(offload=True), Policy("all")]
    plan = planned(policies, [2, 1, 1, 1])
    ckpt_ext.swap(model, policy=plan)
    assert [layer._ckpt_ext.policy for layer in model.transformer.h] == policies
    found = gradients(model, batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_does_not_fit_is_refused():
    model, _ = model_and_batch()
    for segments in ((2, 2), "all", 0, 2.0):
        with pytest.raises(ValueError, match="segments"):
            ckpt_ext.swap(model, segments=segments)
    with pytest.raises(ValueError, match="plan for the 5 layers"):
        ckpt_ext.swap(model, policy=planned([Policy()] * 4, [4]))
    with pytest.raises(ValueError, match="save='all'"):
        ckpt_ext.swap(model, policy=Policy("all"), segments=2)
    with pytest.raises(ValueError, match="segments must be None where a plan"):
        ckpt_ext.swap(model, policy=planned([Policy()] * 5, [5]), segments=1)
    blocks = torch.nn.Sequential(ckpt_ext.TransformerBlock(ckpt_ext.BlockSpec(32, 2, 48)))
    with pytest.raises(ValueError, match="checkpoint_sequential"):
        ckpt_ext.swap(blocks, segments=1)
    assert all("_ckpt_ext" not in vars(module) for module in model.modules())
