#include "bundle/sha256.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace vtxcore {

namespace {

constexpr uint32_t kSha256Rounds[64]{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

inline uint32_t turn(uint32_t value, int by) { return value >> by | value << (32 - by); }

}  // namespace

// Blocks of 64 bytes by the processor's own instructions, if it has them: several times the speed.

#if defined(__x86_64__)

bool has_sha_instructions() {
  static const bool kHas = [] {
    unsigned a, b, c, d, e, f, g, h;
    bool known = __get_cpuid(1, &a, &b, &c, &d) != 0 && __get_cpuid_count(7, 0, &e, &f, &g, &h) != 0;
    return known && (c & bit_SSSE3) != 0 && (c & bit_SSE4_1) != 0 && (f & bit_SHA) != 0;
  }();
  return kHas;
}

__attribute__((target("sha,sse4.1,ssse3"))) static void sha256_blocks(uint32_t* state, const uint8_t* data, size_t count) {
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

__attribute__((target("+crypto"))) static void sha256_blocks(uint32_t* state, const uint8_t* data, size_t count) {
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
static void sha256_blocks(uint32_t*, const uint8_t*, size_t) {}

#endif

Sha256::Sha256() : Sha256(has_sha_instructions()) {}

void Sha256::blocks(const uint8_t* data, size_t count) {
  if (instructions_) return sha256_blocks(state_.data(), data, count);
  for (size_t i = 0; i < count; ++i) block(data + 64 * i);
}

void Sha256::block(const uint8_t* data) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i)
    w[i] = uint32_t{data[4 * i]} << 24 | uint32_t{data[4 * i + 1]} << 16 | uint32_t{data[4 * i + 2]} << 8 |
           uint32_t{data[4 * i + 3]};
  for (size_t i = 16; i < 64; ++i) {
    uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + w[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    uint32_t first = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + kSha256Rounds[i] + w[i];
    uint32_t second = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const std::array<uint32_t, 8> after{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += after[i];
}

void Sha256::update(const void* data, size_t size) {
  auto bytes = static_cast<const uint8_t*>(data);
  total_ += size;
  while (size > 0) {
    if (filled_ == 0 && size >= 64) {
      blocks(bytes, size / 64);
      bytes += size / 64 * 64, size %= 64;
      continue;
    }
    size_t count = std::min(size, 64 - filled_);
    std::memcpy(waiting_.data() + filled_, bytes, count);
    filled_ += count, bytes += count, size -= count;
    if (filled_ == 64) {
      blocks(waiting_.data(), 1);
      filled_ = 0;
    }
  }
}

std::string Sha256::hex() {
  uint64_t bits = 8 * total_;
  uint8_t one = 0x80, zero = 0;
  update(&one, 1);
  while (filled_ != 56) update(&zero, 1);
  std::array<uint8_t, 8> length;
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  update(length.data(), 8);
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (uint32_t word : state_)
    for (int shift = 28; shift >= 0; shift -= 4) out += kHex[word >> shift & 15];
  return out;
}

}  // namespace vtxcore
