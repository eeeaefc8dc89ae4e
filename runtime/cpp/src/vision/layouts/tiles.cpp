// The image stretched to the grid of tiles nearest to its shape, and after the tiles the whole of it: InternVL.
#include <algorithm>
#include <cmath>
#include <limits>

#include "bundle/fields.hpp"
#include "vision/layouts/tiled.hpp"

namespace vtxcore {
namespace {

// `fewest` to `most` tiles of `tile` pixels a side and `tokens` each, and where there are several, the whole image,
// squeezed into one more tile, the last.
class Tiles : public TiledLayout {
 public:
  Tiles(int64_t tile, int64_t tokens, int64_t fewest, int64_t most)
      : TiledLayout(tile, tokens), fewest_(fewest), most_(most) {
    if (fewest > most || most > names::kMaxTiles)
      fail(Kind::bundle, "layout 'tiles' has ", fewest, " to ", most, " tiles of ", tile, " pixels and ", tokens,
           " tokens; it needs at least 1 of each and at most ", names::kMaxTiles, " tiles; export the bundle again");
  }

  int64_t max_views() const override { return most_ + (most_ > 1 ? 1 : 0); }

  LayoutPtr limited(int64_t max_views) const override {
    int64_t most = std::min(most_, std::max<int64_t>(1, max_views - 1));
    return std::make_shared<Tiles>(tile_, tokens_, std::min(fewest_, most), most);
  }

  ImagePlan plan(int64_t width, int64_t height) const override {
    ImagePlan out{tiles(tile_grid(width, height, tile_, fewest_, most_))};
    if (out.views.size() > 1) out.views.push_back({tokens_});
    return out;
  }

 private:
  int64_t fewest_, most_;
};

}  // namespace

Size tile_grid(int64_t width, int64_t height, int64_t tile, int64_t fewest, int64_t most) {
  std::vector<Size> grids;
  for (int64_t columns = 1; columns <= most; ++columns)
    for (int64_t rows = 1; rows <= most / columns; ++rows)
      if (columns * rows >= fewest) grids.emplace_back(columns, rows);
  std::stable_sort(grids.begin(), grids.end(), [](auto a, auto b) { return a.first * a.second < b.first * b.second; });
  Size best{1, 1};
  double least = std::numeric_limits<double>::infinity();
  for (auto [columns, rows] : grids) {
    double shape = static_cast<double>(width) / static_cast<double>(height);
    double off = std::abs(shape - static_cast<double>(columns) / static_cast<double>(rows));
    bool filled = 2 * width * height > tile * tile * columns * rows;
    if (off < least || (off == least && filled)) best = {columns, rows}, least = off;
  }
  return best;
}

LayoutPtr make_tiles(Fields& parameters) {
  int64_t tile = parameters.whole("tile", 1, names::kMaxInputSide), tokens = parameters.whole("tokens", 1, 1 << 24);
  int64_t fewest = parameters.whole("fewest"), most = parameters.whole("most");
  return std::make_shared<Tiles>(tile, tokens, fewest, most);
}

}  // namespace vtxcore
