// Small images at native resolution, large ones in tiles row by row and then as a whole: LFM2-VL.
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
  std::optional<int64_t> pixels() const override { return tiling_.most > 1 ? std::nullopt : Native::pixels(); }

  void check(const TowerSpec& tower) const override {
    if (patch_ != tower.patch || merge_ != tower.square || tiling_.side != tower.image || tower.positions != "stretched")
      fail(Kind::bundle, "vtx.json: the image layout has tokens of ", merge_, " x ", merge_, " patches of ", patch_,
           " pixels and tiles of ", tiling_.side, ", the tower of ", tower.square, " x ", tower.square, " of ", tower.patch,
           " and tiles of ", tower.image, "; export the bundle again");
  }

  LayoutPtr limited(int64_t max_views) const override {
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
  void choices(std::optional<int64_t> tokens, const Take& take) const override {
    if (max_views() == 1) return Native::choices(tokens, take);
    for (int64_t views = max_views(); views > 1; --views)
      if (take(limited(views))) return;
    limited(1)->choices(tokens, take);
  }

  // The text is what transformers' processor prints.
  ImagePlan plan(int64_t width, int64_t height) const override {
    const View whole = own_shape(grid(width, height), unit_);
    auto [columns, rows] = tiles(width, height);
    ImagePlan out;
    out.exact = true;
    if (columns * rows > 0)
      View{tile_tokens(), {{columns * tiling_.side, rows * tiling_.side}}}.add_tiles(columns, rows, out.views);
    for (int64_t row = 1; row <= rows; ++row)
      for (int64_t column = 1; column <= columns; ++column)
        out.marks.push_back(cat(out.marks.empty() ? kStart : "", "<|img_row_", row, "_col_", column, "|>"));
    if (out.views.empty() || tiling_.thumbnail) {
      out.marks.emplace_back(out.views.empty() ? kStart : kThumbnail);
      out.views.push_back(whole);
    }
    out.marks.emplace_back(kEnd);
    return out;
  }

 protected:
  Size rounded(int64_t width, int64_t height) const override {
    auto [columns, rows] = Native::rounded(width, height);
    return {std::max<int64_t>(1, columns), std::max<int64_t>(1, rows)};
  }

 private:
  int64_t tile_tokens() const { return (tiling_.side / unit_) * (tiling_.side / unit_); }

  // Columns and rows of the tiles of an image, 0 if it is seen in one piece.
  Size tiles(int64_t width, int64_t height) const {
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
