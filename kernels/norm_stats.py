"""The statistics of a norm alone, for kernels that normalise rows as they load them: the bits are those that `norm_forward` returns."""

import torch
import triton
from torch import Tensor

from .launch import accumulate_dtype, launch
from .norm import row_statistics
from .rows import as_rows
from .tiles import norm_tile


def norm_stats(x: Tensor, *, kind: str, eps: float) -> Tensor:
    """The statistics of x's rows: `[rows, 1]` (rms: rstd) or `[rows, 2]` (layer: mean, rstd), float64 for float64 rows, else float32."""
    x_rows = as_rows(x)
    num_rows, num_cols = x_rows.shape
    stats_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    stats = torch.empty((num_rows, 2 if kind == "layer" else 1), dtype=stats_dtype, device=x.device)
    tile = norm_tile(num_cols, x.dtype, x.device)
    launch(
        row_statistics, (triton.cdiv(num_rows, tile.block_m),), x_rows, stats, num_rows, num_cols, x_rows.stride(),
        LAYER=kind == "layer", EPS=eps, ACC=accumulate_dtype(x.dtype), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return stats
