// Half-precision and bfloat16 numbers by their bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

namespace vtxcore {

inline float half_to_float(uint16_t half) {
  int exponent = half >> 10 & 31;
  int mantissa = half & 1023;
  float value = exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
                : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                 : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return half & 0x8000 ? -value : value;
}

// The nearest half, of two equally near ones the even.
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  float size = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  int exponent = size < 6.103515625e-05f ? -14 : std::ilogb(size);
  // In units of the last place; rounding up into the next power of two gives its bits by itself.
  auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  uint32_t magnitude = units + (exponent == -14 ? 0 : static_cast<uint32_t>(exponent + 14) << 10);
  return static_cast<uint16_t>(sign | magnitude);
}

inline float bfloat16_to_float(uint16_t upper) {
  uint32_t bits = static_cast<uint32_t>(upper) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// `count` numbers of a type, "float32", "float16" or "bfloat16", as float32.
inline void widen(const void* from, const std::string& dtype, size_t count, float* to) {
  if (dtype == "float32") {
    std::memcpy(to, from, 4 * count);
    return;
  }
  auto bytes = static_cast<const uint8_t*>(from);
  for (size_t i = 0; i < count; ++i) {
    auto bits = static_cast<uint16_t>(bytes[2 * i] | bytes[2 * i + 1] << 8);
    to[i] = dtype == "bfloat16" ? bfloat16_to_float(bits) : half_to_float(bits);
  }
}

}  // namespace vtxcore
