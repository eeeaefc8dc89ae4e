// Small images at native resolution, large ones in tiles row by row and then as a whole: LFM2-VL.
#include "base/checks.hpp"
#include "vision/layouts/native.hpp"
#include "vision/layouts/tiled.hpp"

namespace vtxcore {
namespace {

constexpr char kStart[] = "<|image_start|>", kEnd[] = "<|image_end|>", kThumbnail[] = "<|img_thumbnail|>";

// How large images are tiled: `fewest` to `most` tiles of `side` pixels a side, and with `thumbnail` the whole image as a
// small one has it. Images of over `tolerance` times the most pixels of small ones are large; with `most` of 1 none is.
struct Tiling {
  int64_t side, fewest, most;
  double tolerance;
  bool thumbnail;
};

// As `Native`, but text has positions of one part.
class NativeTiles : public Native {
 public:
  NativeTiles(const Native& whole, const Tiling& tiling) : Native(whole), tiling_(tiling) {
    bool tiled = 2 <= tiling.fewest && tiling.fewest <= tiling.most && tiling.most <= names::kMaxTiles;
    if (!(tiled || (tiling.fewest == 1 && tiling.most == 1)) || tiling.side % unit_ != 0 || !(tiling.tolerance >= 1))
      fail(Kind::bundle, "layout 'native_tiles' has ", tiling.fewest, " to ", tiling.most, " tiles of ", tiling.side,
           " pixels for images of over ", python_repr(tiling.tolerance), " times the pixels of small ones; it needs 2 to ",
           names::kMaxTiles, " tiles of whole tokens of ", unit_, " pixels, or 1, and 1 times or more; export again");
  }

  int64_t max_tokens() const override {
    const int64_t whole = Native::max_tokens();
    return tiling_.most == 1 ? whole : std::max(whole, tiling_.most * tile_tokens() + (tiling_.thumbnail ? whole : 0));
  }
  int64_t max_views() const override { return tiling_.most == 1 ? 1 : tiling_.most + (tiling_.thumbnail ? 1 : 0); }
  bool has_marks() const override { return true; }

  void check(const TowerSpec& tower) const override {
    if (patch_ != tower.patch || merge_ != tower.square || tiling_.side != tower.image || tower.positions != "stretched")
      fail(Kind::bundle, "vtx.json: the image layout has tokens of ", merge_, " x ", merge_, " patches of ", patch_,
           " pixels and tiles of ", tiling_.side, ", the tower of ", tower.square, " x ", tower.square, " of ", tower.patch,
           " and tiles of ", tower.image, "; export the bundle again");
  }

  LayoutPtr limited(int64_t max_views) const override {
    check_whole("max_tiles", max_views, 1, names::kMostWhole);
    Tiling fewer = tiling_;
    fewer.most = std::min(tiling_.most, max_views - (tiling_.thumbnail ? 1 : 0));
    if (fewer.most < 2) fewer.most = 1;
    fewer.fewest = std::min(fewer.fewest, fewer.most);
    return std::make_shared<NativeTiles>(*this, fewer);
  }
  LayoutPtr within(int64_t max_pixels) const override {
    if (tiling_.most > 1)
      fail(Kind::request, "max_pixels has no effect on tiles: this model sees large images in tiles of one size; use ",
           "max_tiles (--max-tiles), 1 for none");
    check_pixels(max_pixels);
    return std::make_shared<NativeTiles>(at_most(max_pixels), tiling_);
  }
  std::optional<int64_t> fitting(const std::vector<Grid>& sizes, int64_t tokens) const override {
    if (tiling_.most > 1) return std::nullopt;
    for (int64_t each = most_ / area_; each > 0; --each) {
      const NativeTiles layout(at_most(each * area_), tiling_);
      int64_t total = 0;
      for (auto [width, height] : sizes) total += layout.count(width, height);
      if (total <= tokens) return each * area_;
    }
    return std::nullopt;
  }

  void choices(int64_t tokens, const Take& take) const override {
    if (max_views() == 1) return Native::choices(tokens, take);
    for (int64_t views = max_views(); views > 1; --views)
      if (take(limited(views))) return;
    limited(1)->choices(tokens, take);
  }

  int64_t count(int64_t width, int64_t height) const override {
    int64_t total = 0;
    for (int64_t span : placed(width, height).spans) total += span;
    return total;
  }

  // The text is what transformers' processor prints.
  MarkedImage placed(int64_t width, int64_t height) const override {
    const int64_t whole = Native::count(width, height);
    auto [columns, rows] = tiles(width, height);
    if (columns * rows == 0) return {{whole}, {kStart, kEnd}};
    MarkedImage out{Ids(static_cast<size_t>(columns * rows), tile_tokens()), {}};
    for (int64_t row = 1; row <= rows; ++row)
      for (int64_t column = 1; column <= columns; ++column)
        out.marks.push_back(cat(out.marks.empty() ? kStart : "", "<|img_row_", row, "_col_", column, "|>"));
    if (tiling_.thumbnail) out.spans.push_back(whole), out.marks.emplace_back(kThumbnail);
    out.marks.emplace_back(kEnd);
    return out;
  }

  std::vector<Pixels> views(const Picture& picture, const ImageSettings& settings) const override {
    auto [columns, rows] = tiles(picture.width, picture.height);
    std::vector<Pixels> out;
    const auto side = static_cast<int>(tiling_.side);
    if (columns * rows > 0) {
      const Picture large =
          resized(picture, static_cast<int>(columns) * side, static_cast<int>(rows) * side, settings.resample);
      for (int y = 0; y < large.height; y += side)
        for (int x = 0; x < large.width; x += side) out.push_back(normalised(cut(large, x, y, side, side), settings));
    }
    if (columns * rows == 0 || tiling_.thumbnail) out.push_back(Native::views(picture, settings).front());
    return out;
  }
  std::shared_ptr<const ImageTokens> arrange(const Views& views, int64_t width, int64_t height, const Rows&) const override {
    const Ids spans = placed(width, height).spans;
    for (size_t i = 0; i < views.size(); ++i)
      if (views[i]->rows.count() != static_cast<size_t>(spans.at(i)))
        fail(Kind::bundle, "the vision graph gives ", views[i]->rows.count(), " outputs for ", spans[i],
             " tokens; export the bundle again");
    return joined(views);
  }

 protected:
  Grid rounded(int64_t width, int64_t height) const override {
    auto [columns, rows] = Native::rounded(width, height);
    return {std::max<int64_t>(1, columns), std::max<int64_t>(1, rows)};
  }

 private:
  int64_t tile_tokens() const { return (tiling_.side / unit_) * (tiling_.side / unit_); }

  // Columns and rows of the tiles of an image, 0 if it is seen in one piece.
  Grid tiles(int64_t width, int64_t height) const {
    auto [columns, rows] = Native::rounded(width, height);
    const double across = real_of(std::max(patch_, columns * unit_)), down = real_of(std::max(patch_, rows * unit_));
    if (tiling_.most == 1 || across * down <= real_of(most_) * tiling_.tolerance) return {0, 0};
    return tile_grid(width, height, tiling_.side, tiling_.fewest, tiling_.most);
  }

  Tiling tiling_;
};

}  // namespace

LayoutPtr make_native_tiles(Fields& parameters) {
  const Native whole = read_native(parameters);
  int64_t side = parameters.whole("tile", 1, names::kMaxInputSide), fewest = parameters.whole("fewest");
  int64_t most = parameters.whole("most");
  const double tolerance = parameters.number("tolerance");
  return std::make_shared<NativeTiles>(whole, Tiling{side, fewest, most, tolerance, parameters.flag("thumbnail")});
}

}  // namespace vtxcore
