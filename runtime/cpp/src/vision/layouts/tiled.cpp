#include "vision/layouts/tiled.hpp"

#include <algorithm>

#include "base/checks.hpp"

namespace vtxcore {

std::pair<int64_t, int64_t> scaled_to(int64_t width, int64_t height, int64_t longer) {
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

LayoutPtr TiledLayout::limited(int64_t max_views) const {
  check_whole("max_tiles", max_views, 1, names::kMostWhole);
  return with_at_most(max_views);
}

std::shared_ptr<const ImageTokens> TiledLayout::arrange(const Views& views, int64_t, int64_t, const Rows&) const {
  return views.size() > 1 ? joined(views) : views.front();
}

void TiledLayout::cut_tiles(const Picture& picture, const ImageSettings& settings, std::vector<Pixels>& views) const {
  auto side = static_cast<int>(tile_);
  for (int y = 0; y < picture.height; y += side)
    for (int x = 0; x < picture.width; x += side) views.push_back(preprocess(cut(picture, x, y, side, side), settings));
}

}  // namespace vtxcore
