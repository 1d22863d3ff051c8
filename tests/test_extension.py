"""The C++ extension found, refused or missing; imports on machines that lack things; the doctor."""

import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

import ckpt_ext.rng as rng
from ckpt_ext import doctor, extension

ROOT = Path(__file__).parent.parent
LIBRARY = Path(rng.__file__).parent / f"_C{EXTENSION_SUFFIXES[0]}"
COMMAND = "pip install --no-build-isolation -e ."


def write_library(folder: Path, torch_version: str, cuda: str = "none") -> Path:
    """A copy of the real library that says it was built for `torch_version`, which must take as many characters as the real one."""
    content = LIBRARY.read_bytes()
    marker = extension.MARKER.search(content)
    assert marker is not None
    patched = b"ckpt_ext built for torch=%s cuda=%s;" % (torch_version.encode(), cuda.encode())
    assert len(patched) == len(marker[0])
    path = folder / LIBRARY.name
    path.write_bytes(content.replace(marker[0], patched))
    return path


class TestExamine:
    def test_in_use_here(self):
        status = extension.status()
        assert status.loaded and status.built_for == extension.release(torch.__version__)
        assert extension.module().marker == f"ckpt_ext built for torch={status.built_for} cuda=none;" or status.cuda

    def test_missing(self, tmp_path):
        status = extension.examine(tmp_path)
        assert status == extension.Status(False, f"the C++ extension of ckpt_ext is not built; build it with `{COMMAND}`")

    def test_another_torch(self, tmp_path):
        old = re.sub(r"\d", "1", extension.release(torch.__version__))
        write_library(tmp_path, old)
        status = extension.examine(tmp_path)
        assert not status.loaded and status.built_for == old
        for part in (f"built for torch {old}", f"torch {torch.__version__} runs", COMMAND):
            assert part in status.reason

    def test_same_torch(self, tmp_path):
        write_library(tmp_path, extension.release(torch.__version__), cuda="13.0")
        assert extension.examine(tmp_path) == extension.Status(False, "", extension.release(torch.__version__), cuda=True)

    def test_another_python(self, tmp_path):
        (tmp_path / "_C.cpython-399-x86_64-linux-gnu.so").touch()
        reason = extension.examine(tmp_path).reason
        assert "only has _C.cpython-399-x86_64-linux-gnu.so, built for another Python" in reason and COMMAND in reason

    @pytest.mark.parametrize("content", [b"", b"\x7fELF something else"])
    def test_something_else(self, tmp_path, content):
        (tmp_path / LIBRARY.name).write_bytes(content)
        reason = extension.examine(tmp_path).reason
        assert "is no C++ extension of this ckpt_ext" in reason and COMMAND in reason

    @pytest.mark.parametrize(("version", "numbers"), [("2.13.0+cpu", "2.13.0"), ("2.14.0a0+git123", "2.14.0"), ("unknown", "unknown")])
    def test_release(self, version, numbers):
        assert extension.release(version) == numbers


def run(folder: Path, code: str, **environment: str) -> str:
    """The output of `code` in a fresh interpreter that imports from `folder` first; nothing may appear on stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", code], cwd=folder, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "TRITON_INTERPRET": "1", **environment},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.fixture
def bare(tmp_path) -> Path:
    """A folder with the package in it, without its library."""
    shutil.copytree(ROOT / "ckpt_ext", tmp_path / "ckpt_ext", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


DRAW = """
import warnings, torch
from ckpt_ext import extension, rng
torch.manual_seed(11)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    state = rng.reserve("cpu")
    x = torch.linspace(-1, 1, 500, requires_grad=True)
    out = [rng.dropout(x, rng.Dropout(state, 0.3, 5)) for _ in range(2)][0]
private = torch.Generator().manual_seed(4)
captured = rng.capture(generators=[private])
torch.rand((), generator=private)
with captured.replay():
    again = torch.rand((), generator=private).item()
(grad,) = torch.autograd.grad(out.sum(), x)
print(state.tolist(), out.tolist(), grad.tolist(), again)
print(len(caught), *(str(warning.message) for warning in caught))
print(torch.ops.ckpt_ext.dropout.default._schema, torch.ops.ckpt_ext.reserve.default._schema)
print(extension.status().loaded)
"""


@pytest.mark.slow
class TestWithoutExtension:
    def outcome(self, folder: Path) -> list[str]:
        return run(folder, DRAW).splitlines()

    def test_results_are_equal_and_one_warning_says_what_to_do(self, bare):
        values, warned, schemas, loaded = self.outcome(bare)
        expected_values, silent, expected_schemas, here = self.outcome(ROOT)
        assert (loaded, here, silent) == ("False", "True", "0")
        assert values == expected_values and schemas == expected_schemas
        assert warned.startswith("1 ") and COMMAND in warned and "the C++ extension of ckpt_ext is not built" in warned

    def test_another_torch_is_never_loaded(self, bare):
        old = re.sub(r"\d", "1", extension.release(torch.__version__))
        write_library(bare / "ckpt_ext", old)
        code = "import sys, ckpt_ext.rng, ckpt_ext.extension as e; print('ckpt_ext._C' in sys.modules, e.status().reason)"
        shown = run(bare, code)
        assert shown.startswith("False ") and f"torch {old}" in shown and f"torch {torch.__version__}" in shown and COMMAND in shown

    def test_a_library_that_does_not_load(self, bare):
        marker = extension.MARKER.search(LIBRARY.read_bytes())[0]
        (bare / "ckpt_ext" / LIBRARY.name).write_bytes(b"no library " + marker)
        shown = run(bare, "import ckpt_ext.rng, ckpt_ext.extension as e; print(e.status())")
        assert "loaded=False" in shown and "did not load" in shown and COMMAND in shown


@pytest.mark.slow
def test_import_is_silent_and_light(tmp_path):
    """No triton on the machine, and nothing heavy or foreign imported."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import ckpt_ext, ckpt_ext.rng, ckpt_ext.doctor, torch\n"
        "print([name for name in ('transformers', 'peft', 'matplotlib', 'rich') if name in sys.modules])\n"
        "dropout = ckpt_ext.rng.Dropout(torch.zeros(2).long(), 0.0, 1)\n"
        "print(torch.cuda.is_initialized(), ckpt_ext.rng.dropout(torch.ones(3), dropout).tolist())"
    )
    assert run(tmp_path, code, PYTHONPATH=str(ROOT)) == "[]\nFalse [1.0, 1.0, 1.0]\n"


@pytest.mark.slow
def test_import_does_not_import_triton():
    assert run(ROOT, "import sys, ckpt_ext, ckpt_ext.rng; print([m for m in sys.modules if m.startswith('triton')])") == "[]\n"


class TestDoctor:
    def find(self, name: str) -> doctor.Check:
        (check,) = [check for check in doctor.examine() if check.name == name]
        return check

    def test_this_machine(self):
        checks = doctor.examine()
        names = [check.name for check in checks]
        assert len(set(names)) == len(names) and all(check.detail for check in checks)
        assert doctor.healthy(checks)
        assert self.find("extension").ok is True
        assert torch.__version__ in self.find("torch").detail

    def test_ranges_are_those_of_the_package(self):
        project = (ROOT / "pyproject.toml").read_text()
        for name, (low, high) in doctor.SUPPORTED.items():
            span = f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
            assert (f'requires-python = "{span}"' if name == "python" else f'"{name}{span}') in project

    @pytest.mark.parametrize(
        ("version", "ok"), [("2.10.9", False), ("2.11.0", True), ("2.14.3+cu130", True), ("2.15.0", False), ("3.0", False)]
    )
    def test_versions(self, monkeypatch, version, ok):
        monkeypatch.setattr(torch, "__version__", version)
        assert self.find("torch").ok is ok
        assert doctor.healthy(doctor.examine()) is ok

    def test_missing_extension_is_not_unhealthy(self, monkeypatch):
        monkeypatch.setattr(extension, "status", lambda: extension.Status(False, f"build it with `{COMMAND}`"))
        assert self.find("extension").ok is False and COMMAND in self.find("extension").detail
        assert doctor.healthy(doctor.examine())

    def test_triton_missing(self, monkeypatch):
        monkeypatch.setattr(doctor, "_installed", lambda name: None)
        assert self.find("triton").ok is None and self.find("backend triton").ok is None

    def test_interpreter(self, monkeypatch):
        assert self.find("backend triton").ok is True
        monkeypatch.delenv("TRITON_INTERPRET")
        assert self.find("backend triton").ok is (True if torch.cuda.is_available() else None)

    @pytest.mark.slow
    def test_file_named_triton(self, tmp_path):
        (tmp_path / "triton.py").write_text("raise RuntimeError('not the package')")
        code = "from ckpt_ext import doctor; print(*doctor.examine(), sep='\\n')"
        lines = run(tmp_path, code, PYTHONPATH=str(ROOT)).splitlines()
        (line,) = [line for line in lines if "name='triton'" in line]
        assert "ok=False" in line and str(tmp_path / "triton.py") in line and "rename or move that file" in line

    @pytest.mark.parametrize(
        ("release", "cuda", "ok"), [("13.0", "13.2", True), ("12.4", "13.0", False), ("13.0", None, None), ("?", "13.0", False)]
    )
    def test_nvcc(self, monkeypatch, tmp_path, release, cuda, ok):
        write_nvcc(tmp_path, release)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert self.find("nvcc").ok is ok and str(tmp_path) in self.find("nvcc").detail

    def test_no_tools(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        for name in ("CUDA_HOME", "CXX"):
            monkeypatch.delenv(name, raising=False)
        assert self.find("nvcc").ok is None and self.find("compiler").ok is None
        assert doctor.healthy(doctor.examine())


def write_nvcc(home: Path, release: str) -> None:
    """A program that calls itself nvcc of `release`."""
    program = home / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    program.chmod(0o755)
