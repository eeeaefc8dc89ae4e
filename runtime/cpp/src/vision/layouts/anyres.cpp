// The whole image squeezed into one tile, and the image in tiles at its own aspect ratio: LLaVA-NeXT, LLaVA-OneVision.
//
// The tiles' tokens form one grid. What stands for padding is cut off it, a learned newline ends each of its rows, and
// the whole comes after the tokens of the squeezed image. LLaVA-OneVision shrinks large grids, and gives each of several
// images one tile.
#include <algorithm>
#include <cmath>

#include "bundle/fields.hpp"
#include "vision/layouts/tiled.hpp"

namespace vtxcore {
namespace {

constexpr double kClearlyMore = 1.1;  // times the side of the grid that it is shrunk to

// Python's //.
double floored(double value, double by) {
  double quotient = (value - std::fmod(value, by)) / by, whole = std::floor(quotient);
  return quotient - whole > 0.5 ? whole + 1 : whole;
}

// Tiles of `tile` pixels a side with `grid` tokens a side; `resolutions` that tiles may cover. Of equally good ones the
// first is taken. `rounded`: the rows and columns left after unpadding are rounded to 7 digits before they are cut down to
// whole numbers, as transformers does it. `shrink`: a grid of clearly more tokens than that many tiles have is shrunk to
// about as many, bilinearly, before the newlines; and each of several images in a prompt is one tile, padded to a square.
// 0: neither. `padded`: the only tile shows the image so. `unpads`: tokens of padding are cut off and newlines added.
class Anyres : public TiledLayout {
 public:
  Anyres(int64_t tile, int64_t grid, std::vector<Size> resolutions, bool rounded, int64_t shrink, bool padded, bool unpads)
      : TiledLayout(tile, grid * grid), grid_(grid), resolutions_(std::move(resolutions)), rounded_(rounded),
        shrink_(shrink), padded_(padded), unpads_(unpads) {
    bool sound = resolutions_.size() <= static_cast<size_t>(names::kMaxResolutions) && shrink >= 0 &&
                 shrink <= names::kMaxTiles && !(padded && !resolutions_.empty());
    for (auto [width, height] : resolutions_)
      sound = sound && width % tile == 0 && height % tile == 0 && (width / tile) * (height / tile) <= names::kMaxTiles;
    if (!sound)
      fail(Kind::bundle, "layout 'anyres' has resolutions ", resolutions_, " in tiles of ", tile, "; each side must be ",
           "a multiple of the tile, with at most ", names::kMaxTiles, " tiles; export the bundle again");
  }

  int64_t max_tokens() const override {
    int64_t most = resolutions_.empty() ? tokens_ + 1 : 0;
    if (shrink_ > 0) return most_shrunk();
    for (auto [width, height] : resolutions_) most = std::max(most, count(width, height));
    return most;
  }
  int64_t max_views() const override {
    int64_t most = 0;
    for (auto [width, height] : resolutions_) most = std::max(most, width * height / (tile_ * tile_));
    return 1 + most;
  }
  bool newline() const override { return true; }
  LayoutPtr among(size_t images) const override {
    if (shrink_ == 0 || images < 2) return nullptr;
    return std::make_shared<Anyres>(tile_, grid_, std::vector<Size>(), rounded_, shrink_, true, unpads_);
  }
  LayoutPtr released() const override {
    if (shrink_ > 0) return Layout::released();
    if (max_views() < 5)
      fail(Kind::request, "fit 'released' takes 5 tiles and an image has at most ", max_views(),
           " here; leave max_tiles out");
    return std::make_shared<Anyres>(tile_, grid_, std::vector<Size>{{2 * tile_, 2 * tile_}}, rounded_, 0, false, false);
  }

  ImagePlan plan(int64_t width, int64_t height) const override {
    ImagePlan out{{{tokens_}}};
    out.grid = TileGrid{grid_};
    out.squared = padded_ && width != height;
    if (resolutions_.empty()) return out;
    const Size canvas = resolution(width, height);
    const CropBox part = unpadded(width, height, canvas);
    const int64_t columns = canvas.first / tile_, rows = canvas.second / tile_;
    View{tokens_, {inside(width, height, canvas)}, canvas}.add_tiles(columns, rows, out.views);
    out.grid = TileGrid{grid_, columns, rows, part, shrunk(part.right - part.left, part.bottom - part.top), unpads_};
    return out;
  }

 protected:
  bool fits(const TowerSpec& tower) const override { return grid_ == tower.grid && TiledLayout::fits(tower); }
  LayoutPtr limited(int64_t max_views) const override {
    std::vector<Size> left;
    for (auto [width, height] : resolutions_)
      if ((width / tile_) * (height / tile_) <= max_views - 1) left.emplace_back(width, height);
    return std::make_shared<Anyres>(tile_, grid_, std::move(left), rounded_, shrink_, padded_, unpads_);
  }

 private:
  // The columns and rows that a grid of so many has before its newlines.
  Size shrunk(int64_t across, int64_t down) const {
    double ratio = shrink_ > 0 ? std::sqrt(real_of(across * down) / real_of(shrink_ * tokens_)) : 1.0;
    if (!(ratio > kClearlyMore)) return {across, down};
    auto side = [&](int64_t count) { return std::max<int64_t>(1, static_cast<int64_t>(floored(real_of(count), ratio))); };
    return {side(across), side(down)};
  }

  // The most tokens of any cut of any resolution: a grid just too small to be shrunk has more than larger ones.
  int64_t most_shrunk() const {
    int64_t most = resolutions_.empty() ? 1 : 0;
    auto consider = [&](int64_t wide, int64_t high) {
      auto [across, down] = shrunk(wide, high);
      most = std::max(most, down * (across + 1));
    };
    for (auto [width, height] : resolutions_) {
      int64_t across = width / tile_ * grid_, down = height / tile_ * grid_;
      for (int64_t cut = across; cut > 0; cut -= 2) consider(cut, down);
      for (int64_t cut = down; cut > 0; cut -= 2) consider(across, cut);
    }
    return tokens_ + most;
  }

  // The resolution that shows most of an image, and of these the one with the least padding.
  Size resolution(int64_t width, int64_t height) const {
    auto shown = [&](const Size& size) {
      double scale = std::min(real_of(size.first) / real_of(width), real_of(size.second) / real_of(height));
      int64_t across = static_cast<int64_t>(real_of(width) * scale), down = static_cast<int64_t>(real_of(height) * scale);
      int64_t effective = std::min(across * down, width * height);
      return std::pair(effective, effective - size.first * size.second);
    };
    return *std::max_element(resolutions_.begin(), resolutions_.end(),
                             [&](const Size& a, const Size& b) { return shown(a) < shown(b); });  // the first of equals
  }

  // The size of the image within its resolution.
  static Size inside(int64_t width, int64_t height, const Size& canvas) {
    const double across = real_of(canvas.first) / real_of(width), down = real_of(canvas.second) / real_of(height);
    if (across < down)
      return {canvas.first, std::min(static_cast<int64_t>(std::ceil(real_of(height) * across)), canvas.second)};
    return {std::min(static_cast<int64_t>(std::ceil(real_of(width) * down)), canvas.first), canvas.second};
  }

  // The part of the grid of tokens that shows the image.
  CropBox unpadded(int64_t width, int64_t height, const Size& canvas) const {
    int64_t across = canvas.first / tile_ * grid_, down = canvas.second / tile_ * grid_;
    if (!unpads_) return {0, 0, across, down};
    if (real_of(width) / real_of(height) > real_of(across) / real_of(down)) {
      int64_t padding = (down - whole(height, real_of(across) / real_of(width))) / 2;
      return {0, padding, across, down - padding};
    }
    int64_t padding = (across - whole(width, real_of(down) / real_of(height))) / 2;
    return {padding, 0, across - padding, down};
  }

  int64_t whole(int64_t side, double scale) const {
    double value = real_of(side) * scale;
    return static_cast<int64_t>(rounded_ ? rounded_to(value, 7) : value);
  }

  int64_t grid_;
  std::vector<Size> resolutions_;
  bool rounded_;
  int64_t shrink_;
  bool padded_, unpads_;
};

}  // namespace

LayoutPtr make_anyres(Fields& parameters) {
  int64_t tile = parameters.whole("tile", 1, names::kMaxInputSide), grid = parameters.whole("grid", 1, names::kMaxInputSide);
  std::vector<Size> resolutions;
  for (const Json& item : parameters.list("resolutions")) {
    const Json::Array* pair = item.array();
    const int64_t* width = pair && pair->size() == 2 ? (*pair)[0].integer() : nullptr;
    const int64_t* height = width ? (*pair)[1].integer() : nullptr;
    if (!height || *width < 1 || *height < 1 || *width > names::kMaxSide * names::kMaxTiles ||
        *height > names::kMaxSide * names::kMaxTiles)
      parameters.wrong<int>("resolutions", "a list of [width, height]");
    resolutions.emplace_back(*width, *height);
  }
  bool rounded = parameters.flag("rounded");
  int64_t shrink = parameters.has("shrink") ? parameters.whole("shrink", 0, names::kMaxTiles) : 0;
  bool padded = parameters.has("padded") && parameters.flag("padded");
  bool unpads = !parameters.has("unpads") || parameters.flag("unpads");
  return std::make_shared<Anyres>(tile, grid, std::move(resolutions), rounded, shrink, padded, unpads);
}

}  // namespace vtxcore
