"""Every kernel compiles for GPUs that are not here; in a fresh process, since this one has Triton's interpreter on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.offsets import narrow_offsets

ROOT = Path(__file__).parent.parent
CALLS = (
    "attention d64 dropout", "attention d128 documents", "mlp swiglu dropout", "rms norm 4096", "layer norm 768", "rms norm 65536",
    "add rms norm 4096 dropout", "rope d128", "swiglu dropout", "residual dropout",
)  # fmt: skip
MATRIX_KERNELS = {"_attention_forward", "_attention_backward_keys", "_attention_backward_queries", "_mlp_fwd", "_mlp_bwd"}


def launched():
    """The kernels that some launcher starts."""
    sources = (path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    return {name for source in sources for name in re.findall(r"(?<!def )\blaunch\(\s*(\w+),", source)}


def bench(folder, *arguments):
    """What a run of the bench printed and reported, and its exit status."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.aot", "--cache", folder / "cache", "--out", folder, *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (folder / "report.json").exists(), result.stdout + result.stderr
    report = json.loads((folder / "report.json").read_text())
    return result, [dict(zip(report["columns"], row, strict=True)) for row in report["rows"]]


def test_every_kernel_compiles_ahead_of_time_without_a_fault(tmp_path):
    result, rows = bench(tmp_path, "--arch", "sm_80", "sm_90", "--match", f"^({'|'.join(CALLS)})$")
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = launched()
    assert len(kernels) >= 10
    for arch in ("sm_80", "sm_90"):
        assert {row["kernel"] for row in rows if row["arch"] == arch} == kernels
    for row in rows:
        assert (row["kernel"] in MATRIX_KERNELS) == row["multiplies"] == (row["matrix"] > 0), row
        assert row["loads"] > 0 and row["stores"] > 0 and row["programs"] > 0 and row["bound_us"] > 0, row
    assert rows == bench(tmp_path, "--arch", "sm_80", "sm_90", "--match", f"^({'|'.join(CALLS)})$")[1]  # from the readings that were kept
    assert all(row["call"] in (tmp_path / "report.md").read_text() for row in rows)


ADDRESSED = """
  tt.func public @kernel(%x_ptr: !tt.ptr<f32>, %x_strides.0: i32, %heads: i32) {{
    %block = arith.constant 128 : i32
    %program = tt.get_program_id x : i32
    %batch = arith.divsi %program, %heads : i32
    %first = arith.muli %program, %block : i32
    %range = tt.make_range {{end = 128 : i32, start = 0 : i32}} : tensor<128xi32>
    %spread = tt.splat %first : i32 -> tensor<128xi32>
    %rows = arith.addi %spread, %range : tensor<128xi32>
{lines}
  }}
"""


@pytest.mark.parametrize(
    "lines, narrow",
    [
        # an index, and the product of one with a stride in 64 bits
        ("%p = tt.addptr %x_ptr, %first : !tt.ptr<f32>, i32", []),
        ("%i = arith.muli %batch, %heads : i32\n%p = tt.addptr %x_ptr, %i : !tt.ptr<f32>, i32", []),
        ("%w = arith.extsi %rows : tensor<128xi32> to tensor<128xi64>\n%s = arith.extsi %x_strides.0 : i32 to i64\n"
         "%t = tt.splat %s : i64 -> tensor<128xi64>\n%o = arith.muli %w, %t : tensor<128xi64>\n"
         "%p = tt.addptr %x_ptr, %o : tensor<128x!tt.ptr<f32>>, tensor<128xi64>", []),
        # in 32 bits, then widened; of a program alone; of a constant stride; carried by a loop
        ("%t = tt.splat %x_strides.0 : i32 -> tensor<128xi32>\n%o = arith.muli %rows, %t : tensor<128xi32>\n"
         "%w = arith.extsi %o : tensor<128xi32> to tensor<128xi64>\n"
         "%p = tt.addptr %x_ptr, %w : tensor<128x!tt.ptr<f32>>, tensor<128xi64>", ["%p"]),
        ("%o = arith.muli %program, %x_strides.0 : i32\n%p = tt.addptr %x_ptr, %o : !tt.ptr<f32>, i32", ["%p"]),
        ("%o = arith.muli %first, %block : i32\n%p = tt.addptr %x_ptr, %o : !tt.ptr<f32>, i32", ["%p"]),
        ("%step = arith.muli %block, %x_strides.0 : i32\n"
         "%end = scf.for %i = %range to %heads step %block iter_args(%offset = %batch) -> (i32) : i32 {\n"
         "%p = tt.addptr %x_ptr, %offset : !tt.ptr<f32>, i32\n%next = arith.addi %offset, %step : i32\nscf.yield %next : i32\n}", ["%p"]),
    ],
)  # fmt: skip
def test_offsets_that_can_wrap_are_found(lines, narrow):
    assert narrow_offsets(ADDRESSED.format(lines=lines)) == narrow
