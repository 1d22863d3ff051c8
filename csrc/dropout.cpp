#include "dropout.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "random_words.h"


namespace ckpt_ext {
namespace {

// Columns whose random words are drawn before they are used: 4 KiB of words, which stay in the first-level cache.
constexpr int64_t BLOCK = 1024;

// Elements below which a thread of its own does not pay; the same as ATen's elementwise loops.
constexpr int64_t GRAIN = 32768;

// Where the rows and columns of a tensor lie in its mask.
struct Window {
  at::IntArrayRef sizes; // of the leading dimensions
  at::OptionalIntArrayRef row_strides;
  int64_t row_start, col_start, cols;

  // The mask's row under row `index` of the tensor. Unsigned, as are all counters: they wrap at 2**64 and nowhere before.
  uint64_t row(int64_t index) const {
    uint64_t row = row_start;
    if (!row_strides.has_value()) {
      return row + index;
    }
    for (auto dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
      row += static_cast<uint64_t>(index % sizes[dim]) * static_cast<uint64_t>((*row_strides)[dim]);
      index /= sizes[dim];
    }
    return row;
  }
};

void check_mask(const at::Tensor& x, const at::Tensor& state, double p, int64_t site) {
  TORCH_CHECK_VALUE(
      at::isFloatingType(x.scalar_type()) && x.element_size() > 1,
      "x must be float64, float32, bfloat16 or float16, got ", x.scalar_type());
  TORCH_CHECK_VALUE(0 <= p && p <= 1, "p must be a probability in [0, 1], got ", p);
  TORCH_CHECK_VALUE(1 <= site && site <= 255, "site must be in 1..255, got ", site);
  TORCH_CHECK_VALUE(
      state.scalar_type() == at::kLong && state.sizes() == at::IntArrayRef{2} && state.device() == x.device(),
      "state must be int64 of shape [2] on ", x.device(),
      ", got ", state.scalar_type(), " of shape ", state.sizes(), " on ", state.device());
}

void check_window(const Window& window, int64_t width) {
  TORCH_CHECK_VALUE(window.row_start >= 0, "row_start must not be negative, got ", window.row_start);
  TORCH_CHECK_VALUE(window.col_start >= 0, "col_start must not be negative, got ", window.col_start);
  TORCH_CHECK_VALUE(
      window.cols - window.col_start >= width,
      "cols must be at least col_start + x.size(-1) = ", window.col_start, " + ", width, ", got ", window.cols);
  if (window.row_strides.has_value()) {
    const auto strides = *window.row_strides;
    TORCH_CHECK_VALUE(
        strides.size() == window.sizes.size() && std::all_of(strides.begin(), strides.end(), [](int64_t s) { return s >= 0; }),
        "row_strides must be ", window.sizes.size(), " non-negative numbers, got ", strides);
  }
}

template <typename scalar_t>
void apply(const scalar_t* x, const uint32_t* words, int64_t count, uint32_t threshold, double scale, scalar_t* out) {
  const auto factor = static_cast<at::opmath_type<scalar_t>>(scale);
  for (int64_t i = 0; i < count; ++i) {
    const auto scaled = static_cast<scalar_t>(static_cast<at::opmath_type<scalar_t>>(x[i]) * factor);
    out[i] = words[i] >= threshold ? scaled : scalar_t(0);
  }
}

// `x` and `out` are contiguous, of `rows` rows of `width` elements. Threads share out pieces of rows; each piece is a function of its
// place alone, so their number changes nothing.
template <typename scalar_t>
void drop(
    const scalar_t* x, scalar_t* out, int64_t rows, int64_t width,
    const Window& window, const Stream& stream, uint32_t threshold, double scale) {
  const int64_t pieces = (width + BLOCK - 1) / BLOCK; // of a row
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::min(width, BLOCK));
  const auto row_quads = (static_cast<uint64_t>(window.cols) + 3) / 4;
  at::parallel_for(0, rows * pieces, grain, [&](int64_t begin, int64_t end) {
    std::array<uint32_t, BLOCK + 4 * COUNTERS> words;
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t first = piece % pieces * BLOCK;
      const int64_t count = std::min(BLOCK, width - first);
      const int64_t col = window.col_start + first;
      const int64_t lane = col % 4;
      random_words(stream, window.row(piece / pieces) * row_quads + col / 4, (lane + count + 3) / 4, words.data());
      const int64_t place = piece / pieces * width + first;
      apply(x + place, words.data() + lane, count, threshold, scale, out + place);
    }
  });
}

} // namespace

at::Tensor dropout(
    const at::Tensor& x, const at::Tensor& state, double p, int64_t site,
    int64_t row_start, at::OptionalIntArrayRef row_strides, std::optional<int64_t> cols, int64_t col_start) {
  check_mask(x, state, p, site);
  const int64_t width = x.dim() ? x.size(-1) : 1;
  const Window window{x.sizes().slice(0, x.dim() ? x.dim() - 1 : 0), row_strides, row_start, col_start, cols.value_or(width)};
  check_window(window, width);
  const auto words = state.contiguous();
  const auto* seed_offset = words.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(seed_offset[1] >> 56 == 0, "state must hold an offset in [0, 2**56), got ", seed_offset[1]);

  const auto threshold = static_cast<uint64_t>(std::nearbyint(p * 0x1p32)); // half to even, as Python rounds
  if (threshold >> 32 || x.numel() == 0) { // no word reaches 2**32
    return at::zeros(x.sizes(), x.options());
  }
  const Stream stream(seed_offset[0], seed_offset[1], site);
  const auto input = x.contiguous();
  auto out = at::empty(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "ckpt_ext::dropout", [&] {
    drop<scalar_t>(
        input.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), x.numel() / width, width,
        window, stream, static_cast<uint32_t>(threshold), 1 / (1 - p));
  });
  return out;
}

} // namespace ckpt_ext
