"""What a replay by ckpt_ext.checkpoint finds again: autocast, defaults, buffers; and what may not have changed."""

import functools

import pytest
import torch
from torch import nn

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

    def test_regions_three_deep_on_a_retained_graph(self):
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
            loss = run(lambda e, i: e(i).exp().sin(), embedding, torch.tensor([1, 2, 1])).sum()
            loss.backward(retain_graph=True)
            loss.backward()
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
