// Tiles row by row, each after text that says where it stands, and after them the whole image: SmolVLM, Idefics3.
#include <algorithm>
#include <cmath>

#include "bundle/fields.hpp"
#include "vision/layouts/tiled.hpp"

namespace vtxcore {
namespace {

double real(int64_t value) { return static_cast<double>(value); }
int64_t whole(double value) { return static_cast<int64_t>(value); }
int64_t tiles_of(int64_t pixels, int64_t tile) { return (pixels + tile - 1) / tile; }

// The views of a grid: its tiles, and where there are several, the whole image.
int64_t views_of(const Size& grid) {
  int64_t tiles = grid.first * grid.second;
  return tiles + (tiles > 1 ? 1 : 0);
}

// Tiles of `tile` pixels a side and `tokens` each, up to `side` of them along the longer side, and the whole image. Images
// are resized to the largest size that gives at most `most` tiles, the whole image counted; where that is one tile, it is
// the only one.
class MarkedTiles : public TiledLayout {
 public:
  MarkedTiles(int64_t tile, int64_t tokens, int64_t side, int64_t most)
      : TiledLayout(tile, tokens), side_(side), most_(most) {
    if (side > names::kMaxMarkedSide)
      fail(Kind::bundle, "layout 'marked' has ", side, " tiles a side of ", tile, " pixels and ", tokens,
           " tokens, at most ", most, " an image; it needs at least 1 of each and at most ", names::kMaxMarkedSide,
           " a side; export again");
  }

  // A square image has the most tiles, but where fewer are allowed a strip may come nearer to that number.
  int64_t max_views() const override {
    int64_t found = 1;
    for (int64_t columns = 1; columns <= side_; ++columns)
      for (int64_t rows = 1; rows <= side_; ++rows)
        if (int64_t views = views_of({columns, rows}); views <= most_) found = std::max(found, views);
    return found;
  }
  LayoutPtr limited(int64_t max_views) const override {
    return std::make_shared<MarkedTiles>(tile_, tokens_, side_, std::min(most_, max_views));
  }

  // The text is what transformers' processor prints.
  ImagePlan plan(int64_t width, int64_t height) const override {
    const Size size = resized_size(width, height);
    auto [columns, rows] = covering(size);
    const std::string frame = kAroundTile, all = frame + kBeforeWhole;
    const View whole{tokens_, {size, {columns * tile_, rows * tile_}}};
    if (columns * rows == 1) return {{whole}, {all, frame}};
    ImagePlan out;
    whole.add_tiles(columns, rows, out.views);
    out.views.push_back(whole);
    for (int64_t row = 1; row <= rows; ++row)
      for (int64_t column = 1; column <= columns; ++column)
        out.marks.push_back(cat(row > 1 && column == 1 ? "\n" : "", frame, "<row_", row, "_col_", column, ">"));
    out.marks.push_back("\n\n" + all);
    out.marks.push_back(frame);
    return out;
  }

 private:
  // Of a resized image: its longer side in whole tiles, and the shorter one as that makes it, in whole tiles.
  Size covering(const Size& size) const {
    auto [width, height] = size;
    double aspect = real(width) / real(height);
    if (width >= height) {
      int64_t columns = tiles_of(width, tile_);
      return {columns, tiles_of(whole(real(columns * tile_) / aspect), tile_)};
    }
    int64_t rows = tiles_of(height, tile_);
    return {tiles_of(whole(real(rows * tile_) * aspect), tile_), rows};
  }

  // The size of an image whose longer side has as many whole tiles as are allowed.
  Size resized_size(int64_t width, int64_t height) const {
    Size size;
    for (int64_t side = side_; side > 0; --side) {
      size = scaled_to(width, height, side * tile_);
      if (views_of(covering(size)) <= most_) break;
    }
    return size;
  }

  int64_t side_, most_;
};

}  // namespace

LayoutPtr make_marked(Fields& parameters) {
  int64_t tile = parameters.whole("tile", 1, names::kMaxInputSide), tokens = parameters.whole("tokens", 1, 1 << 24);
  int64_t side = parameters.whole("side"), most = parameters.whole("most");
  return std::make_shared<MarkedTiles>(tile, tokens, side, most);
}

}  // namespace vtxcore
