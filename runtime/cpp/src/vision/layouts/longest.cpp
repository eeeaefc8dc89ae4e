// The image in its own shape, shrunk until its longest edge fits: Pixtral, Mistral 3, LightOnOCR.
#include <algorithm>
#include <cmath>

#include "bundle/fields.hpp"
#include "vision/layout.hpp"

namespace vtxcore {
namespace {

constexpr char kEndOfRow[] = "[IMG_BREAK]", kEndOfImage[] = "[IMG_END]";

// A token is a square of `merge` x `merge` patches of `patch` pixels a side. Images whose longest edge is above `longest`
// pixels are shrunk to it, and all are stretched to whole multiples of `step` pixels; pixels beyond the last whole square give
// no token. `marks`: text ends each row of tokens.
class LongestEdge : public Layout {
 public:
  LongestEdge(int64_t patch, int64_t merge, int64_t longest, int64_t step, bool marks)
      : patch_(patch), merge_(merge), longest_(longest), step_(step), unit_(product({patch, merge})), marks_(marks) {
    if (longest < unit_ || product({multiple(longest), multiple(longest)}) > names::kMaxResizedPixels)
      fail(Kind::bundle, "layout 'longest' has edges of ", longest, " pixels in steps of ", step, " and tokens of ", unit_,
           " x ", unit_, "; at least one token must fit, and at most ", grouped(names::kMaxResizedPixels),
           " pixels; export the bundle again");
  }

  bool has_marks() const override { return marks_; }
  std::optional<int64_t> min_tokens() const override { return 1; }
  int64_t max_tokens() const override {
    const int64_t side = multiple(longest_) / unit_;
    return side * side;
  }

  void check(const TowerSpec& tower) const override { check_squares(tower, patch_, merge_, tower.positions == "rotary"); }

  LayoutPtr within(int64_t max_pixels) const override {
    const auto root = static_cast<int64_t>(std::sqrt(real_of(max_pixels)));
    const int64_t edge = root / step_ * step_;
    if (edge < unit_)
      fail(Kind::request, "max_pixels is ", max_pixels, "; one token takes ", unit_, " x ", unit_, "; raise it");
    return with(std::min(edge, longest_));
  }

  std::optional<int64_t> fitting(const std::vector<std::pair<int64_t, int64_t>>& sizes, int64_t tokens) const override {
    std::optional<int64_t> pixels;
    choices(tokens, [&](const LayoutPtr& choice) {
      const auto& layout = static_cast<const LongestEdge&>(*choice);
      int64_t total = 0;
      for (auto [width, height] : sizes) {
        auto [across, down] = layout.size(width, height);
        total += (across / unit_ + (marks_ ? 1 : 0)) * (down / unit_);
      }
      const int64_t side = multiple(layout.longest_);
      if (total <= tokens) pixels = side * side;
      return total <= tokens;
    });
    return pixels;
  }

  void choices(int64_t, const Take& take) const override {
    if (take(with(longest_))) return;
    for (int64_t edge = (longest_ - 1) / step_ * step_; edge >= unit_; edge -= step_)
      if (take(with(edge))) return;
  }

  int64_t count(int64_t width, int64_t height) const override {
    auto [across, down] = size(width, height);
    return across / unit_ * (down / unit_);
  }

  // The text is what transformers' processor prints.
  MarkedImage placed(int64_t width, int64_t height) const override {
    if (!marks_) return Layout::placed(width, height);
    auto [across, down] = size(width, height);
    const auto rows = static_cast<size_t>(down / unit_);
    MarkedImage out{Ids(rows, across / unit_), {""}};
    for (size_t row = 1; row < rows; ++row) out.marks.push_back(kEndOfRow);
    out.marks.push_back(kEndOfImage);
    return out;
  }

  std::vector<Pixels> views(const Picture& picture, const ImageSettings& settings) const override {
    auto [across, down] = size(picture.width, picture.height);
    return {normalised(resized(picture, static_cast<int>(across), static_cast<int>(down), settings.resample), settings)};
  }

  // One token after the other, row by row.
  std::shared_ptr<const ImageTokens> arrange(const Views& views, int64_t width, int64_t height, const Rows&) const override {
    auto out = std::make_shared<ImageTokens>(*views.front());
    const auto expected = static_cast<size_t>(count(width, height));
    if (out->rows.count() != expected)
      fail(Kind::bundle, "the vision graph gives ", out->rows.count(), " outputs for ", expected,
           " tokens; export the bundle again");
    out->patches.places = count_up(0, expected);
    return out;
  }

 private:
  LayoutPtr with(int64_t longest) const { return std::make_shared<LongestEdge>(patch_, merge_, longest, step_, marks_); }

  // The next whole multiple of `step` pixels, with room for a token.
  int64_t multiple(int64_t side) const { return std::max((side + step_ - 1) / step_ * step_, unit_); }

  // Width and height in pixels of an image of this size as the tower sees it.
  std::pair<int64_t, int64_t> size(int64_t width, int64_t height) const {
    const double ratio = real_of(std::max(width, height)) / real_of(longest_);
    if (ratio > 1) {
      width = static_cast<int64_t>(std::floor(real_of(width) / ratio));
      height = static_cast<int64_t>(std::floor(real_of(height) / ratio));
    }
    return {multiple(width), multiple(height)};
  }

  int64_t patch_, merge_, longest_, step_, unit_;
  bool marks_;
};

}  // namespace

LayoutPtr make_longest(Fields& parameters) {
  const int64_t patch = parameters.whole("patch"), merge = parameters.whole("merge");
  const int64_t longest = parameters.whole("longest"), step = parameters.whole("step");
  return std::make_shared<LongestEdge>(patch, merge, longest, step, parameters.flag("marks"));
}

}  // namespace vtxcore
