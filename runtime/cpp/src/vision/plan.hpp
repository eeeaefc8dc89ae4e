// Plans of images: the views that the tower sees of one image, and the order and text of their tokens. A layout makes a plan
// from an image's size alone; how it is carried out is the same for all layouts.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bundle/manifest.hpp"
#include "vision/picture.hpp"
#include "vision/tokens.hpp"

namespace vtxcore {

using Views = std::vector<std::shared_ptr<const ImageTokens>>;
using Size = std::pair<int64_t, int64_t>;  // width and height, or columns and rows

struct CropBox {
  int64_t left, top, right, bottom;
};

// A pass of the tower that gives `tokens`: the image, resized to each of `sizes` in turn, and of that the `box`. With a
// `canvas` the resized image is in the middle of black of this size. Sizes and boxes are in pixels.
struct View {
  int64_t tokens;
  std::vector<Size> sizes = {};
  std::optional<Size> canvas = std::nullopt;
  std::optional<CropBox> box = std::nullopt;

  // Adds this view in equal tiles, row by row, of as many tokens each.
  void add_tiles(int64_t columns, int64_t rows, std::vector<View>& views) const;
  // The picture of which the view is a part; only if it has sizes.
  Picture picture(const Picture& image, const std::string& resample) const;
};

// The order of the tokens of an overview and of `columns` x `rows` tiles of `side` x `side` tokens after it. The tiles'
// tokens form one grid, of which the `box` is kept and shrunk to `size` bilinearly. `ends`: a learned newline ends each row.
// Without tiles one newline ends the overview.
struct TileGrid {
  int64_t side, columns = 1, rows = 0;
  CropBox box{0, 0, 0, 0};
  Size size{0, 0};
  bool ends = true;

  int64_t tokens() const;
  // The tokens of the views in this order. Throws Error(request) if views have merged windows.
  std::shared_ptr<const ImageTokens> arrange(const Views& views, const Rows& newline) const;
};

// The passes of the tower that an image takes, and its tokens in the prompt. `marks`: the prompt's text before, between and
// after `spans` of tokens, which are those of each view unless given; without text all tokens are one span. Tokens follow
// view by view, or in the order of a `grid` of tiles.
struct ImagePlan {
  std::vector<View> views;
  std::vector<std::string> marks = {};
  Ids spans = {};
  std::optional<std::pair<std::string, std::string>> number = std::nullopt;  // as of `MarkedImage`
  bool squared = false;                                                      // the image is padded to a square
  bool exact = false;  // the tower gives these numbers of tokens, or the bundle is wrong
  std::optional<TileGrid> grid = std::nullopt;
  std::optional<Size> shape = std::nullopt;  // of the only view's tokens, one a patch, row by row
  bool placed = false;                       // each of these has its row and column as position

  int64_t tokens() const;
  MarkedImage in_prompt() const;
  // What the tower gets for an image of this plan's size: of each view [3, height, width] float32.
  std::vector<Pixels> pixels(const Picture& picture, const ImageSettings& settings) const;
  // The image's tokens from those of its views; `newline` [1, hidden], [0, hidden] if there is none.
  std::shared_ptr<const ImageTokens> arrange(const Views& token_views, const Rows& newline) const;
};

// Throws Error(bundle) unless a vision graph gives `expected` tokens.
void check_outputs(const ImageTokens& tokens, int64_t expected);

// The whole image as a view of its own shape, of so many tokens of `unit` x `unit` pixels.
View own_shape(const Size& grid, int64_t unit);

// Adds the offsets of a grid's tokens, row by row: a time, their row and their column.
void add_squares(Positions& offsets, const Size& grid, int64_t time = 0);

}  // namespace vtxcore
