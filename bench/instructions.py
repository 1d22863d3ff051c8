"""What a binary is made of: registers, stack, and its matrix, memory and stack instructions, counted in the machine code itself."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_GCN = re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)", re.MULTILINE)

# Products on tensor cores: of a warp, of a warp group, of Blackwell's tensor memory, and of float64.
_NVIDIA_MATRIX = re.compile(r"(HMMA|HGMMA|UTC\w*MMA|DMMA)\b")
_NVIDIA_LOAD = re.compile(r"(LDG|LDGSTS)\b")
_AMD_LOAD, _AMD_STORE = re.compile(r"(global|buffer|flat)_load_"), re.compile(r"(global|buffer|flat)_store_")


def read_nvidia(cubin: bytes) -> dict[str, int]:
    """Figures of a cubin, by the disassembler that Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([_TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    count = Counter(_SASS.findall(code))

    def total(pattern: str | re.Pattern, width: str = "") -> int:
        return sum(times for name, times in count.items() if re.match(pattern, name) and width in name)

    return {
        "registers": int(registers),
        "spill": int(stack),
        "local": total(r"(LDL|STL)\b"),
        "matrix": total(_NVIDIA_MATRIX),
        "loads": total(_NVIDIA_LOAD),
        "wide_loads": total(_NVIDIA_LOAD, ".128"),
        "stores": total(r"STG\b"),
        "wide_stores": total(r"STG\b", ".128"),
    }


def read_amd(assembly: str) -> dict[str, int]:
    """The same figures of AMD's assembly; its registers are the vector registers, accumulators included."""
    registers, scratch = (int(re.search(rf"\.{key}:\s+(\d+)", assembly).group(1)) for key in ("vgpr_count", "private_segment_fixed_size"))
    count = Counter(_GCN.findall(assembly))

    def total(pattern: str | re.Pattern, width: str = "") -> int:
        return sum(times for name, times in count.items() if re.match(pattern, name) and width in name)

    return {
        "registers": registers,
        "spill": scratch,
        "local": total("scratch_"),
        "matrix": total("v_mfma"),
        "loads": total(_AMD_LOAD),
        "wide_loads": total(_AMD_LOAD, "dwordx4"),
        "stores": total(_AMD_STORE),
        "wide_stores": total(_AMD_STORE, "dwordx4"),
    }
