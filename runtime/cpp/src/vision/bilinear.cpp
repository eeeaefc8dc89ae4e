#include "vision/bilinear.hpp"

#include <algorithm>

namespace vtxcore {
namespace {

double middle(int64_t size, int64_t wanted, int64_t at) {
  return (static_cast<double>(at) + 0.5) * (static_cast<double>(size) / static_cast<double>(wanted)) - 0.5;
}

// Of each step along one side the two that it lies between, and the second one's share.
struct Between {
  int64_t first, second;
  float share;
};

Between between(int64_t size, int64_t wanted, int64_t at) {
  double place = std::max(middle(size, wanted, at), 0.0);
  auto first = static_cast<int64_t>(place);
  return {first, std::min(first + 1, size - 1), static_cast<float>(place - static_cast<double>(first))};
}

void mix(const float* first, const float* second, float share, size_t width, float* out) {
  for (size_t d = 0; d < width; ++d) out[d] = first[d] * (1 - share) + second[d] * share;
}

}  // namespace

Rows shrunk_grid(const Rows& grid, int64_t height, int64_t width, int64_t rows, int64_t columns) {
  auto at = [](int64_t y, int64_t x, int64_t wide) { return static_cast<size_t>(y * wide + x); };
  Rows high(static_cast<size_t>(rows * width), grid.width), out(static_cast<size_t>(rows * columns), grid.width);
  for (int64_t y = 0; y < rows; ++y) {
    Between b = between(height, rows, y);
    for (int64_t x = 0; x < width; ++x)
      mix(grid.row(at(b.first, x, width)), grid.row(at(b.second, x, width)), b.share, grid.width, high.row(at(y, x, width)));
  }
  for (int64_t x = 0; x < columns; ++x) {
    Between b = between(width, columns, x);
    for (int64_t y = 0; y < rows; ++y)
      mix(high.row(at(y, b.first, width)), high.row(at(y, b.second, width)), b.share, grid.width,
          out.row(at(y, x, columns)));
  }
  return out;
}

Ids nearest(int64_t size, int64_t wanted) {
  Ids out;
  for (int64_t at = 0; at < wanted; ++at)
    out.push_back(static_cast<int64_t>(std::min(middle(size, wanted, at) + 0.5, static_cast<double>(size - 1))));
  return out;
}

}  // namespace vtxcore
