// The whole image squeezed into one tile, and the image in tiles at its own aspect ratio: LLaVA-NeXT, LLaVA-OneVision.
//
// The tiles' tokens form one grid. What stands for padding is cut off it, a learned newline ends each of its rows, and
// the whole comes after the tokens of the squeezed image. LLaVA-OneVision shrinks large grids, and gives each of several
// images one tile.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "bundle/fields.hpp"
#include "vision/layouts/tiled.hpp"

namespace vtxcore {
namespace {

using Size = std::pair<int64_t, int64_t>;  // width, height

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

  int64_t count(int64_t width, int64_t height) const override {
    if (resolutions_.empty()) return tokens_ + 1;
    Part part = unpadded(width, height);
    auto [across, down] = shrunk(part.right - part.left, part.bottom - part.top);
    return tokens_ + down * (across + unpads_);
  }

  std::vector<Pixels> views(const Picture& picture, const ImageSettings& settings) const override {
    bool barred = padded_ && picture.width != picture.height;
    std::vector<Pixels> out{preprocess(picture, barred ? among_several(settings) : settings)};
    if (!resolutions_.empty()) cut_tiles(padded(picture, settings.resample), settings, out);
    return out;
  }

  std::shared_ptr<const ImageTokens> arrange(const Views& views, int64_t width, int64_t height,
                                             const Rows& newline) const override {
    for (const auto& view : views)
      if (static_cast<int64_t>(view->rows.count()) != tokens_)
        fail(Kind::request, "windows cannot merge in an image of tiles: its tokens would be no grid; leave merging out");
    Views parts = views;
    parts.push_back(newlines(newline));
    auto every = joined(parts, views.size() > 1 ? resolution(width, height).first / tile_ : 1);
    Ids which = count_up(0, static_cast<size_t>(tokens_));
    int64_t end = static_cast<int64_t>(every->rows.count()) - 1;  // the one newline, which serves all rows
    if (views.size() == 1) {
      which.push_back(end);
      return every->take(which, false);
    }
    auto [wide, high] = resolution(width, height);
    int64_t columns = wide / tile_;
    Part part = unpadded(width, height);
    int64_t wide_part = part.right - part.left, high_part = part.bottom - part.top;
    auto [across, down] = shrunk(wide_part, high_part);
    Ids columns_of = nearest_steps(wide_part, across),
        rows_of = nearest_steps(high_part, down);  // all of them, where nothing shrinks
    // Where a token of the grid stands among those of the tiles, which follow the squeezed image in raster order.
    auto at = [&](int64_t row, int64_t column) {
      int64_t y = part.top + row, x = part.left + column;
      return tokens_ * (1 + y / grid_ * columns + x / grid_) + y % grid_ * grid_ + x % grid_;
    };
    for (int64_t row : rows_of) {
      for (int64_t column : columns_of) which.push_back(at(row, column));
      if (unpads_) which.push_back(end);
    }
    auto taken = with_uncut(every->take(which, false), *every, columns, high / tile_);
    if (across == wide_part && down == high_part) return taken;
    Ids grid;
    for (int64_t row = 0; row < high_part; ++row)
      for (int64_t column = 0; column < wide_part; ++column) grid.push_back(at(row, column));
    Rows small = shrunk_grid(take(every->rows, grid), high_part, wide_part, down, across);
    auto out = std::make_shared<ImageTokens>(*taken);  // a token of four has the patch index of the nearest
    for (int64_t row = 0; row < down; ++row)
      std::copy_n(small.row(static_cast<size_t>(row * across)), static_cast<size_t>(across) * small.width,
                  out->rows.row(static_cast<size_t>(tokens_ + row * (across + 1))));
    return out;
  }

 protected:
  // The tokens, with those of all whole views, padding included, where a method that wants them was exported.
  std::shared_ptr<const ImageTokens> with_uncut(std::shared_ptr<const ImageTokens> tokens, const ImageTokens& every,
                                                int64_t columns, int64_t rows) const {
    if (every.patches.signals.count(cat(names::kReceived, ".0")) == 0) return tokens;
    Ids which = count_up(0, static_cast<size_t>(tokens_));
    for (int64_t y = 0; y < rows * grid_; ++y)
      for (int64_t x = 0; x < columns * grid_; ++x)
        which.push_back(tokens_ * (1 + y / grid_ * columns + x / grid_) + y % grid_ * grid_ + x % grid_);
    auto out = std::make_shared<ImageTokens>(*tokens);
    out->uncut = every.take(which, false);
    return out;
  }
  bool fits(const TowerSpec& tower) const override { return grid_ == tower.grid && TiledLayout::fits(tower); }
  LayoutPtr with_at_most(int64_t max_views) const override {
    std::vector<Size> left;
    for (auto [width, height] : resolutions_)
      if ((width / tile_) * (height / tile_) <= max_views - 1) left.emplace_back(width, height);
    return std::make_shared<Anyres>(tile_, grid_, std::move(left), rounded_, shrink_, padded_, unpads_);
  }

 private:
  struct Part {
    int64_t left, top, right, bottom;
  };

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

  // The image at its best resolution, on black.
  Picture padded(const Picture& picture, const std::string& resample) const {
    auto [width, height] = resolution(picture.width, picture.height);
    double across = real_of(width) / picture.width, down = real_of(height) / picture.height;
    int64_t wide = width, high = height;
    if (across < down)
      high = std::min(static_cast<int64_t>(std::ceil(picture.height * across)), height);
    else
      wide = std::min(static_cast<int64_t>(std::ceil(picture.width * down)), width);
    Picture small = resized(picture, static_cast<int>(wide), static_cast<int>(high), resample);
    Picture out(static_cast<int>(width), static_cast<int>(height));
    int left = (out.width - small.width) / 2, top = (out.height - small.height) / 2;
    for (int y = 0; y < small.height; ++y)
      std::memcpy(out.pixel(left, top + y), small.pixel(0, y), 3 * static_cast<size_t>(small.width));
    return out;
  }

  // The part of the grid of tokens that shows the image.
  Part unpadded(int64_t width, int64_t height) const {
    auto [wide, high] = resolution(width, height);
    int64_t across = wide / tile_ * grid_, down = high / tile_ * grid_;
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
