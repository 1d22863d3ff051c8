"""ckpt_ext.checkpoint against the same calls without it: gradients, randomness, autocast, buffers, and what is kept."""

import copy
import dataclasses
import functools
import gc
import random
import threading
import warnings
import weakref
from typing import NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ckpt_ext
from ckpt_ext.replay import ReplayMismatch


class Net(nn.Module):
    """Two layers with dropout between; counts its calls."""

    def __init__(self, p: float = 0.5, dim: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), nn.Dropout(p)
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: Tensor | float = 1.0) -> Tensor:
        self.calls += 1
        hidden = self.drop(F.gelu(self.first(x)))
        y = self.second(hidden * scale)
        return y if mask is None else y.masked_fill(mask, 0.0)


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def outcome(call, leaves, seed=3):
    """Result, gradients, buffers' and generators' state after forward and backward of `call()`, which returns tensors."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    y = call()
    grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
    return [y.detach(), *grads, torch.get_rng_state(), torch.tensor(random.random()), torch.tensor(numpy.random.rand())]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


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
        net = Net(p).train(training)
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
        net = Net(0.5).double()
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

    def test_twenty_steps(self):
        def losses(run):
            torch.manual_seed(0)
            layers = nn.ModuleList([Net(0.1), Net(0.1)])
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
        self.net = Net()

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
            "class's function": functools.partial(Net.forward, net, x, scale=scale),
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
        net, x = Net().to("meta"), torch.randn(4, 8, device="meta", requires_grad=True)
        for arguments in [(net, x)], {"x": [x]}, Batch(x, []):
            with pytest.raises(NotImplementedError, match="generator"):
                ckpt_ext.checkpoint(lambda value: value, arguments)

    def test_devices_are_found_in_modules_and_nested_arguments(self, monkeypatch):
        asked = []
        monkeypatch.setattr(ckpt_ext.rng, "capture", lambda devices, *_, **__: asked.append(set(devices)) or pytest.skip.Exception)
        net, x, meta = Net(), torch.randn(2, 8, requires_grad=True), torch.device("meta")
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


def autocast(**options):
    return torch.autocast("cpu", **{"dtype": torch.bfloat16, **options})


class TestAutocast:
    @pytest.mark.parametrize("forward", [{}, {"enabled": False}, {"cache_enabled": False}, {"dtype": torch.float16}])
    @pytest.mark.parametrize("backward", [None, {}, {"dtype": torch.float16}, {"enabled": False}])
    @pytest.mark.parametrize("nested", [False, True])
    def test_replayed_as_in_the_forward_pass(self, x, forward, backward, nested):
        net = nn.Linear(8, 8)
        dtypes = []

        def function(x):
            y = net(x)
            dtypes.append((y.dtype, torch.is_autocast_cache_enabled()))
            if nested:
                with autocast(enabled=False):
                    z = net(y.float().sin())
                    dtypes.append(z.dtype)
                return z.exp()
            return y.float().exp()

        def call(run):
            dtypes.clear()
            with autocast(**forward):
                y = run(function, x, check="values") if run is ckpt_ext.checkpoint else run(function, x)
            if backward is None:
                return [y, *torch.autograd.grad(y.sum(), [x, *net.parameters()])]
            with autocast(**backward):
                return [y, *torch.autograd.grad(y.sum(), [x, *net.parameters()])]

        ours = call(ckpt_ext.checkpoint)
        half = len(dtypes) // 2
        assert dtypes[:half] == dtypes[half:] and half == 1 + nested
        assert_same(ours, call(plain))

    def test_whole_step_inside(self, net, x):
        def step(run):
            with autocast():
                return outcome(lambda: run(net, x).float() + run(net, x).float(), [x, *net.parameters()])

        assert_same(step(ckpt_ext.checkpoint), step(plain))

    def test_default_dtype_and_device(self, x):
        made = []

        def function(x):
            noise = torch.ones(8)
            made.append((noise.dtype, noise.device.type))
            return (x * 2).exp() if noise.device.type == "meta" else None

        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                y = ckpt_ext.checkpoint(function, x)
        finally:
            torch.set_default_dtype(torch.float32)
        y.sum().backward()
        assert made == [(torch.float64, "meta")] * 2 and torch.get_default_dtype() is torch.float32


class TestBuffers:
    def test_batch_norm_three_steps(self):
        def train(run):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 2, 1), nn.BatchNorm1d(2, momentum=None))
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for step in range(3):
                torch.manual_seed(step)
                for _ in range(2):
                    run(net, torch.randn(4, 3, 9)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            run(net, torch.randn(4, 3, 9))  # a forward pass without a backward pass counts once
            return list(net.state_dict().values())

        stepped = train(functools.partial(ckpt_ext.checkpoint, check="values"))
        assert_same(stepped, train(plain))
        assert stepped[-1] == 7

    def test_two_forward_passes_before_two_backward_passes(self):
        def run_both(run):
            torch.manual_seed(0)
            module = Averages()
            xs = [torch.randn(4, 3).requires_grad_() for _ in range(2)]
            ys = [run(module, x) for x in xs]
            grads = [torch.autograd.grad(y.sum(), x)[0] for x, y in zip(xs, ys, strict=True)]
            return [*grads, *module.buffers()]

        assert_same(run_both(functools.partial(ckpt_ext.checkpoint, check="values")), run_both(plain))

    def test_restored_after_a_failed_replay(self, x):
        module = Averages(8)
        y = ckpt_ext.checkpoint(module, x).sum()
        buffers, values = list(module.buffers()), [b.clone() for b in module.buffers()]
        module.fails = True
        with pytest.raises(OSError):
            y.backward()
        assert all(a is b for a, b in zip(module.buffers(), buffers, strict=True))
        assert_same(buffers, values)

    def test_packed_weights_that_are_written_to_are_refused_by_name(self, x):
        class Packed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("codes", torch.zeros(1 << 21, dtype=torch.uint8))
                self.writes = False

            def forward(self, x):
                if self.writes:
                    self.codes[0] += 1
                return x.exp().sin()

        module = nn.Sequential(Packed())
        ckpt_ext.checkpoint(module, x).sum().backward()
        module[0].writes = True
        with pytest.raises(NotImplementedError, match="buffer '0.codes'"):
            ckpt_ext.checkpoint(module, x)

    def test_replaced_buffer_is_found_again(self, x):
        module = Averages(8).eval()
        expected = torch.autograd.grad(module(x).sum(), x)
        y = ckpt_ext.checkpoint(module, x, check="values").sum()
        module.scale = torch.full((), 7.0)
        assert_same(torch.autograd.grad(y, x), expected)
        assert module.scale == 7

    def test_embedding_that_renormalises_its_weight(self):
        def run_it(run):
            torch.manual_seed(0)
            embedding = nn.Embedding(5, 4, max_norm=0.5)
            run(lambda e, i: e(i).exp().sin(), embedding, torch.tensor([1, 2, 1])).sum().backward()
            return [embedding.weight.detach(), embedding.weight.grad]

        assert_same(run_it(ckpt_ext.checkpoint), run_it(plain))


class Averages(nn.Module):
    """Reads and writes buffers: in place, by assignment, a tied one, and one that only its own forward pass leaves alone."""

    def __init__(self, dim: int = 3) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("assigned", torch.ones(1, dim))
        self.register_buffer("tied", self.mean)
        self.register_buffer("scale", torch.full((), 2.0))
        self.fails = False

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0, keepdim=True))
                self.count += 1
                self.assigned = self.assigned * 0.5 + self.mean
        if self.fails:
            raise OSError
        return ((x - self.tied) * self.assigned / (1 + self.count) * self.scale).sin().exp()


class TestChanges:
    @pytest.mark.parametrize("check", [None, "values"])
    def test_weight(self, net, x, check):
        y = ckpt_ext.checkpoint(nn.Sequential(net), x, check=check).sum()
        with torch.no_grad():
            net.second.bias.add_(1)
        with pytest.raises(ReplayMismatch, match=r"parameter '0\.second\.bias' was changed in place(.|\n)*\nTip: "):
            y.backward()

    def test_buffer(self, x):
        module = Averages(8).eval()
        y = ckpt_ext.checkpoint(module, x).sum()
        module.scale.add_(1)
        with pytest.raises(ReplayMismatch, match="buffer 'scale'"):
            y.backward()

    def test_argument(self, net, x):
        scale = torch.full((1,), 2.0)
        y = ckpt_ext.checkpoint(net, x, scale=scale).sum()
        scale.add_(1)
        with pytest.raises(ReplayMismatch, match=r"tensor 1 of the arguments \(float32 \[1\] on cpu\)(.|\n)*\nTip: "):
            y.backward()

    def test_region_that_changes_its_argument(self, x):
        with pytest.raises(ReplayMismatch, match="by the region itself"):
            ckpt_ext.checkpoint(lambda h: h.mul_(2).exp(), x * 1).sum().backward()

    def test_saved_tensor_changed_inside(self, x):
        def function(x):
            y = x.exp()
            y.add_(1)
            return y * x.sin()

        with pytest.raises(ReplayMismatch, match="after an operation had saved it"):
            ckpt_ext.checkpoint(function, x).sum().backward()

    @pytest.mark.parametrize(
        "second, message",
        [
            (lambda x: x[:2].exp(), r"was float32 \[4, 8\] on cpu .* is float32 \[2, 8\] on cpu"),
            (lambda x: x.double().exp(), "is float64"),
            (lambda x: x, "saved 1 tensors and its replay 0"),
        ],
    )
    def test_other_operations(self, x, second, message):
        calls = []

        def function(x):
            calls.append(1)
            return x.exp() if len(calls) == 1 else second(x)

        y = ckpt_ext.checkpoint(function, x).sum()
        with pytest.raises(ReplayMismatch, match=message) as caught:
            y.backward()
        assert "\nTip: " in str(caught.value)


class TestMemory:
    def test_keeps_inputs_alone(self):
        layers = [Net(0.1, dim=16) for _ in range(8)]
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
        other = Net()

        def function(x, run):
            return other(run(net, run(net, x).sin()) + x)

        leaves = [x, *net.parameters(), *other.parameters()]
        got = outcome(lambda: kinds[outer](function, x, kinds[inner]), leaves)
        assert_same(got, outcome(lambda: function(x, plain), leaves))

    def test_three_deep_with_buffers_and_retained_graph(self):
        def results(run):
            torch.manual_seed(0)
            modules = [Averages(8), nn.BatchNorm1d(8), nn.Dropout(0.5)]
            x = torch.randn(4, 8, requires_grad=True)

            def level(depth, x, known):
                y = modules[depth](x)
                return y if depth == 2 else run(level, depth + 1, y, known) * y

            known = nn.ModuleList(modules)
            y = run(level, 0, x, known).square().sum()
            first = torch.autograd.grad(y, x, retain_graph=True)
            return [*first, *torch.autograd.grad(y, x), *known.buffers()]

        assert_same(results(functools.partial(ckpt_ext.checkpoint, check="values")), results(plain))

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


class Chain(nn.Module):
    def __init__(self, layers: nn.ModuleList, run) -> None:
        super().__init__()
        self.layers, self.run = layers, run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.run(layer, x)
        return x


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
            layers = nn.ModuleList([Net(0.3), Net(0.3)])
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
            net, x = nn.Sequential(Net(), nn.BatchNorm1d(8)), torch.randn(4, 8, requires_grad=True)
            ckpt_ext.checkpoint(net, x).sum().backward()
        assert x.grad.shape == (4, 8)

    @pytest.mark.filterwarnings("default")
    def test_compile_leaves_it_uncompiled(self, net, x):
        compiled = torch.compile(lambda x: ckpt_ext.checkpoint(net, x * 2).sin(), backend="aot_eager")
        leaves = [x, *net.parameters()]
        assert_same(outcome(lambda: compiled(x), leaves), outcome(lambda: net(x * 2).sin(), leaves))
