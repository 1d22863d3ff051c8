"""Mask states and the operators on them."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpt_ext import extension, philox, rng
from ckpt_ext.rng import Dropout, Site

STATE = torch.tensor([42, 0])


def drop(x: Tensor, p: float = 0.5, state: Tensor = STATE, site: int = 5) -> Tensor:
    return rng.dropout(x, Dropout(state, p, site))


class TestDropout:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999])
    def test_values(self, dtype, p):
        x = torch.randn(13, 57, dtype=torch.float64).to(dtype)
        keep = philox.keep_mask(STATE, p, 5, 13, 57)
        wide = x.double() if dtype is torch.float64 else x.float()
        assert torch.equal(drop(x, p), torch.where(keep, wide * (1 / (1 - p)), 0).to(dtype))

    def test_p_zero_is_the_identity(self):
        x = torch.randn(5, 7)
        out = drop(x, 0.0)
        assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()

    def test_p_one_gives_zeros(self):
        assert torch.equal(drop(torch.full((5, 7), math.inf), 1.0), torch.zeros(5, 7))

    def test_what_is_dropped_is_zero_whatever_it_was(self):
        out = drop(torch.full((8, 64), math.nan))
        assert torch.equal(out == 0, ~philox.keep_mask(STATE, 0.5, 5, 8, 64))

    @pytest.mark.parametrize(
        "view",
        [
            lambda x: x.t(),
            lambda x: x[:, ::2],
            lambda x: x[::3, 5:11],
            lambda x: x[0].expand(4, -1),
            lambda x: x.unsqueeze(1).transpose(0, 2),
            lambda x: x[0, 0].expand(3, 9),
            lambda x: x[0, 0],
            lambda x: x[:0],
            lambda x: x[:, :0],
        ],
    )
    def test_any_strides(self, view):
        x = view(torch.randn(12, 20))
        out = drop(x)
        assert out.is_contiguous() and torch.equal(out, drop(x.clone(memory_format=torch.contiguous_format)))

    def test_input_is_left_alone(self):
        x = torch.randn(9, 9)
        before = x.clone()
        drop(x)
        assert torch.equal(x, before)

    @pytest.mark.parametrize("shape", [(1, 300_001), (300_000, 1), (401, 1030), (64, 4096)])
    def test_any_number_of_threads(self, shape):
        x, threads, outs = torch.randn(shape), torch.get_num_threads(), []
        try:
            for number in (1, 2, 3):
                torch.set_num_threads(number)
                outs.append(drop(x))
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        assert torch.equal(outs[0] != 0, philox.keep_mask(STATE, 0.5, 5, *shape) & (x != 0))

    def test_gradients(self):
        x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        y = drop(x)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(grad, drop(torch.ones_like(x)))
        assert torch.autograd.gradcheck(drop, (x,)) and torch.autograd.gradgradcheck(drop, (x,))

    def test_gradient_of_a_window(self):
        def window(x: Tensor) -> Tensor:
            return torch.ops.ckpt_ext.dropout(x, STATE, 0.5, 1, row_start=7, row_strides=[4, 1], cols=9, col_start=3)

        x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(window, (x,))

    def test_zero_stride_gradient(self):
        x = torch.randn(4, 6, requires_grad=True)
        drop(x).sum().backward()
        assert torch.equal(x.grad, drop(torch.ones(4, 6)))

    def test_no_graph_where_none_is_wanted(self):
        with torch.no_grad():
            assert drop(torch.randn(3, requires_grad=True)).grad_fn is None


BAD = [
    (dict(x=torch.ones(2, 3, dtype=torch.int64)), "x must be float64, float32, bfloat16 or float16, got"),
    (dict(x=torch.ones(2, 3).to(torch.float8_e4m3fn)), "x must be float64, float32, bfloat16 or float16, got"),
    (dict(x=torch.ones(2, 3).to(torch.complex64)), "x must be float64, float32, bfloat16 or float16, got"),
    (dict(p=-0.1), r"p must be a probability in \[0, 1\], got -0.1"),
    (dict(p=1.1), r"p must be a probability in \[0, 1\], got 1.1"),
    (dict(p=math.nan), r"p must be a probability in \[0, 1\], got nan"),
    (dict(site=0), r"site must be in 1..255, got 0"),
    (dict(site=256), r"site must be in 1..255, got 256"),
    (dict(state=torch.tensor([1, 2], dtype=torch.int32)), r"state must be int64 of shape \[2\] on cpu, got"),
    (dict(state=torch.tensor([1, 2, 3])), r"state must be int64 of shape \[2\] on cpu, got .* of shape \[3\]"),
    (dict(state=torch.tensor([[1, 2]])), r"state must be int64 of shape \[2\] on cpu, got .* of shape \[1, 2\]"),
    (dict(state=torch.tensor([1, 2**56])), r"state must hold an offset in \[0, 2\*\*56\), got 72057594037927936"),
    (dict(state=torch.tensor([1, -4])), r"state must hold an offset in \[0, 2\*\*56\), got -4"),
    (dict(row_start=-1), "row_start must not be negative, got -1"),
    (dict(col_start=-1), "col_start must not be negative, got -1"),
    (dict(col_start=1), r"cols must be at least col_start \+ x.size\(-1\) = 1 \+ 3, got 3"),
    (dict(cols=2), r"cols must be at least col_start \+ x.size\(-1\) = 0 \+ 3, got 2"),
    (dict(row_strides=[1, 1]), r"row_strides must be 1 non-negative numbers, got \[1, 1\]"),
    (dict(row_strides=[-1]), r"row_strides must be 1 non-negative numbers, got \[-1\]"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
@pytest.mark.parametrize("implementation", [torch.ops.ckpt_ext.dropout, philox.dropout])
@pytest.mark.filterwarnings("ignore:dropout runs in Python")
def test_bad_arguments(implementation, change, message):
    good = dict(x=torch.ones(2, 3), state=STATE, p=0.5, site=1)
    implementation(**good)
    with pytest.raises(ValueError, match=message):
        implementation(**good | change)


@pytest.mark.parametrize("make", [rng.reserve, philox.reserve])
class TestReserve:
    def call(self, make, generator=None) -> Tensor:
        return make(torch.device("cpu"), generator) if make is rng.reserve else make(generator, torch.device("cpu"))

    def test_seed_is_what_random_would_draw(self, make):
        torch.manual_seed(3)
        expected = torch.empty((), dtype=torch.int64).random_().item()
        after = torch.get_rng_state()
        torch.manual_seed(3)
        state = self.call(make)
        assert (state.tolist(), state.dtype, state.device.type) == ([expected, 0], torch.int64, "cpu")
        assert torch.equal(torch.get_rng_state(), after)

    def test_two_calls_differ_and_a_seed_repeats_them(self, make):
        torch.manual_seed(5)
        first, second = self.call(make), self.call(make)
        torch.manual_seed(5)
        assert not torch.equal(first, second)
        assert torch.equal(first, self.call(make)) and torch.equal(second, self.call(make))

    def test_private_generator(self, make):
        before = torch.get_rng_state()
        states = [self.call(make, torch.Generator().manual_seed(7)) for _ in range(2)]
        assert torch.equal(*states)
        assert torch.equal(torch.get_rng_state(), before)
        assert states[0][0] == torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("device", ["meta", "vulkan"])
def test_devices_without_a_generator_are_refused(device):
    message = f"device must have a random generator .*, got {device}"
    for refused in (
        lambda: rng.reserve(device),
        lambda: philox.reserve(None, torch.device(device)),
        lambda: rng.capture(devices=[device]),
        lambda: philox.default_generator(torch.device(device)),
    ):
        with pytest.raises(NotImplementedError, match=message):
            refused()


def test_generator_of_another_device_is_refused():
    for refused in (lambda: rng.reserve("meta", torch.Generator()), lambda: philox.reserve(torch.Generator(), torch.device("meta"))):
        with pytest.raises(ValueError, match="generator must be on meta, got one on cpu"):
            refused()


class CountingGenerator:
    """Stands for the generator of a device that is not here: a 64-bit seed and an offset."""

    device = torch.device("cpu")

    def __init__(self, seed: int):
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_fallback_reserves_by_offset(monkeypatch):
    generator = CountingGenerator(2**64 - 3)
    monkeypatch.setattr(philox, "default_generator", lambda device: generator)
    monkeypatch.setattr(Tensor, "to", lambda self, device: self)
    states = [philox.reserve(None, torch.device("cuda", 0)).tolist() for _ in range(2)]
    assert states == [[-3, 0], [-3, 4]]


class TestOperators:
    """Both operators under PyTorch's own machinery."""

    @pytest.mark.parametrize("window", [{}, dict(row_start=5, row_strides=[3], cols=20, col_start=2)])
    def test_dropout_opcheck(self, window):
        x = torch.randn(4, 7, requires_grad=True)
        torch.library.opcheck(torch.ops.ckpt_ext.dropout.default, (x, STATE, 0.5, 1), window)

    def test_reserve_opcheck(self):
        """Without the test that compares a second run to the first: two reservations differ, which is their point."""
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.ckpt_ext.reserve.default, (None, torch.device("cpu")), test_utils=tests)

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_fake(self, device):
        with FakeTensorMode():
            state = rng.reserve(device)
            x = torch.empty(5, 3, dtype=torch.bfloat16, device=device).t()
            out = drop(x, state=state)
        assert (state.shape, state.dtype, state.device.type) == ((2,), torch.int64, device)
        assert (out.shape, out.dtype, out.device.type, out.is_contiguous()) == ((3, 5), torch.bfloat16, device, True)

    def test_meta(self):
        assert drop(torch.empty(2, 3, device="meta"), state=torch.empty(2, dtype=torch.int64, device="meta")).shape == (2, 3)

    def test_schemas_equal(self):
        for name, text in philox.SCHEMAS.items():
            operator = getattr(torch.ops.ckpt_ext, name).default
            declared = torch._C.parse_schema(f"ckpt_ext::{text}")
            assert str(operator._schema) == str(declared)
            assert set(operator.tags) == set(philox.TAGS[name])

    def test_two_reservations_stay_two_when_compiled(self):
        """Neither merged as common subexpressions nor run again in backward."""

        def two(x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = rng.reserve("cpu"), rng.reserve("cpu")
            return drop(x, state=first), drop(x, state=second)

        compiled = torch.compile(two, backend="aot_eager", fullgraph=True)
        x = torch.randn(16, 16, requires_grad=True)
        torch.manual_seed(0)
        eager = two(x)
        torch.manual_seed(0)
        traced = compiled(x)
        assert not torch.equal(*traced)
        assert all(map(torch.equal, eager, traced))
        assert torch.equal(*(torch.autograd.grad(a.sum() + 2 * b.sum(), x)[0] for a, b in (eager, traced)))

    @pytest.mark.parametrize("window", [dict(cols=9), dict(row_strides=[1]), dict(col_start=1)])
    def test_windows_on_a_gpu_are_refused(self, window):
        with pytest.raises(NotImplementedError, match=f"dropout on a GPU takes whole rows of a mask only, got {next(iter(window))}"):
            rng._dropout_cuda(torch.ones(2, 3), STATE, 0.5, 1, **window)

    def test_gpu_goes_to_the_triton_launcher(self, monkeypatch):
        from ckpt_ext.kernels import residual

        seen = []
        monkeypatch.setattr(residual, "dropout", lambda x, dropout: seen.append(dropout) or x)
        x = torch.ones(2, 3)
        assert rng._dropout_cuda(x, STATE, 0.5, 1) is x
        assert seen == [Dropout(STATE, 0.5, 1)]


def test_sites_leave_room_for_adapters():
    assert sorted(Site) == list(range(1, 6)) and max(Site) < 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    def test_reserve(self):
        torch.manual_seed(3)
        first, second = rng.reserve("cuda"), rng.reserve("cuda")
        torch.manual_seed(3)
        assert torch.equal(rng.reserve("cuda"), first)
        assert first.tolist() == [3, 0] and second.tolist() == [3, 4]

    def test_capture(self):
        private = torch.Generator("cuda").manual_seed(1)
        state = rng.capture(generators=[private])
        first = torch.rand(3, device="cuda"), torch.rand(3, device="cuda", generator=private)
        with state.replay():
            again = torch.rand(3, device="cuda"), torch.rand(3, device="cuda", generator=private)
        assert all(map(torch.equal, first, again))

    @pytest.mark.skipif(not extension.status().cuda, reason="needs the CUDA part of the extension")
    def test_each_replay_of_a_graph_reserves_anew(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state = rng.reserve("cuda")
        seen = []
        for _ in range(2):
            graph.replay()
            seen.append(tuple(state.tolist()))
        assert len(set(seen)) == 2
