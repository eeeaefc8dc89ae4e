// The whole image, and large ones in slices of their own shape row by row after it: MiniCPM-V 4.6.
#include <algorithm>
#include <cmath>
#include <limits>

#include "vision/layouts/native.hpp"

namespace vtxcore {
namespace {

constexpr char kWhole[] = "<image>", kWholeEnd[] = "</image>", kSlice[] = "<slice>", kSliceEnd[] = "</slice>";
constexpr char kId[] = "<image_id>", kIdEnd[] = "</image_id>";

// The multiple of `divisor` nearest to a length, at least one; at a half the even one.
int64_t multiple(int64_t length, int64_t divisor) {
  return std::max<int64_t>(std::llrint(real_of(length) / real_of(divisor)) * divisor, divisor);
}

// Each view has its own shape and as many pixels
// as a square of `side`, to whole tokens. Images of more pixels have slices, too, up to `most`; `most` of 1: none has.
// `numbered`: the prompt has an image's number before it.
class Slices : public SquareLayout {
 public:
  Slices(int64_t patch, int64_t merge, int64_t side, int64_t most, bool numbered)
      : SquareLayout(patch, merge, "nearest"), side_(side), most_(most), numbered_(numbered) {
    if (unit_ > side || most > names::kMaxTiles || product({most, side, side}) > names::kMaxResizedPixels)
      fail(Kind::bundle, "layout 'slices' has up to ", most, " slices of ", side, " x ", side, " pixels in tokens of ",
           unit_, " x ", unit_, "; it needs 1 to ", names::kMaxTiles, " slices of at least one token, and at most ",
           grouped(names::kMaxResizedPixels), " pixels in all; export again");
  }

  int64_t max_views() const override { return most_ == 1 ? 1 : 1 + most_; }
  // A bound: a slice of n has sides that differ n-fold, or n times less than the image's, before rounding.
  int64_t max_tokens() const override {
    int64_t sliced = 0;
    for (int64_t n = 2; n <= most_; ++n)
      sliced = std::max(sliced, n * longest(2 * std::max(real_of(names::kMaxRatio) / real_of(n), real_of(n))));
    return longest(real_of(names::kMaxRatio)) + sliced;
  }

  LayoutPtr limited(int64_t max_views) const override {
    return std::make_shared<Slices>(patch_, merge_, side_, std::clamp<int64_t>(max_views - 1, 1, most_), numbered_);
  }
  LayoutPtr within(int64_t) const override {
    fail(Kind::request, "max_pixels has no effect here: this model sees large images in slices; use max_tiles ",
         "(--max-tiles), 1 for none");
  }

  // The text is what transformers' processor prints.
  ImagePlan plan(int64_t width, int64_t height) const override {
    auto [columns, rows] = grid(width, height);
    ImagePlan out{{view(real_of(width) / real_of(height), {1, 1})}, {kWhole}};
    out.exact = true;
    if (numbered_) out.number = {kId, kIdEnd};
    if (columns * rows > 0) {
      const double across = real_of(multiple(width, columns)) / real_of(columns);
      const double ratio = across / (real_of(multiple(height, rows)) / real_of(rows));
      view(ratio, {columns, rows}).add_tiles(columns, rows, out.views);
    }
    for (int64_t at = 0; at < columns * rows; ++at)
      out.marks.push_back(cat(at == 0 ? kWholeEnd : kSliceEnd, at > 0 && at % columns == 0 ? "\n" : "", kSlice));
    out.marks.emplace_back(columns * rows > 0 ? kSliceEnd : kWholeEnd);
    return out;
  }

 private:
  // The most tokens of a view whose sides differ up to `ratio`-fold.
  int64_t longest(double ratio) const {
    const double side = real_of(side_) / real_of(unit_), most = std::sqrt(ratio);
    int64_t found = 0;
    for (int64_t rows = 1; rows <= down(side + 0.5); ++rows) {
      const double stretch = std::min(most, side / (real_of(rows) - 0.5));
      found = std::max(found, rows * std::max<int64_t>(1, down(side * stretch + 0.5)));
    }
    return found;
  }

  // Columns and rows of an image's slices, the shape nearest to its own; (0, 0) without.
  Size grid(int64_t width, int64_t height) const {
    check_ratio(width, height);
    const int64_t count = std::min(up(real_of(width * height) / real_of(side_ * side_)), most_);
    if (count <= 1) return {0, 0};
    Size best{1, 1};
    double least = std::numeric_limits<double>::infinity();
    const double wanted = std::log(real_of(width) / real_of(height));
    for (int64_t slices = std::max<int64_t>(2, count - 1); slices <= std::min(most_, count + 1); ++slices)
      for (int64_t rows = 1; rows <= slices; ++rows) {
        if (slices % rows != 0) continue;
        const double off = std::abs(wanted - std::log(real_of(slices / rows) / real_of(rows)));
        if (off < least || (off == least && rows > best.second)) best = {slices / rows, rows}, least = off;
      }
    return best;
  }

  // The image as a grid of views whose sides differ `ratio`-fold, each in whole tokens; transformers cuts both sides down to
  // whole pixels first.
  View view(double ratio, const Size& slices) const {
    const int64_t height = down(real_of(side_) / std::sqrt(ratio));
    const int64_t wide = multiple(down(real_of(height) * ratio), unit_), high = multiple(height, unit_);
    return {wide * high / area_, {{slices.first * wide, slices.second * high}}};
  }

  int64_t side_, most_;
  bool numbered_;
};

}  // namespace

LayoutPtr make_slices(Fields& parameters) {
  int64_t patch = parameters.whole("patch"), merge = parameters.whole("merge"), side = parameters.whole("side");
  int64_t most = parameters.whole("most");
  return std::make_shared<Slices>(patch, merge, side, most, parameters.flag("numbered"));
}

}  // namespace vtxcore
