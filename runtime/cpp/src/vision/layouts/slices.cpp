// The whole image, and large ones in slices of their own shape row by row after it: MiniCPM-V 4.6.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checks.hpp"
#include "vision/layouts/native.hpp"

namespace vtxcore {
namespace {

constexpr char kWhole[] = "<image>", kWholeEnd[] = "</image>", kSlice[] = "<slice>", kSliceEnd[] = "</slice>";
constexpr char kId[] = "<image_id>", kIdEnd[] = "</image_id>";

// The multiple of `divisor` nearest to a length, at least one; at a half the even one.
int64_t multiple(int64_t length, int64_t divisor) {
  return std::max<int64_t>(std::llrint(real_of(length) / real_of(divisor)) * divisor, divisor);
}

// A token is a square of `merge` x `merge` patches of `patch` pixels a side. Each view has its own shape and as many pixels
// as a square of `side`, to whole tokens. Images of more pixels have slices, too, up to `most`; `most` of 1: none has.
// `numbered`: the prompt has an image's number before it.
class Slices : public Layout {
 public:
  Slices(int64_t patch, int64_t merge, int64_t side, int64_t most, bool numbered)
      : patch_(patch), merge_(merge), side_(side), most_(most), unit_(product({patch, merge})), numbered_(numbered) {
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
  bool has_marks() const override { return true; }

  void check(const TowerSpec& tower) const override { check_squares(tower, patch_, merge_, tower.positions == "nearest"); }

  LayoutPtr limited(int64_t max_views) const override {
    check_whole("max_tiles", max_views, 1, names::kMostWhole);
    return std::make_shared<Slices>(patch_, merge_, side_, std::clamp<int64_t>(max_views - 1, 1, most_), numbered_);
  }
  LayoutPtr within(int64_t) const override {
    fail(Kind::request, "max_pixels has no effect here: this model sees large images in slices; use max_tiles ",
         "(--max-tiles), 1 for none");
  }

  int64_t count(int64_t width, int64_t height) const override {
    int64_t total = 0;
    for (int64_t span : spans(width, height)) total += span;
    return total;
  }

  // The text is what transformers' processor prints.
  MarkedImage placed(int64_t width, int64_t height) const override {
    MarkedImage out{spans(width, height), {kWhole}};
    auto [columns, rows] = grid(width, height);
    for (int64_t at = 0; at < columns * rows; ++at)
      out.marks.push_back(cat(at == 0 ? kWholeEnd : kSliceEnd, at > 0 && at % columns == 0 ? "\n" : "", kSlice));
    out.marks.emplace_back(columns * rows > 0 ? kSliceEnd : kWholeEnd);
    if (numbered_) out.number = {kId, kIdEnd};
    return out;
  }

  std::vector<Pixels> views(const Picture& picture, const ImageSettings& settings) const override {
    auto at = [&](const Grid& size) {
      return resized(picture, static_cast<int>(size.first), static_cast<int>(size.second), settings.resample);
    };
    auto [columns, rows] = grid(picture.width, picture.height);
    std::vector<Pixels> out{normalised(at(whole(picture.width, picture.height)), settings)};
    if (columns * rows == 0) return out;
    auto [width, height] = slice(picture.width, picture.height);
    const Picture large = at({columns * width, rows * height});
    const auto across = static_cast<int>(width), down = static_cast<int>(height);
    for (int y = 0; y < large.height; y += down)
      for (int x = 0; x < large.width; x += across) out.push_back(normalised(cut(large, x, y, across, down), settings));
    return out;
  }

  std::shared_ptr<const ImageTokens> arrange(const Views& views, int64_t width, int64_t height, const Rows&) const override {
    const Ids wanted = spans(width, height);
    for (size_t i = 0; i < views.size(); ++i)
      if (views[i]->rows.count() != static_cast<size_t>(wanted.at(i)))
        fail(Kind::bundle, "the vision graph gives ", views[i]->rows.count(), " outputs for ", wanted[i],
             " tokens; export the bundle again");
    return views.size() > 1 ? joined(views) : views.front();
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
  Grid grid(int64_t width, int64_t height) const {
    check_ratio(width, height);
    const int64_t count = std::min(up(real_of(width * height) / real_of(side_ * side_)), most_);
    if (count <= 1) return {0, 0};
    Grid best{1, 1};
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

  // Width and height of the view of the whole image, and of each slice, in pixels.
  Grid whole(int64_t width, int64_t height) const { return shaped(real_of(width) / real_of(height)); }
  Grid slice(int64_t width, int64_t height) const {
    auto [columns, rows] = grid(width, height);
    const double across = real_of(multiple(width, columns)) / real_of(columns);
    return shaped(across / (real_of(multiple(height, rows)) / real_of(rows)));
  }

  // Width and height of a view, in whole tokens; transformers cuts both down to whole pixels first.
  Grid shaped(double ratio) const {
    const int64_t height = down(real_of(side_) / std::sqrt(ratio));
    return {multiple(down(real_of(height) * ratio), unit_), multiple(height, unit_)};
  }

  // Tokens of each view.
  Ids spans(int64_t width, int64_t height) const {
    auto tokens = [this](const Grid& size) { return size.first * size.second / (unit_ * unit_); };
    Ids out{tokens(whole(width, height))};
    auto [columns, rows] = grid(width, height);
    if (columns * rows > 0) out.insert(out.end(), static_cast<size_t>(columns * rows), tokens(slice(width, height)));
    return out;
  }

  int64_t patch_, merge_, side_, most_, unit_;
  bool numbered_;
};

}  // namespace

LayoutPtr make_slices(Fields& parameters) {
  int64_t patch = parameters.whole("patch"), merge = parameters.whole("merge"), side = parameters.whole("side");
  int64_t most = parameters.whole("most");
  return std::make_shared<Slices>(patch, merge, side, most, parameters.flag("numbered"));
}

}  // namespace vtxcore
