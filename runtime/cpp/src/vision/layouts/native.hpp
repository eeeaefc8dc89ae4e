// The image at its own resolution, to the nearest multiple of a token's square: Qwen-VL, GLM-OCR.
//
// The number of an image's tokens depends on its size; each has a row and a column as position, in addition to the time.
#pragma once

#include <algorithm>
#include <cmath>
#include <tuple>

#include "bundle/fields.hpp"
#include "vision/layout.hpp"

namespace vtxcore {

inline int64_t up(double value) { return static_cast<int64_t>(std::ceil(value)); }
inline int64_t down(double value) { return static_cast<int64_t>(std::floor(value)); }

// Throws Error(image) for an image whose sides differ too much.
inline void check_ratio(int64_t width, int64_t height) {
  if (std::max(width, height) > names::kMaxRatio * std::min(width, height))
    fail(Kind::image, "the image is ", width, "x", height, " pixels; its sides may differ at most ", names::kMaxRatio,
         "-fold; cut off some of its longer side");
}

// Columns and rows of squares of `unit` pixels a side next to a size, at a half the even one.
inline Size nearest_grid(int64_t width, int64_t height, int64_t unit) {
  return {std::llrint(real_of(width) / real_of(unit)), std::llrint(real_of(height) / real_of(unit))};
}

// Pictures of whole squares of `unit` pixels a side, of `least` to `most` pixels in all.
struct PixelBounds {
  int64_t unit, least, most;

  // Columns and rows of squares, `rounded` if all `counted` frames are within the bounds. Else those of `frames` frames made
  // smaller or larger: transformers counts an even number, and resizes all.
  Size grid(int64_t width, int64_t height, Size rounded, int64_t frames = 1, int64_t counted = 1) const {
    double wide = real_of(width), high = real_of(height), side = real_of(unit);
    int64_t pixels = counted * rounded.first * rounded.second * unit * unit;
    if (pixels > most) {
      double shrink = std::sqrt(real_of(frames * height * width) / real_of(most));
      return {std::max<int64_t>(1, down(wide / shrink / side)), std::max<int64_t>(1, down(high / shrink / side))};
    }
    if (pixels < least) {
      double enlarge = std::sqrt(real_of(least) / real_of(frames * height * width));
      return {up(wide * enlarge / side), up(high * enlarge / side)};
    }
    return rounded;
  }
};

// An image's sides, enlarged by one factor if one of them is below `unit`, and rounded down.
inline Size grown(int64_t width, int64_t height, int64_t unit) {
  if (std::min(width, height) >= unit) return {width, height};
  const double scale = real_of(unit) / real_of(std::min(width, height));
  return {static_cast<int64_t>(real_of(width) * scale), static_cast<int64_t>(real_of(height) * scale)};
}

// How images with a side below a square's are first enlarged: both sides by one factor and rounded down, or the short side
// to a square's and the other rounded.
enum class Small { kept, floored, nearest };

// Images are resized to whole squares, between `least` and `most` pixels. `flat`: positions are single numbers.
class Native : public SquareLayout {
 public:
  Native(int64_t patch, int64_t merge, int64_t least, int64_t most, Small small = Small::kept, bool flat = false,
         const char* positions = "rotary")
      : SquareLayout(patch, merge, positions), least_(least), most_(most), small_(small), flat_(flat) {
    if (area_ > most || least > most || most > names::kMaxResizedPixels)
      fail(Kind::bundle, "layout 'native' has ", least, " to ", most, " pixels in tokens of ", unit_, " x ", unit_,
           "; at least one token must fit, and at most ", grouped(names::kMaxResizedPixels),
           " pixels; export the bundle again");
  }

  std::optional<int64_t> min_tokens() const override { return (least_ + area_ - 1) / area_; }
  // The bound for images that are shrunk, to a single row too, and for enlarged ones.
  int64_t max_tokens() const override {
    double most = real_of(most_) / real_of(area_), fewest = real_of(least_) / real_of(area_);
    int64_t enlarged = 1;
    for (int64_t side = up(std::sqrt(fewest)), end = up(std::sqrt(names::kMaxRatio * fewest)); side <= end; ++side)
      enlarged = std::max(enlarged, side * up(fewest / real_of(std::max<int64_t>(1, side - 1))));
    return std::max({down(most), down(std::sqrt(names::kMaxRatio * most)), enlarged});
  }

  std::optional<int64_t> pixels() const override { return most_; }

  LayoutPtr within(int64_t max_pixels) const override {
    check_pixels(max_pixels);
    return std::make_shared<Native>(at_most(max_pixels));
  }
  void choices(std::optional<int64_t> tokens, const Take& take) const override {
    for (int64_t most = std::min(tokens.value_or(most_), most_ / area_); most > 0; --most)
      if (take(within(most * area_))) return;
  }

  ImagePlan plan(int64_t width, int64_t height) const override {
    const Size size = grid(width, height);
    ImagePlan out{{own_shape(size, unit_)}};
    out.exact = true;
    out.shape = size;
    out.placed = !flat_;
    return out;
  }

 protected:
  void check_pixels(int64_t max_pixels) const {
    if (max_pixels < area_)
      fail(Kind::request, "max_pixels is ", max_pixels, "; one token takes ", unit_, " x ", unit_, "; raise it");
  }

  Native at_most(int64_t max_pixels) const {
    int64_t most = std::min(max_pixels, most_);
    return {patch_, merge_, std::min(least_, most), most, small_, flat_};
  }

  Size grid(int64_t width, int64_t height) const {
    check_ratio(width, height);
    std::tie(width, height) = enlarged(width, height);
    return PixelBounds{unit_, least_, most_}.grid(width, height, rounded(width, height));
  }

  // The sides that an image counts with.
  Size enlarged(int64_t width, int64_t height) const {
    if (small_ == Small::floored) return grown(width, height, unit_);
    if (small_ == Small::nearest && height < unit_) {
      width = std::llrint(real_of(width * unit_) / real_of(height));
      height = unit_;
    }
    if (small_ == Small::nearest && width < unit_) {
      height = std::llrint(real_of(height * unit_) / real_of(width));
      width = unit_;
    }
    return {width, height};
  }

  // Next to an image's size, whatever its pixels; at a half the even one.
  virtual Size rounded(int64_t width, int64_t height) const { return nearest_grid(width, height, unit_); }

  int64_t least_, most_;
  Small small_;
  bool flat_;
};

// Of a layout's parameters those of `Native`.
Native read_native(Fields& parameters);

}  // namespace vtxcore
