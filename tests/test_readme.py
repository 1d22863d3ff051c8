"""The README's code runs as it stands, at a shorter length."""

import re
from pathlib import Path

import torch.distributed as dist
from torch.distributed.tensor import DTensor

README = Path(__file__).parent.parent / "README.md"


def test_the_code_runs_from_top_to_bottom(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    names: dict = {}
    for block in blocks:
        assert "1025" in block or "symbols = " not in block
        exec(compile(block.replace("1025", "33").replace("range(8)", "range(3)"), "README.md", "exec"), names)
    assert names["loss"].isfinite()
    assert all(parameter.grad is not None for parameter in names["blocks"].parameters())
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = names["distributed"](names["LlamaForCausalLM"](names["config"]), 1, 1, "cpu")
        model(input_ids=names["symbols"], labels=names["symbols"]).loss.backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
