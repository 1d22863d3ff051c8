"""Settings that must stand before the first kernel is defined, and what makes the interpreter bearable."""

import os

# Where there is a GPU to test on, `bench/gpu_check.sh` says 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def _patch_language_once() -> None:
    """Keep Triton's interpreter from patching `triton.language` anew at every call of a device function, which takes half of its time.

    Where the kernel that calls has patched it already, its functions are no longer builtins.
    """
    patch, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None:  # another Triton: slower, but right
        return

    def patch_lang(fn):
        seen = [module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())]
        return patch(fn) if any(tl.core.is_builtin(module.load) for module in seen) else scope()

    interpreter._patch_lang = patch_lang


if os.environ["TRITON_INTERPRET"] != "0":
    _patch_language_once()


def pytest_configure(config: pytest.Config) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


@pytest.fixture
def fresh_compiler():
    """torch.compile without what it remembers of other tests, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
