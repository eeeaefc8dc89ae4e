#include "vision/layouts/tiled.hpp"

#include <algorithm>

namespace vtxcore {

Size scaled_to(int64_t width, int64_t height, int64_t longer) {
  double aspect = real_of(width) / real_of(height);
  auto other = static_cast<int64_t>(width >= height ? real_of(longer) / aspect : real_of(longer) * aspect);
  other = std::max<int64_t>(other + other % 2, 1);
  return width >= height ? std::pair(longer, other) : std::pair(other, longer);
}

void TiledLayout::check(const TowerSpec& tower) const {
  if (!fits(tower))
    fail(Kind::bundle, "vtx.json: the image layout has tiles of ", tile_, " pixels and ", tokens_,
         " tokens, the tower takes ", tower.image, " pixels and gives ", tower.tokens, " tokens; export the bundle again");
}

std::vector<View> TiledLayout::tiles(const Size& grid) const {
  std::vector<View> out;
  View{tokens_, {{grid.first * tile_, grid.second * tile_}}}.add_tiles(grid.first, grid.second, out);
  return out;
}

}  // namespace vtxcore
