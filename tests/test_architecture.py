"""The order of imports: `kernels <- backends <- autograd <- functional <- modules <- integrations <- cli`, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt_ext

PACKAGE = Path(ckpt_ext.__file__).parent
# From the bottom up; a module may import from lower layers and its own. What several layers share stands below all of them.
LAYERS = [
    {"validate", "spec", "host", "storages", "extension", "philox", "rng", "masks", "scoring", "sites", "guards", "tensor_parallel"},
    {"projections", "lora", "called", "weights"},
    {"checksums", "replay", "surroundings", "checkpoint"},
    {"reference", "memory", "ledger", "tracing"},
    {"kernels"},
    {"backends"},
    {"rope", "partition", "slicing", "gradients", "call", "fused_mlp", "placement", "attention_half", "mlp_half", "mlp_columns"}
    | {"mlp_products", "run"},
    {"offload", "segments", "recomputed"},
    {"autograd", "cross_entropy"},
    {"functional"},
    {"adopt", "dtensors", "modules"},
    {"shapes", "budget", "costs", "stock", "records", "cost_chain", "fronts", "plan"},
    {"sequential", "testing", "ranks"},
    {"integrations"},
    {"text", "training", "machine", "doctor", "verdicts", "truth", "rank_models", "compare_config", "compare", "compare_report"},
    {"verify_run", "verification", "verify_report", "verify_models"},
    {"fit", "fit_report", "ladder", "explain", "model_costs", "plan_report"},
    {"cli", "fit_cli", "plan_cli", "verify_cli"},
]
# The operator of a GPU's dropout is the kernel's launcher, imported when it is first called.
LAZY = {("rng", "kernels")}


def layer(name):
    return next((height for height, names in enumerate(LAYERS) if name in names), None)


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            yield path, parts


def imported(path, parts):
    """Names of the package's own top-level modules that the file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - node.level]
            target = [*base, *(node.module.split(".") if node.module else [])]
            yield from [target[0]] if target else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ckpt_ext":
            yield from node.module.split(".")[1:2] or [alias.name for alias in node.names]


@pytest.mark.parametrize("path, parts", list(modules()), ids=lambda value: ".".join(value) if isinstance(value, tuple) else "")
def test_imports_point_downwards(path, parts):
    own = layer(parts[0])
    assert own is not None, f"{parts[0]} stands in no layer"
    for target in imported(path, parts):
        if (parts[0], target) not in LAZY and layer(target) is not None:
            assert layer(target) <= own, f"{'.'.join(parts)} imports {target}"


def test_kernels_import_torch_triton_and_each_other_alone():
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for path in sorted((PACKAGE / "kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 1 or (node.level == 0 and node.module.split(".")[0] in allowed), path
            elif isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] in allowed for alias in node.names), path


def test_files_stay_small():
    for path, _ in modules():
        assert len(path.read_text().splitlines()) <= 350, path


def test_import_is_silent_and_light():
    heavy = {"triton", "transformers", "matplotlib", "rich"}
    probe = f"import sys, ckpt_ext; print(*({heavy} & {{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", probe], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
