// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), for host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define CKPT_EXT_HOST_DEVICE __host__ __device__
#else
#define CKPT_EXT_HOST_DEVICE
#endif

namespace ckpt_ext {

struct Words {
  uint32_t x, y, z, w;
};

struct Key {
  uint32_t x, y;
};

CKPT_EXT_HOST_DEVICE inline Key next_round(Key key) {
  return {key.x + 0x9E3779B9, key.y + 0xBB67AE85};
}

// The four random words of one counter.
CKPT_EXT_HOST_DEVICE inline Words philox4x32_10(Words counter, Key key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter.x;
    const uint64_t b = uint64_t{0xCD9E8D57} * counter.z;
    counter = {
        static_cast<uint32_t>(b >> 32) ^ counter.y ^ key.x,
        static_cast<uint32_t>(b),
        static_cast<uint32_t>(a >> 32) ^ counter.w ^ key.y,
        static_cast<uint32_t>(a)};
    key = next_round(key);
  }
  return counter;
}

} // namespace ckpt_ext
