#include "bundle/sha256_blocks.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace vtxcore {

#if defined(__x86_64__)

bool has_sha_instructions() {
  static const bool kHas = [] {
    unsigned a, b, c, d, e, f, g, h;
    bool known = __get_cpuid(1, &a, &b, &c, &d) != 0 && __get_cpuid_count(7, 0, &e, &f, &g, &h) != 0;
    return known && (c & bit_SSSE3) != 0 && (c & bit_SSE4_1) != 0 && (f & bit_SHA) != 0;
  }();
  return kHas;
}

__attribute__((target("sha,sse4.1,ssse3"))) void sha256_blocks(uint32_t* state, const uint8_t* data, size_t count) {
  auto* words = reinterpret_cast<__m128i*>(state);
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  // The instructions keep a, b, e, f together, and c, d, g, h.
  __m128i low = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1), high = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xF0);
  for (; count > 0; --count, data += 64) {
    __m128i before_abef = abef, before_cdgh = cdgh, w[4];
    for (size_t group = 0; group < 16; ++group) {  // of four rounds
      __m128i& now = w[group % 4];
      const __m128i &last = w[(group + 3) % 4], &second = w[(group + 2) % 4], &third = w[(group + 1) % 4];
      if (group < 4)
        now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + group), big_endian);
      else
        now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, third), _mm_alignr_epi8(last, second, 4)), last);
      __m128i sum = _mm_add_epi32(now, _mm_loadu_si128(reinterpret_cast<const __m128i*>(kSha256Rounds + 4 * group)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
    }
    abef = _mm_add_epi32(abef, before_abef);
    cdgh = _mm_add_epi32(cdgh, before_cdgh);
  }
  low = _mm_shuffle_epi32(abef, 0x1B), high = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(words, _mm_blend_epi16(low, high, 0xF0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(high, low, 8));
}

#elif defined(__aarch64__) && defined(__linux__)

bool has_sha_instructions() {
  constexpr unsigned long kSha2 = 1 << 6;  // HWCAP_SHA2
  static const bool kHas = (::getauxval(AT_HWCAP) & kSha2) != 0;
  return kHas;
}

__attribute__((target("+crypto"))) void sha256_blocks(uint32_t* state, const uint8_t* data, size_t count) {
  uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
  for (; count > 0; --count, data += 64) {
    uint32x4_t before_abcd = abcd, before_efgh = efgh, w[4];
    for (size_t group = 0; group < 16; ++group) {  // of four rounds
      uint32x4_t& now = w[group % 4];
      if (group < 4)
        now = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * group)));
      else
        now = vsha256su1q_u32(vsha256su0q_u32(now, w[(group + 1) % 4]), w[(group + 2) % 4], w[(group + 3) % 4]);
      uint32x4_t sum = vaddq_u32(now, vld1q_u32(kSha256Rounds + 4 * group)), old = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, old, sum);
    }
    abcd = vaddq_u32(abcd, before_abcd);
    efgh = vaddq_u32(efgh, before_efgh);
  }
  vst1q_u32(state, abcd);
  vst1q_u32(state + 4, efgh);
}

#else

bool has_sha_instructions() { return false; }
void sha256_blocks(uint32_t*, const uint8_t*, size_t) {}

#endif

}  // namespace vtxcore
