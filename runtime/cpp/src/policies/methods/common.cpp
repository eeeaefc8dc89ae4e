#include <algorithm>
#include <cmath>

#include "policies/methods/reductions.hpp"

namespace vtxcore {

int64_t number_to_keep(double keep, int64_t count) {
  constexpr double kAll = 1e15;  // more than there are tokens, and still a whole number of 64 bits
  return keep <= 1 ? share(keep, count) : static_cast<int64_t>(std::min(keep, kAll));
}

float pairwise_sum(const float* values, size_t count) {
  if (count < 8) {
    float total = 0;
    for (size_t i = 0; i < count; ++i) total += values[i];
    return total;
  }
  if (count <= 128) {
    float part[8];
    for (size_t j = 0; j < 8; ++j) part[j] = values[j];
    size_t i = 8;
    for (; i + 8 <= count; i += 8)
      for (size_t j = 0; j < 8; ++j) part[j] += values[i + j];
    float total = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    for (; i < count; ++i) total += values[i];
    return total;
  }
  size_t half = count / 2;
  half -= half % 8;
  return pairwise_sum(values, half) + pairwise_sum(values + half, count - half);
}

}  // namespace vtxcore
