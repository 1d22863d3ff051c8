"""What the package is made of: the wheel, the sdist, the metadata, and which extension a build decides on."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("ckpt_ext", "kernels", "csrc", "tests", "bench", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ckpt_ext_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestExtensionToBuild:
    """A CUDA part only with an nvcc of torch's major version; a CPU extension otherwise; none without torch."""

    @pytest.fixture
    def setup(self) -> ModuleType:
        return load_setup()

    def toolkit(self, home: Path, line: str) -> str:
        """A folder like that of a CUDA toolkit, whose nvcc is a shell script of one line."""
        program = home / "bin" / "nvcc"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
        (home / "lib64").mkdir()
        (home / "lib64" / "libcudart.so").touch()
        return str(home)

    def test_release(self, setup, tmp_path):
        whole = self.toolkit(tmp_path / "whole", "echo 'Cuda compilation tools, release 12.4, V12.4.1'")
        assert setup.toolkit_release(whole) == "12.4"
        (tmp_path / "whole" / "lib64" / "libcudart.so").unlink()
        assert setup.toolkit_release(whole) is None
        assert setup.toolkit_release(self.toolkit(tmp_path / "broken", "exit 3")) is None
        assert setup.toolkit_release(str(tmp_path / "absent")) is None
        assert setup.toolkit_release(None) is None

    @pytest.mark.parametrize(
        ("torch_cuda", "nvcc", "cuda"),
        [
            ("13.0", "13.0", True),
            ("13.0", "13.2", True),
            ("13.0", "12.9", False),
            ("13.0", None, False),
            (None, "13.0", False),
            (None, None, False),
        ],
    )
    def test_decision(self, setup, monkeypatch, capsys, tmp_path, torch_cuda, nvcc, cuda):
        import torch
        from torch.utils import cpp_extension

        home = nvcc and self.toolkit(tmp_path, f"echo 'release {nvcc}, V{nvcc}.1'")
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", home)
        monkeypatch.setattr(cpp_extension, "CUDAExtension", cpp_extension.CppExtension)  # the real one asks for CUDA's own folders
        (built,) = setup.extension()["ext_modules"]
        assert ("csrc/cuda/reserve.cu" in built.sources) is cuda
        assert ("the CUDA part is left out" in capsys.readouterr().err) is (torch_cuda is not None and not cuda)
        assert (f"-DCKPT_EXT_CUDA={torch_cuda}" in built.extra_compile_args["cxx"]) is cuda
        assert all((ROOT / source).is_file() for source in built.sources)

    def test_without_torch(self, setup, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "torch", None)
        assert setup.extension() == {}
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and setup.BUILD in message

    def test_every_source_is_built(self, setup):
        found = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".cu")}
        assert found == {*setup.CPU_SOURCES, *setup.CUDA_SOURCES}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the checkout, so that builds leave nothing in it, with the symlink in place and no library."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, symlinks=True, ignore=shutil.ignore_patterns("*.so", "__pycache__", "results"))
        elif source.exists():
            shutil.copy(source, folder / part)
    assert (folder / "ckpt_ext" / "kernels").is_symlink()
    return folder


def backend(folder: Path, hook: str, out: Path) -> Path:
    """Call a hook of the build backend in `folder`, as in an isolated build: torch cannot be imported."""
    code = (
        "import os, sys; sys.modules['torch'] = None\n"
        "from setuptools import build_meta\n"
        f"name = build_meta.{hook}({str(out)!r})\n"
        f"open(os.path.join({str(out)!r}, 'name'), 'w').write(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / (out / "name").read_text()


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory) -> Path:
    return backend(checkout, "build_sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """The wheel built from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (project,) = folder.iterdir()
    return backend(project, "build_wheel", tmp_path_factory.mktemp("wheel"))


def test_sdist_has_the_sources(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [path for folder in ("csrc", "kernels") for path in (ROOT / folder).rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".py")]
    assert sources and {str(path.relative_to(ROOT)) for path in sources} <= names
    assert {"setup.py", "pyproject.toml", "ckpt_ext/kernels/primitives.py", "ckpt_ext/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_wheel_has_one_name(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"ckpt_ext"} and len(top) == 2
    assert "ckpt_ext/kernels/__init__.py" not in names
    modules = {str(path.relative_to(ROOT)) for pattern in ("*.py", "backends/*.py", "integrations/*.py", "kernels/*.py")
               for path in (ROOT / "ckpt_ext").glob(pattern)}  # fmt: skip
    assert modules | {"ckpt_ext/py.typed"} == {name for name in names if name.startswith("ckpt_ext/")}


def test_wheel_metadata(wheel):
    """Read without torch, and the console script is there."""
    (folder,) = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" in name}
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{folder}/METADATA").decode()
        scripts = archive.read(f"{folder}/entry_points.txt").decode()
    assert "Name: ckpt_ext\n" in text and f"Version: {metadata.version('ckpt_ext')}\n" in text
    assert 'Requires-Dist: triton<3.10,>=3.6; platform_system == "Linux"' in text
    assert "ckpt-ext = ckpt_ext.cli:main" in scripts


@pytest.mark.slow
def test_wheel_works(wheel, tmp_path):
    """Unpacked elsewhere, it imports its kernels and drops elements, without the extension."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import torch, ckpt_ext.rng as rng\n"
        "from ckpt_ext.kernels import primitives\n"
        "out = rng.dropout(torch.ones(4), rng.Dropout(torch.zeros(2).long(), 1.0, 1))\n"
        "print(out.tolist(), primitives.__file__)"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.stdout == f"[0.0, 0.0, 0.0, 0.0] {tmp_path}/ckpt_ext/kernels/primitives.py\n", done.stderr


def test_kernels_is_no_package():
    """Hugging Face publishes a package of that name; a folder with an `__init__.py` at the root would hide it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "ckpt_ext" / "kernels").is_symlink() and os.readlink(ROOT / "ckpt_ext" / "kernels") == "../kernels"


def test_transformers_lives_beside_us():
    """transformers imports a package named `kernels` where it finds one; ours must not be it, from a checkout's root either."""
    code = "import transformers, ckpt_ext; from transformers import LlamaForCausalLM; import ckpt_ext.kernels.launch"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    for order in (code, code.replace("transformers, ckpt_ext", "ckpt_ext, transformers")):
        done = subprocess.run([sys.executable, "-c", order], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
