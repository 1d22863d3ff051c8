"""Launches of accelerate and of transformers' Trainer with FSDP2, on two processes: the engine beside accelerate's own checkpointing.

accelerate 1.15 takes up an FSDP plugin on accelerators alone: `AcceleratorState.__init__` (accelerate/state.py) looks for MULTI_GPU and its
like, and on a CPU drops the plugin without a word. `fsdp2_on_cpu` does what that branch does; everything after it is accelerate's own.
"""

import copy
import os
import tempfile

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import ckpt_ext
from ckpt_ext import BlockSpec, Policy, TransformerBlock
from ckpt_ext.ranks import Collectives, run_on_ranks
from ckpt_ext.training import LanguageModel
from ckpt_ext.truth import Float64Throughout

transformers = pytest.importorskip("transformers", reason="its models and its Trainer are what is launched")
accelerate = pytest.importorskip("accelerate", reason="its launches are what is tested")
peft = pytest.importorskip("peft", reason="its adapters have the dropout")

DIM, LENGTH, LAYERS, STEPS = 32, 9, 2, 8
TOKENS = dict(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, tie_word_embeddings=False)
LLAMA = transformers.LlamaConfig(
    hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    max_position_embeddings=32, **TOKENS,
)  # fmt: skip
GPT2 = transformers.GPT2Config(
    n_embd=DIM, n_layer=LAYERS, n_head=4, n_positions=32, resid_pdrop=0.2, attn_pdrop=0.1, embd_pdrop=0.0, **TOKENS
)
DROPOUT = BlockSpec(dim=DIM, heads=4, kv_heads=2, hidden_dim=44, attn_dropout=0.2, residual_dropout=0.3, mlp_dropout=0.1)


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(copy.deepcopy(LLAMA)).double()


def adapted(dropout=0.1):
    lora = peft.LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
    base = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(base, lora).double().train()


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(copy.deepcopy(GPT2)).double().train()


def native(save):
    torch.manual_seed(0)
    blocks = [TransformerBlock(DROPOUT, policy=Policy(save), dtype=torch.float64) for _ in range(LAYERS)]
    return LanguageModel(blocks, DIM, dtype=torch.float64, device=torch.device("cpu"))


def layers_of(model):
    """The module list of a model, whatever is around it."""
    (found,) = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == LAYERS)
    return found


def batch(rank):
    return torch.randint(3, 64, (2, LENGTH + 1), generator=torch.Generator().manual_seed(rank))


def step(model, rank):
    """This rank's shards of the gradients, whose masks come from a seed of its own, and the collectives."""
    torch.manual_seed(100 + rank)
    return step_from_here(model, rank)


def step_from_here(model, rank):
    """The same with masks from the generator as it is."""
    model.zero_grad()
    symbols = batch(rank)
    with Collectives() as collectives, Float64Throughout():
        out = model(symbols[:, :-1])
        logits = out if isinstance(out, torch.Tensor) else out.logits
        F.cross_entropy(logits.flatten(0, 1), symbols[:, 1:].flatten()).backward()
    shards = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor), name
            shards[name.replace("_checkpoint_wrapped_module.", "")] = parameter.grad.to_local().clone()
    assert shards
    return shards, collectives.counts


def distance(actual, expected):
    """`|g - reference| / |reference|` of all shards of this rank together."""
    assert actual.keys() == expected.keys()
    a, b = (torch.cat([shards[name].flatten() for name in expected]) for shards in (actual, expected))
    return ((a - b).norm() / b.norm()).item()


def same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, shard in actual.items():
        assert torch.equal(shard, expected[name]), name


def launched(rank):
    """A process as `accelerate launch --cpu` or torchrun leave it, nothing of an earlier launch left."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}  # looked for, not used: the process group is there
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def fsdp2_on_cpu():
    """Let accelerate take up an FSDP plugin on a CPU, as it does on a GPU."""
    kind = accelerate.state.AcceleratorState
    original = kind.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == accelerate.DistributedType.MULTI_CPU:
            self.distributed_type = accelerate.DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            accelerate.PartialState._shared_state["distributed_type"] = self.distributed_type

    kind.__init__ = init
    return original


def prepared(rank, model, checkpointing=False):
    """`model` as accelerate hands it back, sharded layer by layer."""
    launched(rank)
    kind, original = accelerate.state.AcceleratorState, fsdp2_on_cpu()
    try:
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            activation_checkpointing=checkpointing, cpu_ram_efficient_loading=False,
        )  # fmt: skip
        accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    finally:
        kind.__init__ = original
    assert accelerator.is_fsdp2
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    model, _ = accelerator.prepare(model, optimizer)
    assert all(isinstance(module, FSDPModule) for module in (model, *layers_of(model)))
    return model


def a_plugin_on_a_cpu_is_dropped(rank):
    """Why `fsdp2_on_cpu` is there; where this fails, accelerate has come to shard on CPUs, and it can go."""
    launched(rank)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=accelerate.FullyShardedDataParallelPlugin(fsdp_version=2))
    assert accelerator.distributed_type == accelerate.DistributedType.MULTI_CPU and not accelerator.is_fsdp2


def adapters_with_dropout(rank):
    """accelerate's own checkpointing draws other masks in backward, in silence; the engine does not, swapped or as wrapper's function."""
    nothing, base = step(prepared(rank, adapted()), rank)
    stock, stock_collectives = step(prepared(rank, adapted(), checkpointing=True), rank)
    assert 0.2 < distance(stock, nothing), distance(stock, nothing)

    model = adapted()
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer, checkpoint_fn=ckpt_ext.checkpoint)
    wrapped, wrapped_collectives = step(prepared(rank, model), rank)
    same_bits(wrapped, nothing)

    swapped = {}
    for save in ("all", "input"):
        model = adapted()
        assert len(ckpt_ext.swap(model, Policy(save)).swapped) == LAYERS
        swapped[save], collectives = step(prepared(rank, model), rank)
        assert collectives == base
    same_bits(swapped["input"], swapped["all"])
    assert stock_collectives == wrapped_collectives == base


def the_same_without_dropout(rank):
    """Nothing random: accelerate with swapped layers has the gradients of accelerate alone."""
    expected, base = step(prepared(rank, adapted(0.0)), rank)
    model = adapted(0.0)
    ckpt_ext.swap(model)
    actual, collectives = step(prepared(rank, model), rank)
    assert distance(actual, expected) < 1e-9 and collectives == base


def dropout_of_sharded_blocks_bit_for_bit(rank):
    """What is kept changes no bit of a rank's shards; the masks of ranks are their own."""
    for make, swapped in ((native, False), (gpt2, True)):
        shards = {}
        for save in ("all", "attention", "input"):
            model = make() if swapped else make(save)
            if swapped:
                assert len(ckpt_ext.swap(model, Policy(save)).swapped) == LAYERS
            for layer in layers_of(model):
                fully_shard(layer)
            fully_shard(model)
            for _ in range(2):
                shards[save], _ = step(model, rank)
        same_bits(shards["input"], shards["all"])
        same_bits(shards["attention"], shards["all"])
        torch.manual_seed(3 + rank)
        with pytest.raises(AssertionError):
            same_bits(step_from_here(model, rank)[0], shards["all"])


def trained(rank, *, callbacks=(), late=(), checkpointing=False, model=llama):
    """A Trainer after some steps with `fsdp` arguments, and the loss of every step on this rank."""
    launched(rank)
    kind, original = accelerate.state.AcceleratorState, fsdp2_on_cpu()
    try:
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
                bf16=False, save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=3, dataloader_pin_memory=False,
                fsdp=True, fsdp_config={"activation_checkpointing": checkpointing},
            )  # fmt: skip
            trainer = transformers.Trainer(model(), arguments, train_dataset=Symbols(), callbacks=list(callbacks))
            for callback in late:
                trainer.add_callback(callback)
            losses = []
            trainer.model.register_forward_hook(lambda module, args, output: losses.append(output.loss.item()))
            trainer.train()
    finally:
        kind.__init__ = original
    assert trainer.accelerator.is_fsdp2 and all(isinstance(layer, FSDPModule) for layer in layers_of(trainer.model))
    assert len(losses) == STEPS
    return trainer, losses


class Symbols(torch.utils.data.Dataset):
    """Rows of symbols that are always the same."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.randint(3, 64, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Watched(ckpt_ext.SwapCallback):
    """Notes whether the model was sharded already as it was swapped."""

    def _swap(self, model):
        self.sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        super()._swap(model)


def a_trainer_swaps_before_it_shards(rank):
    _, expected = trained(rank)
    callback = Watched()
    _, losses = trained(rank, callbacks=[callback])
    assert len(callback.report.swapped) == LAYERS and not callback.report.refused and not callback.sharded
    assert losses == pytest.approx(expected, abs=1e-5)  # the loss is float32's
    assert sum(losses[4:]) < sum(losses[:4])


def a_callback_that_comes_late_swaps_what_is_sharded(rank):
    _, expected = trained(rank)
    callback = Watched()
    _, losses = trained(rank, late=[callback])
    assert len(callback.report.swapped) == LAYERS and not callback.report.refused and callback.sharded
    assert losses == pytest.approx(expected, abs=1e-5)


def a_trainer_with_adapters_that_drop(rank):
    """Losses tell by the second step whether the first one's gradients were right."""
    _, expected = trained(rank, model=adapted)
    _, stock = trained(rank, model=adapted, checkpointing=True)
    assert stock[0] == expected[0] and abs(stock[1] - expected[1]) > 1e-4
    _, kept = trained(rank, model=adapted, callbacks=[ckpt_ext.SwapCallback(Policy("all"))])
    _, rebuilt = trained(rank, model=adapted, callbacks=[ckpt_ext.SwapCallback()])
    assert rebuilt == kept


def two_checkpointings_are_refused(rank):
    for where in ("callbacks", "late"):
        with pytest.raises(ValueError, match="activation_checkpointing of the FSDP configuration must be False"):
            trained(rank, **{where: [ckpt_ext.SwapCallback()]}, checkpointing=True)


CASES = [
    a_plugin_on_a_cpu_is_dropped, adapters_with_dropout, the_same_without_dropout, dropout_of_sharded_blocks_bit_for_bit,
    a_trainer_swaps_before_it_shards, a_callback_that_comes_late_swaps_what_is_sharded, a_trainer_with_adapters_that_drop,
    two_checkpointings_are_refused,
]  # fmt: skip


@pytest.fixture(scope="module")
def failures():
    return run_on_ranks(CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_launch(case, failures):
    assert not failures[case], failures[case]
