"""Every kernel compiles for GPUs that are not here; in a fresh process, since this one has Triton's interpreter on."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CALLS = (
    "attention d64 dropout", "attention d128", "rms norm 4096", "layer norm 768", "rms norm 65536", "rope d128", "swiglu dropout", "gelu",
    "residual dropout",
)  # fmt: skip
MATRIX_KERNELS = {"_attention_forward", "_attention_backward_keys", "_attention_backward_queries"}


def launched():
    """The kernels that some launcher starts."""
    sources = (path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    return {name for source in sources for name in re.findall(r"\blaunch\(\s*(_\w+)", source)}


def test_every_kernel_compiles_ahead_of_time_without_a_spill():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.aot", "--arch", "sm_80", "sm_90", "--match", f"^({'|'.join(CALLS)})$"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line[30:].split() for line in result.stdout.splitlines()[1:]]
    kernels = launched()
    assert len(kernels) >= 10
    for arch in ("sm_80", "sm_90"):
        assert {kernel for kernel, where, *_ in rows if where == arch} == kernels
    assert all(int(row[-1]) > 0 for row in rows if row[0] in MATRIX_KERNELS)  # on tensor cores
