// Pillow's resampling: a filter scaled to the reduction, in fixed point, across and down.
#include <algorithm>
#include <cmath>

#include "vision/picture.hpp"

namespace vtxcore {
namespace {

constexpr double kPi = 3.14159265358979323846;
constexpr int kBits = 32 - 8 - 2;  // of a weight's fraction: bytes times weights, and two bits to spare for overshoot

double sinc(double x) { return x == 0.0 ? 1.0 : std::sin(x * kPi) / (x * kPi); }

double box(double x) { return x > -0.5 && x <= 0.5 ? 1.0 : 0.0; }
double bilinear(double x) { return std::max(0.0, 1.0 - std::abs(x)); }
double hamming(double x) {
  x = std::abs(x);
  return x == 0.0 ? 1.0 : x >= 1.0 ? 0.0 : sinc(x) * (0.54 + 0.46 * std::cos(x * kPi));
}
double bicubic(double x) {
  constexpr double a = -0.5;
  x = std::abs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * a : 0.0;
}
double lanczos(double x) { return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

struct Filter {
  double (*value)(double);
  double support;
};

Filter filter_of(const std::string& name) {
  if (name == "box") return {box, 0.5};
  if (name == "bilinear") return {bilinear, 1.0};
  if (name == "hamming") return {hamming, 1.0};
  if (name == "lanczos") return {lanczos, 3.0};
  return {bicubic, 2.0};
}

// For each output pixel the first input pixel, and the weights of it and those after it.
struct Weights {
  std::vector<int> first;
  std::vector<std::vector<int>> values;
};

Weights weights_of(int in, int out, const Filter& filter) {
  double scale = static_cast<double>(in) / out, wide = std::max(scale, 1.0), support = filter.support * wide;
  Weights weights;
  for (int pixel = 0; pixel < out; ++pixel) {
    double center = (pixel + 0.5) * scale;
    int low = std::max(0, static_cast<int>(center - support + 0.5));
    int high = std::min(in, static_cast<int>(center + support + 0.5));
    std::vector<double> exact;
    double total = 0;
    for (int i = low; i < high; ++i) {
      exact.push_back(filter.value((i - center + 0.5) * (1.0 / wide)));
      total += exact.back();
    }
    std::vector<int> fixed;
    for (double weight : exact) {
      if (total != 0.0) weight /= total;
      fixed.push_back(static_cast<int>((weight < 0 ? -0.5 : 0.5) + weight * (1 << kBits)));
    }
    weights.first.push_back(low);
    weights.values.push_back(std::move(fixed));
  }
  return weights;
}

uint8_t unscaled(int sum) { return static_cast<uint8_t>(std::clamp(sum >> kBits, 0, 255)); }

Picture across(const Picture& in, int width, const Filter& filter) {
  Picture out(width, in.height);
  Weights weights = weights_of(in.width, width, filter);
  for (int y = 0; y < in.height; ++y)
    for (int x = 0; x < width; ++x) {
      const std::vector<int>& values = weights.values[static_cast<size_t>(x)];
      const uint8_t* from = in.pixel(weights.first[static_cast<size_t>(x)], y);
      int sums[3] = {1 << (kBits - 1), 1 << (kBits - 1), 1 << (kBits - 1)};
      for (size_t i = 0; i < values.size(); ++i)
        for (size_t c = 0; c < 3; ++c) sums[c] += from[3 * i + c] * values[i];
      for (int c = 0; c < 3; ++c) out.pixel(x, y)[c] = unscaled(sums[c]);
    }
  return out;
}

Picture down(const Picture& in, int height, const Filter& filter) {
  Picture out(in.width, height);
  Weights weights = weights_of(in.height, height, filter);
  size_t row = 3 * static_cast<size_t>(in.width);
  std::vector<int> sums(row);
  for (int y = 0; y < height; ++y) {
    const std::vector<int>& values = weights.values[static_cast<size_t>(y)];
    std::fill(sums.begin(), sums.end(), 1 << (kBits - 1));
    const uint8_t* from = in.pixel(0, weights.first[static_cast<size_t>(y)]);
    for (size_t i = 0; i < values.size(); ++i, from += row)
      for (size_t x = 0; x < row; ++x) sums[x] += from[x] * values[i];
    uint8_t* to = out.pixel(0, y);
    for (size_t x = 0; x < row; ++x) to[x] = unscaled(sums[x]);
  }
  return out;
}

// Which pass comes first, as Pillow has it since release 13: down, where that takes away more than twice as many rows as
// columns go.
bool downwards_first(const Picture& in, int width, int height) {
  return width != in.width && height < in.height && 2 * (in.width - width) < in.height - height;
}

// The input pixel that each output pixel takes; summed up step by step, as Pillow does, rounding and all.
std::vector<int> nearest_of(int in, int out) {
  double step = static_cast<double>(in) / out, at = step * 0.5;
  std::vector<int> found;
  for (int pixel = 0; pixel < out; ++pixel, at += step) found.push_back(std::min(in - 1, static_cast<int>(at)));
  return found;
}

Picture nearest(const Picture& in, int width, int height) {
  Picture out(width, height);
  std::vector<int> columns = nearest_of(in.width, width), rows = nearest_of(in.height, height);
  for (int y = 0; y < height; ++y)
    for (int x = 0; x < width; ++x) {
      const uint8_t* from = in.pixel(columns[static_cast<size_t>(x)], rows[static_cast<size_t>(y)]);
      std::copy(from, from + 3, out.pixel(x, y));
    }
  return out;
}

}  // namespace

Picture resized(const Picture& picture, int width, int height, const std::string& name) {
  if (picture.width == width && picture.height == height) return picture;
  if (name == "nearest") return nearest(picture, width, height);
  Filter filter = filter_of(name);
  // A side that stays as it is is not run through its filter. Bytes lie between the two passes, so their order shows.
  if (downwards_first(picture, width, height)) return across(down(picture, height, filter), width, filter);
  const Picture* source = &picture;
  Picture wide, out;
  if (width != picture.width) {
    wide = across(picture, width, filter);
    source = &wide;
  }
  if (height != picture.height) {
    out = down(*source, height, filter);
    source = &out;
  }
  return *source;
}

}  // namespace vtxcore
