"""ckpt_ext.checkpoint: what it keeps, regions in regions, threads, and the places where it stands in for another."""

import copy
import dataclasses
import functools
import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ckpt_ext
from ckpt_ext.testing import TwoLayers, assert_same, outcome, plain


@pytest.fixture
def net():
    torch.manual_seed(0)
    return TwoLayers()


@pytest.fixture
def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


class Chain(nn.Module):
    def __init__(self, layers: nn.ModuleList, run) -> None:
        super().__init__()
        self.layers, self.run = layers, run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.run(layer, x)
        return x


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    hidden: Tensor
    others: list


class TestMemory:
    def test_keeps_inputs_alone(self):
        layers = [TwoLayers(0.1, dim=16) for _ in range(8)]
        x = torch.randn(32, 16)
        saved = {}

        def pack(tensor):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = x.requires_grad_()
            for layer in layers:
                y = ckpt_ext.checkpoint(layer, y)
        assert sum(saved.values()) == 8 * x.nbytes

    def test_nothing_of_the_inside_lives_until_backward_or_after_it(self, x):
        inner = []

        def function(x):
            hidden = x.exp()
            inner.append(weakref.ref(hidden.untyped_storage()))
            return hidden.sin().cos()

        gc.disable()
        try:
            y = ckpt_ext.checkpoint(function, x)
            assert inner[0]() is None
            y.sum().backward(retain_graph=True)
            assert inner[1]() is None
            del y
            state = weakref.WeakSet()
            h = x * 1
            state.add(h)
            z = ckpt_ext.checkpoint(function, h).sum()
            del h
            z.backward()
            assert not len(state)
        finally:
            gc.enable()

    def test_dataclass_arguments_are_freed(self, x):
        batch = Batch(torch.ones(4, 8), [x])
        storage = weakref.ref(batch.hidden.untyped_storage())
        saved = []

        def pack(tensor):
            saved.append(tensor.shape)
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = ckpt_ext.checkpoint(lambda b: (b.hidden * b.others[0]).exp(), batch)
        del batch
        assert storage() is None  # the hooks, as of an offload, have got everything
        y.sum().backward()
        assert torch.equal(x.grad, x.detach().exp())


class TestNesting:
    @pytest.mark.parametrize("outer, inner", [("ours", "ours"), ("ours", "torch's"), ("torch's", "ours")])
    @pytest.mark.parametrize("check", [None, "values"])
    def test_regions_in_regions(self, net, x, outer, inner, check):
        ours = functools.partial(ckpt_ext.checkpoint, check=check)
        kinds = {"ours": ours, "torch's": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)}
        other = TwoLayers()

        def function(x, run):
            return other(run(net, run(net, x).sin()) + x)

        leaves = [x, *net.parameters(), *other.parameters()]
        got = outcome(lambda: kinds[outer](function, x, kinds[inner]), leaves)
        assert_same(got, outcome(lambda: function(x, plain), leaves))

    def test_two_threads(self):
        def work(results, index):
            generator = torch.Generator().manual_seed(index)
            weight = torch.randn(8, 8, generator=generator).requires_grad_()
            start = torch.randn(4, 8, generator=generator)

            def function(x, w):
                return (x @ w * (torch.rand(4, 8, generator=generator) > 0.5)).sin().exp()

            for _ in range(20):
                state = generator.get_state()
                expected = torch.autograd.grad(function(start, weight).sum(), weight)
                generator.set_state(state)
                y = ckpt_ext.checkpoint(function, start, weight, generators=[generator], check="values")
                results.append(torch.equal(torch.autograd.grad(y.sum(), weight)[0], expected[0]))

        state = torch.get_rng_state()
        results = []
        threads = [threading.Thread(target=work, args=(results, index)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 40 and torch.equal(torch.get_rng_state(), state)


class TestPlugs:
    def test_checkpoint_wrapper(self, net, x):
        module = checkpoint_wrapper(copy.deepcopy(net), checkpoint_fn=ckpt_ext.checkpoint, check="values")
        leaves = [x, *module.parameters()]
        mask = torch.ones(4, 8, dtype=torch.bool).tril()
        got = outcome(lambda: module(x, mask=mask, scale=2.0), leaves)
        assert_same(got, outcome(lambda: net(x, mask=mask, scale=2.0), [x, *net.parameters()]))

    @pytest.mark.parametrize("options", [{}, {"use_reentrant": False}, {"check": "values", "preserve_rng_state": True}])
    def test_transformers(self, options):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=32,
            attention_dropout=0.3, attn_implementation="eager",
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).train()
        tokens = torch.randint(32, (2, 6))
        padding = torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])

        def run():
            return model(tokens, attention_mask=padding, use_cache=False).logits

        leaves = list(model.parameters())
        expected = outcome(run, leaves)
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=functools.partial(ckpt_ext.checkpoint, **options))
        calls = []
        model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
        assert_same(outcome(run, leaves), expected)
        assert len(calls) == 2

    @pytest.mark.parametrize("options", [None, {}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}])
    def test_data_parallel(self, options):
        """DDP (None) and FSDP2, which swaps parameters under the modules; in a group of one, which takes no other process."""

        def losses(run):
            torch.manual_seed(0)
            layers = nn.ModuleList([TwoLayers(0.3), TwoLayers(0.3)])
            model = Chain(layers, run)
            if options is None:
                model = nn.parallel.DistributedDataParallel(model)
            else:
                for layer in layers:
                    fully_shard(layer, **options)
                fully_shard(model, **options)
            history = []
            for _ in range(3):
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
                history.append(loss.item())
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                        p.grad = None
            return history

        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            assert losses(functools.partial(ckpt_ext.checkpoint, check="values")) == losses(plain)
        finally:
            torch.distributed.destroy_process_group()

    def test_fake_tensors(self):
        with FakeTensorMode():
            net, x = nn.Sequential(TwoLayers(), nn.BatchNorm1d(8)), torch.randn(4, 8, requires_grad=True)
            ckpt_ext.checkpoint(net, x).sum().backward()
        assert x.grad.shape == (4, 8)

    @pytest.mark.filterwarnings("default")
    def test_compile_leaves_it_uncompiled(self, net, x):
        compiled = torch.compile(lambda x: ckpt_ext.checkpoint(net, x * 2).sin(), backend="aot_eager")
        leaves = [x, *net.parameters()]
        assert_same(outcome(lambda: compiled(x), leaves), outcome(lambda: net(x * 2).sin(), leaves))
