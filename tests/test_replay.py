"""Capture and replay of generators: the CPU's, a device's, private ones, Python's and NumPy's."""

import contextlib
import random

import numpy as np
import pytest
import torch

from ckpt_ext import philox, rng


@pytest.fixture(params=["C++", "Python"])
def both(request, monkeypatch):
    """Runs a test with the extension's access to generators, and with what stands in for it."""
    if request.param == "Python":
        monkeypatch.setattr(rng, "_get_state", torch.Generator.get_state)
        monkeypatch.setattr(rng, "_set_state", torch.Generator.set_state)
        monkeypatch.setattr(rng, "_default_generator", philox.default_generator)


def draw(generator: torch.Generator | None = None) -> tuple[float, ...]:
    """One number of each source."""
    return torch.rand((), generator=generator).item(), torch.rand(()).item(), random.random(), np.random.rand()


@pytest.mark.usefixtures("both")
class TestReplay:
    def test_default_generator(self):
        state = rng.capture()
        first = torch.rand(5)
        torch.rand(3)
        before = torch.get_rng_state()
        with state.replay():
            assert torch.equal(torch.rand(5), first)
        assert torch.equal(torch.get_rng_state(), before)

    def test_every_source(self):
        private = torch.Generator().manual_seed(1)
        state = rng.capture(generators=[private], python=True, numpy=True)
        first = draw(private)
        second = draw(private)
        for _ in range(2):  # a state can be replayed again
            with state.replay():
                assert draw(private) == first
                assert draw(private) == second
        state = rng.capture(generators=[private], python=True, numpy=True)
        third = draw(private)
        with state.replay():
            assert draw(private) == third

    def test_only_what_is_asked_for(self):
        private = torch.Generator().manual_seed(1)
        state = rng.capture()
        assert (len(state.generators), state.python, state.numpy) == (1, None, None)
        first = draw(private)
        with state.replay():
            second = draw(private)
        assert first[1] == second[1]
        assert all(first[i] != second[i] for i in (0, 2, 3))

    def test_draws_in_the_body_leave_no_trace(self):
        private = torch.Generator().manual_seed(1)
        state = rng.capture(generators=[private], python=True, numpy=True)
        expected = rng.capture(generators=[private], python=True, numpy=True)
        reference = draw(private)
        with expected.replay():
            with state.replay():
                draw(private), draw(private)
            assert draw(private) == reference

    def test_exception(self):
        private = torch.Generator().manual_seed(1)
        state = rng.capture(generators=[private], python=True, numpy=True)
        draw(private)
        before = rng.capture(generators=[private], python=True, numpy=True)
        with pytest.raises(KeyError), state.replay():
            draw(private)
            raise KeyError
        after = rng.capture(generators=[private], python=True, numpy=True)
        assert_same(before, after)

    def test_failure_on_entry_restores_too(self):
        private = torch.Generator().manual_seed(1)
        good = rng.capture(generators=[private])
        broken = rng.RngState((good.generators[0], (private, torch.zeros(3, dtype=torch.uint8))))
        draw(private)
        before = rng.capture(generators=[private])
        with pytest.raises((RuntimeError, TypeError)), broken.replay():
            raise AssertionError("the body must not run")
        assert_same(before, rng.capture(generators=[private]))

    def test_nesting(self):
        outer = rng.capture()
        a = torch.rand(())
        inner = rng.capture()
        b = torch.rand(())
        c = torch.rand(())
        with outer.replay():
            assert torch.rand(()) == a
            with inner.replay():
                assert torch.rand(()) == b
            assert torch.rand(()) == b
            assert torch.rand(()) == c

    def test_each_generator_once(self):
        private = torch.Generator()
        state = rng.capture(devices=["cpu"], generators=[private, torch.default_generator, private])
        assert [generator for generator, _ in state.generators] == [torch.default_generator, private]

    def test_captured_state_is_a_copy(self):
        state = rng.capture()
        kept = state.generators[0][1].clone()
        torch.rand(3)
        assert torch.equal(state.generators[0][1], kept)


def assert_same(one: rng.RngState, other: rng.RngState) -> None:
    for (_, a), (_, b) in zip(one.generators, other.generators, strict=True):
        assert torch.equal(a, b)
    assert one.python == other.python
    for a, b in ((one.numpy, other.numpy),) if one.numpy is not None else ():
        assert (a["state"]["key"] == b["state"]["key"]).all() and a["state"]["pos"] == b["state"]["pos"]


def test_no_accelerator_is_initialised_for_a_capture():
    rng.capture()
    assert not torch.cuda.is_initialized()


def test_all_devices_of_an_initialised_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    private = [torch.Generator().manual_seed(seed) for seed in range(2)]
    monkeypatch.setattr(rng, "_default_generator", lambda device: private[device.index])
    generators = [generator for generator, _ in rng.capture().generators]
    assert generators == [torch.default_generator, *private]


def test_replay_is_a_context_manager():
    assert isinstance(rng.capture().replay(), contextlib.AbstractContextManager)
