// Dropout on the CPU. A mask is a matrix of rows and `cols` columns, a pure function of (seed, offset, site): element (row, col) is
// kept when lane `col % 4` of counter `row * ceil(cols / 4) + col // 4` reaches round(p * 2**32).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ckpt_ext {

// `x` (any shape and strides, floating) with dropped elements zero and the others times 1 / (1 - p); new and contiguous. `state` is
// int64 [2] = (seed, offset). `x` may be a window of its mask: element (i..., j) lies in column `col_start + j` of `cols`, and in row
// `row_start + sum(i * row_strides)`. By default it is the whole mask.
at::Tensor dropout(
    const at::Tensor& x, const at::Tensor& state, double p, int64_t site,
    int64_t row_start, at::OptionalIntArrayRef row_strides, std::optional<int64_t> cols, int64_t col_start);

} // namespace ckpt_ext
