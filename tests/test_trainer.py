import copy

import pytest
import torch

import ckpt_ext
from ckpt_ext import Policy, text

transformers = pytest.importorskip("transformers", reason="its Trainer is what is tested")

STEPS, LENGTH = 20, 24
# Of the libraries' own, under filterwarnings = error.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def model(kind="llama"):
    torch.manual_seed(0)
    shared = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=256, use_cache=False)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared, num_key_value_heads=2))
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=256, use_cache=False)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0))


def windows(count=2 * STEPS):
    return text.batches(text.read(), 1, count, LENGTH, 0)[0, :, :LENGTH]


def dataset():
    import datasets

    ids = windows().tolist()
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})


def losses(trainer):
    """Of every step, unrounded."""
    found = []
    trainer.model.register_forward_hook(lambda module, args, output: found.append(output.loss.item()))
    trainer.train()
    return found


def arguments(kind, folder, **more):
    return kind(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        bf16=False, save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=3, dataloader_pin_memory=False, **more,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_has_the_same_losses(kind, checkpointing, tmp_path):
    original = model(kind)
    found = {}
    for name in ("original", "swapped"):
        callback = ckpt_ext.SwapCallback(Policy("input"))
        options = arguments(transformers.TrainingArguments, tmp_path, gradient_checkpointing=checkpointing and name == "swapped")
        callbacks = [callback] if name == "swapped" else []
        trainer = transformers.Trainer(copy.deepcopy(original), options, train_dataset=dataset(), callbacks=callbacks)
        found[name] = losses(trainer)
        if name == "swapped":
            assert callback.report is not None and len(callback.report.swapped) == 2
    assert len(found["original"]) == STEPS and found["original"][-1] < found["original"][0] - 0.5
    assert found["swapped"] == pytest.approx(found["original"], abs=1e-5)


def test_a_callback_that_comes_late_swaps_too(tmp_path):
    trainer = transformers.Trainer(model(), arguments(transformers.TrainingArguments, tmp_path), train_dataset=dataset())
    callback = ckpt_ext.SwapCallback()
    trainer.add_callback(callback)
    trainer.args.max_steps = 1
    trainer.train()
    assert callback.report is not None and len(callback.report.swapped) == 2


def test_what_a_trainer_saves_is_the_original_model(tmp_path):
    original = model()
    options = arguments(transformers.TrainingArguments, tmp_path)
    trainer = transformers.Trainer(copy.deepcopy(original), options, train_dataset=dataset(), callbacks=[ckpt_ext.SwapCallback()])
    trainer.save_model(str(tmp_path / "saved"))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(loaded.model.layers[0]) is type(original.model.layers[0])
    for name, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def plain_loop(trained):
    """The recipe for a script: swap, then train as ever."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    found = []
    for ids in windows().split(2):
        loss = trained(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_plain_loop_has_the_same_losses(kind):
    original = model(kind)
    swapped = copy.deepcopy(original)
    ckpt_ext.swap(swapped)
    found = plain_loop(original)
    assert found[-1] < found[0] - 0.5
    assert plain_loop(swapped) == pytest.approx(found, abs=1e-5)


def tokenizer():
    """A symbol a byte, as the model reads it."""
    from tokenizers import Tokenizer, models

    vocab = {f"<{index}>": index for index in range(256)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="<0>")), pad_token="<0>", eos_token="<1>", unk_token="<0>"
    )


@pytest.mark.parametrize("adapters", [False, True])
def test_sft_trainer_has_the_same_losses(adapters, tmp_path):
    trl = pytest.importorskip("trl", reason="its SFTTrainer is what is tested")
    import peft

    original = model()
    found = {}
    for name in ("original", "swapped"):
        lora = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM") if adapters else None
        callbacks = [ckpt_ext.SwapCallback()] if name == "swapped" else []
        trainer = trl.SFTTrainer(
            copy.deepcopy(original), arguments(trl.SFTConfig, tmp_path, max_length=LENGTH, gradient_checkpointing=name == "swapped"),
            train_dataset=dataset().remove_columns("labels"), processing_class=tokenizer(), peft_config=lora, callbacks=callbacks,
        )  # fmt: skip
        found[name] = losses(trainer)
        for callback in callbacks:
            assert len(callback.report.swapped) == 2 and not callback.report.refused
    assert len(found["original"]) == STEPS and found["original"][-1] < found["original"][0]
    assert found["swapped"] == pytest.approx(found["original"], abs=1e-5)
