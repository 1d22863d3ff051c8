"""ckpt_ext.checkpoint against the same calls without it: gradients, arguments, randomness."""

import dataclasses
import functools
import random
import warnings
from typing import NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckpt_ext
from ckpt_ext.replay import ReplayMismatch
from ckpt_ext.testing import TwoLayers, assert_same, outcome, plain


@pytest.fixture
def net():
    torch.manual_seed(0)
    return TwoLayers()


@pytest.fixture
def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


class TestGradients:
    @pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("needs_grad", [True, False])
    @pytest.mark.parametrize("check", [None, "values"])
    @pytest.mark.parametrize("extra", [{}, {"python": True, "numpy": True}])
    def test_options(self, p, training, needs_grad, check, extra):
        net = TwoLayers(p).train(training)
        x = torch.randn(4, 8).requires_grad_(needs_grad)
        leaves = [*net.parameters(), *([x] if needs_grad else [])]
        assert_same(
            outcome(lambda: ckpt_ext.checkpoint(net, x, check=check, **extra), leaves), outcome(lambda: net(x), leaves)
        )

    def test_frozen_input_and_weights(self, net, x):
        x.requires_grad_(False)
        net.second.requires_grad_(False)
        leaves = [net.first.weight]
        assert_same(outcome(lambda: ckpt_ext.checkpoint(net, x), leaves), outcome(lambda: net(x), leaves))

    def test_all_frozen_builds_nothing(self, net, x):
        x.requires_grad_(False)
        net.requires_grad_(False)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
            for function in net, net.forward, lambda x: net(x):
                assert not ckpt_ext.checkpoint(function, x).requires_grad
            assert not [tensor for tensor in saved if tensor is not x]

    def test_closure_over_weights_alone(self, net, x):
        x.requires_grad_(False)
        leaves = list(net.parameters())
        assert_same(outcome(lambda: ckpt_ext.checkpoint(lambda: net(x)), leaves), outcome(lambda: net(x), leaves))
        assert net.calls == 3  # its first call kept nothing

    def test_grad_leaves_other_grads_alone(self, net, x):
        torch.autograd.grad(ckpt_ext.checkpoint(net, x).sum(), x)
        assert net.first.weight.grad is None
        ckpt_ext.checkpoint(net, x).sum().backward(inputs=[net.first.weight])
        assert net.first.weight.grad is not None and x.grad is None and net.second.weight.grad is None

    def test_retained_graph(self, net, x):
        y = ckpt_ext.checkpoint(net, x, check="values").square().sum()
        leaves = [x, *net.parameters()]
        passes = [torch.autograd.grad(y, leaves, retain_graph=True) for _ in range(3)]
        assert_same(passes[0], passes[1])
        assert_same(passes[0], passes[2])
        assert net.calls == 4

    def test_parts_of_a_retained_graph(self, net, x):
        leaves = [x, *net.parameters()]
        whole = torch.autograd.grad(ckpt_ext.checkpoint(net.eval(), x).square().sum(), leaves)
        y = ckpt_ext.checkpoint(net, x).square().sum()
        assert_same([torch.autograd.grad(y, leaf, retain_graph=True)[0] for leaf in leaves], whole)

    def test_second_backward_without_a_graph_is_refused(self, net, x):
        y = ckpt_ext.checkpoint(net, x).sum()
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()

    def test_double_backward(self, x):
        net = TwoLayers(0.5).double()
        x = x.detach().double().requires_grad_()

        def penalty(run):
            torch.manual_seed(5)
            (grad,) = torch.autograd.grad(run(net, x).square().sum(), x, create_graph=True)
            return torch.autograd.grad(grad.square().sum(), [x, *list(net.parameters())[:-1]])

        assert_same(penalty(ckpt_ext.checkpoint), penalty(plain))

    def test_gradgradcheck(self):
        weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
        x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(lambda x, w: ckpt_ext.checkpoint(lambda x, w: (x @ w).tanh() @ w, x, w), (x, weight))

    def test_differentiates_inside(self, x):
        def inside(x):
            (grad,) = torch.autograd.grad(x.sin().cos().sum(), x, create_graph=True)
            (again,) = torch.autograd.grad((x.exp() * 2).sum(), x)
            return x.cos() * grad * again

        assert_same(outcome(lambda: ckpt_ext.checkpoint(inside, x, check="values"), [x]), outcome(lambda: inside(x), [x]))

    def test_function_that_unpacks_twice(self, x):
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                ctx.save_for_backward(x, y)
                return x * y

            @staticmethod
            def backward(ctx, grad):
                x, y = ctx.saved_tensors
                return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]

        def function(x):
            return Twice.apply(x.sin(), x.cos()).exp()

        assert_same(outcome(lambda: ckpt_ext.checkpoint(function, x), [x]), outcome(lambda: function(x), [x]))

    def test_grad_output_and_saved_results_stay(self, net, x):
        leaf = x
        hidden = leaf.exp()  # saves its result
        grad = torch.randn(4, 8)
        kept = grad.clone()
        torch.manual_seed(2)
        (ours,) = torch.autograd.grad(ckpt_ext.checkpoint(net, hidden), leaf, grad)
        torch.manual_seed(2)
        (theirs,) = torch.autograd.grad(net(leaf.exp()), leaf, grad)
        assert torch.equal(ours, theirs) and torch.equal(grad, kept)

    def test_hooks_of_parameters_fire_once(self, net, x):
        fired = []
        net.first.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
        (ckpt_ext.checkpoint(net, x) + ckpt_ext.checkpoint(net, x)).sum().backward()
        assert fired == [1]

    def test_replay_stops_at_the_last_saved_tensor(self, net, x):
        ended = []
        for layer in net.first, net.second:
            layer.register_forward_hook(lambda layer, *_: ended.append(layer.out_features))
        ckpt_ext.checkpoint(net, x).sum().backward()
        assert ended == [16, 8, 16]

    def test_twenty_steps(self):
        def losses(run):
            torch.manual_seed(0)
            layers = nn.ModuleList([TwoLayers(0.1), TwoLayers(0.1)])
            optimizer = torch.optim.SGD(layers.parameters(), 0.05)
            data, target, history = torch.randn(8, 8), torch.randn(8, 8), []
            for _ in range(20):
                x = data
                for layer in layers:
                    x = x + run(layer, x)
                loss = F.mse_loss(x, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                history.append(loss.item())
            return history

        assert losses(ckpt_ext.checkpoint) == losses(plain)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    hidden: Tensor
    others: list
    name: str = "batch"


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = TwoLayers()

    def forward(self, batch: Batch) -> Batch:
        return Batch(self.net(batch.hidden) + batch.others[0]["x"], [batch.hidden])


class TestArguments:
    @pytest.mark.parametrize(
        "nested, read",
        [
            (lambda x: [x, 2.0], lambda v: v[0] * v[1]),
            (lambda x: ({"h": x}, [(x, None)]), lambda v: v[0]["h"] + v[1][0][0]),
            (lambda x: Pair(x, x.detach()), lambda v: v.left * v.right),
            (lambda x: Batch(x, [{"x": x}]), lambda v: v.hidden * v.others[0]["x"]),
            (lambda x: slice(None, 2), lambda v: torch.ones(4, 8)[v].sum()),
        ],
    )
    @pytest.mark.parametrize("by_keyword", [False, True])
    def test_nested(self, net, x, nested, read, by_keyword):
        def function(value, x):
            return net(read(value) + x)

        def call(run):
            return run(function, value=nested(x), x=x) if by_keyword else run(function, nested(x), x)

        leaves = [x, *net.parameters()]
        assert_same(outcome(lambda: call(ckpt_ext.checkpoint), leaves), outcome(lambda: call(plain), leaves))

    def test_nested_results(self, x):
        module = Batched()
        leaves = [x, *module.parameters()]
        got = outcome(lambda: ckpt_ext.checkpoint(module, Batch(x * 1, [{"x": x}]), check="values").hidden, leaves)
        assert_same(got, outcome(lambda: module(Batch(x * 1, [{"x": x}])).hidden, leaves))

    @pytest.mark.parametrize("args, kwargs", [((True, 2.0), {}), ((True,), {"scale": 2.0}), ((), {"mask": True, "scale": 2.0}), ((), {})])
    def test_optional_arguments(self, net, x, args, kwargs):
        mask = torch.arange(32).view(4, 8) % 3 == 0
        args, kwargs = [mask if a is True else a for a in args], {key: mask if a is True else a for key, a in kwargs.items()}
        if len(args) == 2:
            args, kwargs = args[:1], {"scale": args[1]}
        leaves = [x, *net.parameters()]
        assert_same(outcome(lambda: ckpt_ext.checkpoint(net, x, *args, **kwargs), leaves), outcome(lambda: net(x, *args, **kwargs), leaves))

    @pytest.mark.parametrize("kind", ["method", "partial", "partial of a method", "class's function"])
    def test_kinds_of_functions(self, net, x, kind):
        scale = torch.tensor(0.5, requires_grad=True)
        function = {
            "method": functools.partial(net.forward, scale=scale),
            "partial": functools.partial(functools.partial(net, scale=scale), x),
            "partial of a method": functools.partial(net.forward, x, scale=scale),
            "class's function": functools.partial(TwoLayers.forward, net, x, scale=scale),
        }[kind]
        args = (x,) if kind == "method" else ()
        leaves = [x, scale, *net.parameters()]
        assert_same(outcome(lambda: ckpt_ext.checkpoint(function, *args), leaves), outcome(lambda: function(*args), leaves))
        ckpt_ext_y = ckpt_ext.checkpoint(function, *args)
        with torch.no_grad():
            net.first.bias.add_(1)
        with pytest.raises(ReplayMismatch, match="parameter 'first.bias'"):
            ckpt_ext_y.sum().backward()

    def test_lists_that_the_function_grows(self, x):
        seen = []

        def function(x, items):
            items.append(x)
            seen.append(len(items))
            return torch.stack([item.sin() for item in items]).sum(0).exp()

        items = [x]
        ckpt_ext.checkpoint(function, x, items).sum().backward()
        assert seen == [2, 2] and len(items) == 2

    @pytest.mark.parametrize(
        "wrong, message",
        [
            ({"use_reentrant": True}, "use_reentrant must be False"),
            ({"preserve_rng_state": False}, "preserve_rng_state must be True"),
            ({"determinism_check": "none"}, "determinism_check must be 'default'"),
            ({"debug": True}, "debug must be False"),
            ({"early_stop": False}, "early_stop must be True"),
            ({"context_fn": print}, "context_fn must not be given"),
            ({"check": "shapes"}, "check must be None or 'values', got 'shapes'"),
            ({"generators": torch.Generator()}, "generators must be a sequence"),
            ({"generators": ["cpu"]}, "generators must be a sequence"),
        ],
    )
    def test_refused_options(self, net, x, wrong, message):
        with pytest.raises(ValueError, match=message):
            ckpt_ext.checkpoint(net, x, **wrong)

    def test_torch_options_that_say_the_same(self, net, x):
        ckpt_ext.checkpoint(net, x, use_reentrant=False, preserve_rng_state=True, determinism_check="default", debug=False)


class TestRandomness:
    def test_device_without_a_generator_is_refused(self):
        net, x = TwoLayers().to("meta"), torch.randn(4, 8, device="meta", requires_grad=True)
        for arguments in [(net, x)], {"x": [x]}, Batch(x, []):
            with pytest.raises(NotImplementedError, match="generator"):
                ckpt_ext.checkpoint(lambda value: value, arguments)

    def test_devices_are_found_in_modules_and_nested_arguments(self, monkeypatch):
        asked = []
        monkeypatch.setattr(ckpt_ext.rng, "capture", lambda devices, *_, **__: asked.append(set(devices)) or pytest.skip.Exception)
        net, x, meta = TwoLayers(), torch.randn(2, 8, requires_grad=True), torch.device("meta")
        ckpt_ext.checkpoint(lambda value: value, {"a": [x, (torch.empty(1, device=meta),)]})
        net.register_buffer("table", torch.empty(1, device=meta))
        ckpt_ext.checkpoint(net, x)
        assert asked == [{torch.device("cpu"), meta}] * 2

    def test_python_numpy_and_private_generators(self, x):
        private = torch.Generator().manual_seed(8)

        def function(x):
            keep = torch.rand(4, 8, generator=private) > 0.5
            return (x * keep * random.random() * float(numpy.random.rand())).exp().sin()

        def call(run, **options):
            private.manual_seed(8)
            results = outcome(lambda: run(function, x, **options), [x])
            return [*results, private.get_state()]

        everything = {"generators": iter([private]), "python": True, "numpy": True}
        assert_same(call(ckpt_ext.checkpoint, **everything), call(plain))

    def test_states_after_a_failed_replay(self, net, x):
        broken = []

        def function(x):
            y = net(x)
            if broken:
                torch.rand(3), random.random()
                raise OSError("disk")
            return y.exp()

        y = ckpt_ext.checkpoint(function, x, python=True).sum()
        broken.append(1)
        before, state = torch.get_rng_state(), random.getstate()
        with pytest.raises(OSError, match="disk"):
            y.backward()
        assert torch.equal(torch.get_rng_state(), before) and random.getstate() == state

    def test_without_a_graph_nothing_is_captured(self, net, x, monkeypatch):
        expected = net.eval()(x)
        monkeypatch.setattr(ckpt_ext.rng, "capture", lambda *_, **__: pytest.fail("captured"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for mode in torch.no_grad, torch.inference_mode:
                with mode():
                    y = ckpt_ext.checkpoint(net, x)
                assert y.grad_fn is None and torch.equal(y, expected)
        ckpt_ext.checkpoint(net.requires_grad_(False), x.detach())

    def test_eval_with_grad(self, net, x):
        leaves = [x, *net.parameters()]
        assert_same(outcome(lambda: ckpt_ext.checkpoint(net.eval(), x), leaves), outcome(lambda: net(x), leaves))
