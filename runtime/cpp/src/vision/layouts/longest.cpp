// The image in its own shape, shrunk until its longest edge fits: Pixtral, Mistral 3, LightOnOCR.
#include <algorithm>
#include <cmath>

#include "bundle/fields.hpp"
#include "vision/layout.hpp"

namespace vtxcore {
namespace {

constexpr char kEndOfRow[] = "[IMG_BREAK]", kEndOfImage[] = "[IMG_END]";

// Images whose longest edge is above `longest`
// pixels are shrunk to it, and all are stretched to whole multiples of `step` pixels; pixels beyond the last whole square
// give no token. `marks`: text ends each row of tokens.
class LongestEdge : public SquareLayout {
 public:
  LongestEdge(int64_t patch, int64_t merge, int64_t longest, int64_t step, bool marks)
      : SquareLayout(patch, merge, "rotary"), longest_(longest), step_(step), marks_(marks) {
    if (longest < unit_ || product({multiple(longest), multiple(longest)}) > names::kMaxResizedPixels)
      fail(Kind::bundle, "layout 'longest' has edges of ", longest, " pixels in steps of ", step, " and tokens of ", unit_,
           " x ", unit_, "; at least one token must fit, and at most ", grouped(names::kMaxResizedPixels),
           " pixels; export the bundle again");
  }

  std::optional<int64_t> min_tokens() const override { return 1; }
  int64_t max_tokens() const override {
    const int64_t side = multiple(longest_) / unit_;
    return side * side;
  }

  std::optional<int64_t> pixels() const override { return multiple(longest_) * multiple(longest_); }

  LayoutPtr within(int64_t max_pixels) const override {
    const auto root = static_cast<int64_t>(std::sqrt(real_of(max_pixels)));
    const int64_t edge = root / step_ * step_;
    if (edge < unit_)
      fail(Kind::request, "max_pixels is ", max_pixels, "; one token takes ", unit_, " x ", unit_, "; raise it");
    return with(std::min(edge, longest_));
  }

  void choices(std::optional<int64_t>, const Take& take) const override {
    if (take(with(longest_))) return;
    for (int64_t edge = (longest_ - 1) / step_ * step_; edge >= unit_; edge -= step_)
      if (take(with(edge))) return;
  }

  // The text is what transformers' processor prints.
  ImagePlan plan(int64_t width, int64_t height) const override {
    const Size shown = size(width, height);
    const int64_t columns = shown.first / unit_, rows = shown.second / unit_;
    ImagePlan out{{{columns * rows, {shown}}}};
    out.exact = true;
    out.shape = {columns, rows};
    if (!marks_) return out;
    out.spans = Ids(static_cast<size_t>(rows), columns);
    out.marks = std::vector<std::string>(static_cast<size_t>(rows) + 1, kEndOfRow);
    out.marks.front() = "";
    out.marks.back() = kEndOfImage;
    return out;
  }

 private:
  LayoutPtr with(int64_t longest) const { return std::make_shared<LongestEdge>(patch_, merge_, longest, step_, marks_); }

  // The next whole multiple of `step` pixels, with room for a token.
  int64_t multiple(int64_t side) const { return std::max((side + step_ - 1) / step_ * step_, unit_); }

  // Width and height in pixels of an image of this size as the tower sees it.
  Size size(int64_t width, int64_t height) const {
    const double ratio = real_of(std::max(width, height)) / real_of(longest_);
    if (ratio > 1) {
      width = static_cast<int64_t>(std::floor(real_of(width) / ratio));
      height = static_cast<int64_t>(std::floor(real_of(height) / ratio));
    }
    return {multiple(width), multiple(height)};
  }

  int64_t longest_, step_;
  bool marks_;
};

}  // namespace

LayoutPtr make_longest(Fields& parameters) {
  const int64_t patch = parameters.whole("patch"), merge = parameters.whole("merge");
  const int64_t longest = parameters.whole("longest"), step = parameters.whole("step");
  return std::make_shared<LongestEdge>(patch, merge, longest, step, parameters.flag("marks"));
}

}  // namespace vtxcore
