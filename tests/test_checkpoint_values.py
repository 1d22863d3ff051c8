"""check="values": exact checksums, and what the replay is caught at by them."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt_ext
from ckpt_ext import checksums
from ckpt_ext.checksums import checksum
from ckpt_ext.replay import ReplayMismatch

checked = functools.partial(ckpt_ext.checkpoint, check="values")
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.int32, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip


def by_hand(x: Tensor) -> int:
    """The definition, with Python's integers, for dtypes of integers of up to 32 bits."""

    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    total = 0
    for index, word in enumerate(x.flatten().tolist()):
        weight = signed((index + 1) * checksums._MIX)
        total += word * (signed((weight ^ (weight >> 31)) * checksums._MIX) | 1)
    return total % 2**64


class TestChecksum:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
    def test_definition(self, dtype, monkeypatch):
        x = torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, (21, 29), dtype=dtype)
        assert checksum(x).item() % 2**64 == by_hand(x)
        monkeypatch.setattr(checksums, "_CHUNK", 100)
        assert checksum(x).item() % 2**64 == by_hand(x)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_any_bit_of_any_element_counts(self, dtype):
        x = torch.randn(3, 5, dtype=torch.complex64 if dtype.is_complex else None)
        x = (x > 0 if dtype is torch.bool else x if dtype.is_complex else x * 20).to(dtype)
        sums = {checksum(x).item()}
        raw = x.clone().reshape(-1).view(torch.uint8)
        bits = 1 if dtype is torch.bool else 8
        for byte in range(raw.numel()):
            for bit in range(bits):
                raw[byte] ^= 1 << bit
                sums.add(checksum(raw.view(dtype).view(3, 5)).item())
                raw[byte] ^= 1 << bit
        assert len(sums) == 1 + raw.numel() * bits

    def test_order_counts_and_strides_do_not(self):
        x = torch.randn(6, 4)
        assert checksum(x.flip(0)) != checksum(x) and checksum(x.t()) != checksum(x)
        assert checksum(x.t().contiguous().t()) == checksum(x)
        assert checksum(torch.randn(4).expand(3, 4)[:, ::2]).dim() == 0

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
    def test_two_changes_of_sign_do_not_cancel(self, dtype):
        x = torch.randn(16, dtype=dtype)
        sums = set()
        for i in range(16):
            for j in range(i):
                y = x.clone()
                y[[i, j]] *= -1
                sums.add(checksum(y).item())
        assert len(sums | {checksum(x).item()}) == 121

    def test_special_values(self):
        nan = torch.full((3,), float("nan"))
        assert checksum(nan) == checksum(nan.clone()) and checksum(torch.zeros(2)) != checksum(-torch.zeros(2))
        assert checksum(torch.empty(0, 3)) == 0 and checksum(torch.ones(())) == checksum(torch.ones(1))
        z = torch.randn(3, dtype=torch.complex64)
        assert checksum(z.conj()) == checksum(z.conj().resolve_conj()) != checksum(z)
        assert checksum(z.conj().imag) == checksum(z.conj().imag.clone())

    @pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
    @pytest.mark.filterwarnings("ignore:Sparse")
    def test_sparse(self, layout):
        dense = torch.eye(4)
        x, moved = dense.to_sparse(layout=layout), dense.flip(0).to_sparse(layout=layout)
        assert checksum(x) == checksum(x.clone()) and len({checksum(t).item() for t in (x, x * 2, moved)}) == 3

    def test_tensors_made_of_others(self):
        class Halves(Tensor):
            @staticmethod
            def __new__(cls, left, right):
                made = Tensor._make_wrapper_subclass(cls, (left.shape[0] * 2,))
                made.left, made.right = left, right
                return made

            def __tensor_flatten__(self):
                return ["left", "right"], None

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                raise AssertionError(func)

        a, b = torch.randn(3), torch.randn(3)
        assert checksum(Halves(a, b)) == checksum(Halves(a.clone(), b)) != checksum(Halves(b, a))

    def test_unknown_layout_is_refused(self):
        with pytest.raises(NotImplementedError, match="_mkldnn"):
            checksum(torch.ones(2).to_mkldnn())

    def test_needs_no_values_on_the_host(self):
        with FakeTensorMode(), NoSync():
            assert checksum(torch.randn(3, 4)).dtype is torch.int64


class NoSync(TorchDispatchMode):
    """Fails at the operators that wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default), func
        return func(*args, **(kwargs or {}))


class Noisy(nn.Module):
    """Drops by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self.generator) > 0.5)


class TestReplay:
    @pytest.fixture
    def x(self):
        return torch.randn(4, 8, requires_grad=True)

    def test_private_generator_is_caught_and_named(self, x):
        net = nn.Sequential(nn.Linear(8, 8), Noisy(), nn.Linear(8, 8))
        with pytest.raises(ReplayMismatch) as caught:
            checked(net, x).sum().backward()
        message = str(caught.value)
        assert re.search(r"saved tensor 2 \(bool \[4, 8\] on cpu\) has other values .* in module '1' \(Noisy\), line \d+ of .*py", message)
        assert "\nTip: name every generator" in message and x.grad is None
        checked(net, x, generators=[net[1].generator]).sum().backward()

    @pytest.mark.parametrize("check", [None, "values"])
    def test_input_changed_by_data(self, x, check):
        net = nn.Linear(8, 8)
        y = ckpt_ext.checkpoint(net, x, check=check).sum()
        x.data[2, 3] += 1e-6
        if check is None:
            return y.backward()  # nobody can see it
        with pytest.raises(ReplayMismatch, match=r"saved tensor 0 \(float32 \[4, 8\] on cpu\)"):
            y.backward()

    def test_weight_changed_by_data(self, x):
        net = nn.Sequential(nn.GELU(), nn.Linear(8, 8), nn.GELU())
        y = checked(net, x).sum()
        net[1].bias.data[0] += 1
        with pytest.raises(ReplayMismatch, match=r"module '2' \(GELU\)"):
            y.backward()

    def test_weight_assigned_anew(self, x):
        net = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        y = checked(net, x).sum()
        net[0].weight = nn.Parameter(torch.randn(8, 8))
        with pytest.raises(ReplayMismatch, match="other values"):
            y.backward()

    def test_one_bit_of_drift(self, x):
        drift = []

        def function(x):
            y = x.exp()
            if drift:
                y.detach().view(torch.int32)[3, 7] ^= 1
            return y.sin()

        y = checked(function, x).sum()
        drift.append(1)
        with pytest.raises(ReplayMismatch):
            y.backward()

    def test_counter_in_python(self, x):
        calls = []

        def function(x):
            calls.append(1)
            return (x * len(calls)).exp()

        with pytest.raises(ReplayMismatch):
            checked(function, x).sum().backward()

    def test_second_backward_after_a_mismatch_is_caught_too(self, x):
        net = nn.Sequential(nn.Linear(8, 8), Noisy(), nn.Linear(8, 8))
        y = checked(net, x).sum()
        for _ in range(2):
            with pytest.raises(ReplayMismatch):
                y.backward(retain_graph=True)

    def test_forward_waits_for_nothing(self, x):
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU())
        with NoSync():
            y = checked(net, x)
        y.sum().backward()

    def test_lstm_without_the_check(self, x):
        """Its workspace is partly unset memory, which the check would report."""
        net = nn.LSTM(8, 4, 2, dropout=0.3)
        results = []
        for run in ckpt_ext.checkpoint, lambda f, x: f(x):
            torch.manual_seed(0)
            results.append(torch.autograd.grad(run(net, x[None])[0].square().sum(), [x, *net.parameters()]))
        assert all(map(torch.equal, *results))

    def test_nan_and_dropped_tensors_pass(self, x):
        def function(x):
            return F.dropout(x.log(), 0.5).exp().masked_fill(x < 0, 0.0)

        checked(function, x.abs() - 0.5).sum().backward()
