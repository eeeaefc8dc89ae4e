// The little linear algebra that CDPruner and DART need, in float32.
#pragma once

#include <cmath>

#include "base/tensors.hpp"

namespace vtxcore {

// Sums run in double: closer to the exact value than any order of float32 sums.
inline float dot(const float* a, const float* b, size_t count) {
  double total = 0;
  for (size_t i = 0; i < count; ++i) total += double{a[i]} * double{b[i]};
  return static_cast<float>(total);
}

inline float length_of(const float* row, size_t count) { return std::sqrt(dot(row, row, count)); }

}  // namespace vtxcore
