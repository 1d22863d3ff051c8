// Random words of consecutive counters: what a mask is made of on a CPU.
#pragma once

#include <cstdint>

#include "philox.h"

namespace ckpt_ext {

// One mask's place among all random streams: its key, and the upper two words of its counters.
struct Stream {
  Key key;
  uint32_t z, w;

  Stream(uint64_t seed, uint64_t offset, uint32_t site)
      : key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
        z(static_cast<uint32_t>(offset)),
        w(static_cast<uint32_t>(offset >> 32) | site << 24) {}
};

// How many counters `random_words` takes at a time; it may write up to this many quads of words past the end.
constexpr int64_t COUNTERS = 4;

// Writes the words of counters first, first + 1, ..., four each, `quads` rounded up to a multiple of COUNTERS.
void random_words(const Stream& stream, uint64_t first, int64_t quads, uint32_t* words);

} // namespace ckpt_ext
