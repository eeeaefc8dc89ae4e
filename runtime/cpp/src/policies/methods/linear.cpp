// Products of many rows, in blocks that stay in the processor's caches.
#include "policies/methods/linear.hpp"

#include <cstring>
#include <memory>

namespace vtxcore {
namespace {

constexpr size_t kTile = 128, kDepth = 256;  // rows of a block, and numbers of each that are multiplied in one go
constexpr size_t kHigh = 4, kWide = 8;       // rows by rows whose sums stay in registers

// sums[i][j] += the sum over d of a[d][i] * b[d][j], for kHigh by kWide of a block's sums.
template <size_t kLanes>
[[gnu::always_inline]] inline void multiply(const double* a, const double* b, size_t depth, double* sums) {
  typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));
  constexpr size_t kParts = kWide / kLanes;
  Lanes total[kHigh][kParts] = {}, part[kParts];
  for (size_t d = 0; d < depth; ++d) {
#pragma GCC unroll 8
    for (size_t j = 0; j < kParts; ++j) std::memcpy(&part[j], b + d * kWide + j * kLanes, sizeof(Lanes));
#pragma GCC unroll 8
    for (size_t i = 0; i < kHigh; ++i)
#pragma GCC unroll 8
      for (size_t j = 0; j < kParts; ++j) total[i][j] += a[d * kHigh + i] * part[j];
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < kHigh; ++i)
#pragma GCC unroll 8
    for (size_t j = 0; j < kParts; ++j)
#pragma GCC unroll 8
      for (size_t lane = 0; lane < kLanes; ++lane) sums[i * kTile + j * kLanes + lane] += total[i][j][lane];
}

template <size_t kLanes>
[[gnu::always_inline]] inline void subtract_lanes(double by, const double* from, double* to, size_t count) {
  typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));
  size_t i = 0;
  for (Lanes x, y; i + kLanes <= count; i += kLanes) {
    std::memcpy(&x, from + i, sizeof x), std::memcpy(&y, to + i, sizeof y);
    y -= by * x;
    std::memcpy(to + i, &y, sizeof y);
  }
  for (; i < count; ++i) to[i] -= by * from[i];
}

using Multiply = void (*)(const double*, const double*, size_t, double*);
using Subtract = void (*)(double, const double*, double*, size_t);

#if defined(__x86_64__)
[[gnu::target("avx2")]] void multiply_avx2(const double* a, const double* b, size_t depth, double* sums) {
  multiply<4>(a, b, depth, sums);
}
[[gnu::target("avx2")]] void subtract_avx2(double by, const double* from, double* to, size_t count) {
  subtract_lanes<4>(by, from, to, count);
}
const bool kHasAvx2 = __builtin_cpu_supports("avx2") != 0;
const Multiply kMultiply = kHasAvx2 ? multiply_avx2 : multiply<2>;
const Subtract kSubtract = kHasAvx2 ? subtract_avx2 : subtract_lanes<2>;
#else
const Multiply kMultiply = multiply<2>;
const Subtract kSubtract = subtract_lanes<2>;
#endif

// Rows from `first` on, up to kTile, as panels [depth][width] one after the other; 0 where there is no row.
void pack(const Rows& rows, size_t first, size_t from, size_t depth, size_t width, Doubles& out) {
  out.assign(kTile * kDepth, 0.0);
  for (size_t i = first; i < std::min(first + kTile, rows.count()); ++i) {
    double* panel = &out[(i - first) / width * width * depth + (i - first) % width];
    for (size_t d = 0; d < depth; ++d) panel[d * width] = double{rows.row(i)[from + d]};
  }
}

}  // namespace

void subtract(double by, const double* from, double* to, size_t count) { kSubtract(by, from, to, count); }

Floats cosines_of(const Rows& rows, const Doubles& lengths) {
  size_t count = rows.count();
  Floats out(count * count, 1.0f);
  Doubles high, wide, sums(kTile * kTile);
  for (size_t top = 0; top < count; top += kTile)
    for (size_t left = 0; left <= top; left += kTile) {
      size_t bottom = std::min(top + kTile, count), right = std::min(left + kTile, count);
      std::fill(sums.begin(), sums.end(), 0.0);
      for (size_t from = 0; from < rows.width; from += kDepth) {
        size_t depth = std::min(kDepth, rows.width - from);
        pack(rows, top, from, depth, kHigh, high);
        pack(rows, left, from, depth, kWide, wide);
        for (size_t i = 0; i < bottom - top; i += kHigh)
          for (size_t j = 0; j < right - left; j += kWide)
            kMultiply(&high[i * depth], &wide[j * depth], depth, &sums[i * kTile + j]);
      }
      for (size_t i = top; i < bottom; ++i)
        for (size_t j = left; j < std::min(right, i); ++j) {
          double cosine = sums[(i - top) * kTile + j - left] / (lengths[i] * lengths[j]);
          out[i * count + j] = out[j * count + i] = static_cast<float>(cosine);
        }
    }
  return out;
}

const Likeness& likeness_of(const ImageTokens& image, const Ids* own) {
  auto& found = image.likeness[own ? own->front() : -1];
  if (!found) {
    const Rows taken = own ? take(image.rows, *own) : Rows();
    const Rows& rows = own ? taken : image.rows;
    Doubles lengths = lengths_of(rows);
    Floats cosines = cosines_of(rows, lengths);
    found = std::make_shared<Likeness>(Likeness{std::move(lengths), std::move(cosines)});
  }
  return *found;
}

}  // namespace vtxcore
