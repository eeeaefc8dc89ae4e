// The little linear algebra that CDPruner and DART need: sums run in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vision/tokens.hpp"

namespace vtxcore {

// In eight sums side by side, which a processor adds up at once.
template <typename A, typename B>
double product(const A* a, const B* b, size_t count) {
  double part[8] = {}, total = 0;
  size_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (size_t j = 0; j < 8; ++j) part[j] += double{a[i + j]} * double{b[i + j]};
  for (; i < count; ++i) total += double{a[i]} * double{b[i]};
  for (double sum : part) total += sum;
  return total;
}

// At least 1e-30, so that nothing is divided by 0.
template <typename Value>
double length_of(const Value* row, size_t count) {
  return std::max(std::sqrt(product(row, row, count)), 1e-30);
}

inline Doubles lengths_of(const Rows& rows) {
  Doubles out(rows.count());
  for (size_t i = 0; i < out.size(); ++i) out[i] = length_of(rows.row(i), rows.width);
  return out;
}

// to[i] -= by * from[i]
void subtract(double by, const double* from, double* to, size_t count);

// Cosines [n, n] of rows of these lengths; that of a row with itself is 1.
Floats cosines_of(const Rows& rows, const Doubles& lengths);

// How alike an image's tokens are, or `own`, those of one of its views; kept with the image.
const Likeness& likeness_of(const ImageTokens& image, const Ids* own = nullptr);

}  // namespace vtxcore
