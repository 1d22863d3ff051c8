#include "random_words.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define CKPT_EXT_AVX2
#endif

namespace ckpt_ext {
namespace {

void scalar(const Stream& stream, uint64_t first, int64_t quads, uint32_t* words) {
  for (int64_t i = 0; i < quads; ++i) {
    const uint64_t counter = first + static_cast<uint64_t>(i);
    const Words drawn =
        philox4x32_10({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), stream.z, stream.w}, stream.key);
    words[4 * i] = drawn.x;
    words[4 * i + 1] = drawn.y;
    words[4 * i + 2] = drawn.z;
    words[4 * i + 3] = drawn.w;
  }
}

#ifdef CKPT_EXT_AVX2
// Four counters side by side, each word in the low half of a 64-bit lane: the multiplier reads no more than that half, so whatever a
// product leaves in the upper one may stay there. Compilers find no such form by themselves and are over twice as slow.
__attribute__((target("avx2"))) void avx2(const Stream& stream, uint64_t first, int64_t quads, uint32_t* words) {
  const __m256i multiplier_a = _mm256_set1_epi64x(0xD2511F53);
  const __m256i multiplier_b = _mm256_set1_epi64x(0xCD9E8D57);
  for (int64_t i = 0; i < quads; i += COUNTERS) {
    __m256i x = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(first + static_cast<uint64_t>(i))), _mm256_set_epi64x(3, 2, 1, 0));
    __m256i y = _mm256_srli_epi64(x, 32);
    __m256i z = _mm256_set1_epi64x(stream.z);
    __m256i w = _mm256_set1_epi64x(stream.w);
    Key key = stream.key;
    for (int round = 0; round < 10; ++round) {
      const __m256i a = _mm256_mul_epu32(x, multiplier_a);
      const __m256i b = _mm256_mul_epu32(z, multiplier_b);
      x = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), y), _mm256_set1_epi64x(key.x));
      z = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), w), _mm256_set1_epi64x(key.y));
      y = b;
      w = a;
      key = next_round(key);
    }
    const __m256i xy = _mm256_blend_epi32(x, _mm256_slli_epi64(y, 32), 0b10101010);
    const __m256i zw = _mm256_blend_epi32(z, _mm256_slli_epi64(w, 32), 0b10101010);
    const __m256i even = _mm256_unpacklo_epi64(xy, zw); // quads 0 and 2
    const __m256i odd = _mm256_unpackhi_epi64(xy, zw); // quads 1 and 3
    auto* out = reinterpret_cast<__m256i*>(words + 4 * i);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
  }
}
#endif

} // namespace

void random_words(const Stream& stream, uint64_t first, int64_t quads, uint32_t* words) {
#ifdef CKPT_EXT_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) {
    return avx2(stream, first, quads, words);
  }
#endif
  scalar(stream, first, quads, words);
}

} // namespace ckpt_ext
