"""Every kernel compiles for GPUs that are not here; in a fresh process, since this one has Triton's interpreter on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("call", ["attention d64 dropout"])
def test_compiles_ahead_of_time(call):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.aot", "--arch", "sm_80", "sm_90", "--match", f"^{call}$"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.removeprefix(call).split() for line in result.stdout.splitlines() if line.startswith(call)]
    assert {arch for _, arch, *_ in rows} == {"sm_80", "sm_90"}
    # All but the row sums use the tensor cores.
    assert all(int(row[-1]) > 0 for row in rows if row[0] != "_attention_delta")
