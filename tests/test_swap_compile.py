"""Swapped models within torch.compile: one graph, the gradients of eager."""

import pytest
import torch

import ckpt_ext
from ckpt_ext import verify_models

pytest.importorskip("transformers", reason="the models are its")
# Of the compiler's own, about what it traces; as in the tests of compiled blocks.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def gradients(function, model, batch):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    function(**batch).logits.square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def swapped(kind, length=12, **options):
    model, batch = verify_models.load(f"tiny-{kind}", batch=2, length=length, layers=2, dtype=torch.float32, seed=0)
    model.config.use_cache = False
    del batch["labels"]
    ckpt_ext.swap(model, **options)
    return model, batch


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_one_graph_gives_the_gradients_of_eager(kind):
    model, batch = swapped(kind)
    expected = gradients(model, model, batch)
    torch._dynamo.reset()
    found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), model, batch)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-6 * gradient.abs().max().item() + 1e-9)


def test_segments_fall_away():
    model, batch = swapped("llama", segments=1)
    expected = gradients(model, model, batch)
    torch._dynamo.reset()
    found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), model, batch)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-6 * gradient.abs().max().item() + 1e-9)


def test_a_mask_of_numbers_is_not_taken_on_trust():
    model, batch = swapped("llama")
    model.set_attn_implementation("eager")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), model, batch)
