// What layouts of tiles have in common.
#pragma once

#include "vision/layout.hpp"

namespace vtxcore {

// Text around tiles and frames of SmolVLM, and before a whole image.
inline constexpr char kAroundTile[] = "<fake_token_around_image>", kBeforeWhole[] = "<global-img>";

// The width and height with a longer side of `longer`, and the other one even, as transformers rounds it.
Size scaled_to(int64_t width, int64_t height, int64_t longer);

// Tiles of `tile` pixels a side and `tokens` each.
class TiledLayout : public Layout {
 public:
  TiledLayout(int64_t tile, int64_t tokens) : tile_(tile), tokens_(tokens) {}

  int64_t max_tokens() const override { return tokens_ * max_views(); }
  void check(const TowerSpec& tower) const override;

 protected:
  virtual bool fits(const TowerSpec& tower) const { return tile_ == tower.image && tokens_ == tower.tokens; }
  // The views of an image that is resized to tiles.
  std::vector<View> tiles(const Size& grid) const;

  const int64_t tile_, tokens_;
};

// Columns and rows of `fewest` to `most` tiles: the nearest shape; of equal ones the largest whose tiles the image fills by
// half.
Size tile_grid(int64_t width, int64_t height, int64_t tile, int64_t fewest, int64_t most);

}  // namespace vtxcore
