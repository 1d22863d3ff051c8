"""Builds the C++ extension where torch can be imported; everything else about the package stands in pyproject.toml."""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import setup

BUILD = "pip install --no-build-isolation -e ."
CPU_SOURCES = [f"csrc/{name}.cpp" for name in ("module", "rng", "dropout", "random_words")]
CUDA_SOURCES = ["csrc/cuda/reserve.cu"]
ARCHITECTURES = "8.0;9.0;10.0+PTX"
"""Of GPUs to build for where none is seen, as in a container's build, and TORCH_CUDA_ARCH_LIST says nothing: torch gives up there."""


def toolkit_release(cuda_home: str | None) -> str | None:
    """The CUDA release, such as "13.0", of the toolkit in `cuda_home`; None where nothing can be built with it.

    An nvcc alone is no toolkit: one on the PATH may be a script that calls the real one, and then its folder has nothing to link with.
    """
    if cuda_home is None or not any(Path(cuda_home, folder, "libcudart.so").exists() for folder in ("lib64", "lib")):
        return None
    try:
        shown = subprocess.run([Path(cuda_home, "bin", "nvcc"), "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+\.\d+)", shown)
    return release and release[1]


def builds_cuda(torch_cuda: str | None, toolkit: str | None) -> bool:
    """Whether code of this toolkit can be linked to a torch of this CUDA release: both exist and share their major version."""
    return torch_cuda is not None and toolkit is not None and torch_cuda.split(".")[0] == toolkit.split(".")[0]


def extension() -> dict:
    """The arguments of `setup` that build the extension; none where torch is missing, since the package works without it."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        print(f"ckpt_ext: torch is not importable here, so no C++ extension is built. With torch installed: {BUILD}", file=sys.stderr)
        return {}
    # -g0: torch's headers make hundreds of megabytes of debug information. -fopenmp: at::parallel_for is an inline loop over it.
    openmp = ["-fopenmp"] if sys.platform == "linux" else []
    flags = {"cxx": ["-O3", "-g0", *openmp], "nvcc": ["-O3"]}
    kind, sources = cpp_extension.CppExtension, CPU_SOURCES
    toolkit = toolkit_release(cpp_extension.CUDA_HOME)
    if builds_cuda(torch.version.cuda, toolkit):
        kind, sources = cpp_extension.CUDAExtension, CPU_SOURCES + CUDA_SOURCES
        if not torch.cuda.is_available():
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
        for arguments in flags.values():
            arguments.append(f"-DCKPT_EXT_CUDA={torch.version.cuda}")
    elif torch.version.cuda is not None:
        found = f"CUDA {toolkit} is" if toolkit else "no CUDA toolkit is"
        print(f"ckpt_ext: {found} at CUDA_HOME, torch wants CUDA {torch.version.cuda}: the CUDA part is left out", file=sys.stderr)
    built = kind("ckpt_ext._C", sources, extra_compile_args=flags, extra_link_args=openmp)
    return {"ext_modules": [built], "cmdclass": {"build_ext": cpp_extension.BuildExtension}}


if __name__ == "__main__":
    setup(**extension())
