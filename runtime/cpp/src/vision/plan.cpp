#include "vision/plan.hpp"

#include <algorithm>
#include <cstring>

namespace vtxcore {
namespace {

Picture resized_to(const Picture& picture, const Size& size, const std::string& resample) {
  return resized(picture, static_cast<int>(size.first), static_cast<int>(size.second), resample);
}

Picture part_of(const Picture& picture, const CropBox& box) {
  return cut(picture, static_cast<int>(box.left), static_cast<int>(box.top), static_cast<int>(box.right - box.left),
             static_cast<int>(box.bottom - box.top));
}

}  // namespace

void View::add_tiles(int64_t columns, int64_t rows, std::vector<View>& views) const {
  auto [width, height] = canvas.value_or(sizes.back());
  int64_t across = width / columns, down = height / rows;
  for (int64_t y = 0; y < rows * down; y += down)
    for (int64_t x = 0; x < columns * across; x += across)
      views.push_back({tokens, sizes, canvas, CropBox{x, y, x + across, y + down}});
}

Picture View::picture(const Picture& image, const std::string& resample) const {
  Picture out = resized_to(image, sizes.front(), resample);
  for (size_t i = 1; i < sizes.size(); ++i) out = resized_to(out, sizes[i], resample);
  if (!canvas) return out;
  Picture black(static_cast<int>(canvas->first), static_cast<int>(canvas->second));
  int left = (black.width - out.width) / 2, top = (black.height - out.height) / 2;
  for (int y = 0; y < out.height; ++y)
    std::memcpy(black.pixel(left, top + y), out.pixel(0, y), 3 * static_cast<size_t>(out.width));
  return black;
}

int64_t TileGrid::tokens() const { return side * side + (rows > 0 ? size.second * (size.first + ends) : 1); }

std::shared_ptr<const ImageTokens> TileGrid::arrange(const Views& views, const Rows& newline) const {
  const int64_t of_view = side * side;
  for (const auto& view : views)
    if (static_cast<int64_t>(view->rows.count()) != of_view)
      fail(Kind::request, "windows cannot merge in an image of tiles: its tokens would be no grid; leave merging out");
  Views parts = views;
  parts.push_back(newlines(newline));
  auto candidates = joined(parts, columns);
  const Ids overview = count_up(0, static_cast<size_t>(of_view));
  const int64_t end = static_cast<int64_t>(candidates->rows.count()) - 1;  // the one newline, which serves all rows
  Ids which = overview;
  if (rows == 0) {
    which.push_back(end);
    return candidates->take(which, false);
  }
  // The tokens of a part of the grid; the tiles' tokens follow the overview in raster order.
  auto part = [&](const Ids& down, const Ids& across, bool ended, Ids& out) {
    for (int64_t y : down) {
      for (int64_t x : across) out.push_back(of_view * (1 + y / side * columns + x / side) + y % side * side + x % side);
      if (ended) out.push_back(end);
    }
  };
  auto steps = [](int64_t first, int64_t last, int64_t count) {  // all of them, where nothing shrinks
    Ids out = nearest_steps(last - first, count);
    for (int64_t& step : out) step += first;
    return out;
  };
  part(steps(box.top, box.bottom, size.second), steps(box.left, box.right, size.first), ends, which);
  auto out = std::make_shared<ImageTokens>(*candidates->take(which, false));
  if (candidates->patches.signals.count(cat(names::kReceived, ".0")) > 0) {
    Ids uncut = overview;
    part(count_up(0, static_cast<size_t>(rows * side)), count_up(0, static_cast<size_t>(columns * side)), false, uncut);
    out->uncut = candidates->take(uncut, false);
  }
  const int64_t wide = box.right - box.left, high = box.bottom - box.top;
  auto [across, down] = size;
  if (across == wide && down == high) return out;
  Ids grid;
  part(count_up(box.top, static_cast<size_t>(high)), count_up(box.left, static_cast<size_t>(wide)), false, grid);
  Rows small = shrunk_grid(take(candidates->rows, grid), high, wide, down, across);
  for (int64_t row = 0; row < down; ++row)  // a token of four has the patch index of the nearest
    std::copy_n(small.row(static_cast<size_t>(row * across)), static_cast<size_t>(across) * small.width,
                out->rows.row(static_cast<size_t>(of_view + row * (across + 1))));
  return out;
}

int64_t ImagePlan::tokens() const {
  if (grid) return grid->tokens();
  int64_t total = 0;
  for (const View& view : views) total += view.tokens;
  return total;
}

MarkedImage ImagePlan::in_prompt() const {
  if (marks.empty()) return MarkedImage::plain(tokens());
  MarkedImage out{spans, marks};
  for (size_t i = 0; spans.empty() && i < views.size(); ++i) out.spans.push_back(views[i].tokens);
  out.number = number;
  return out;
}

std::vector<Pixels> ImagePlan::pixels(const Picture& picture, const ImageSettings& declared) const {
  const ImageSettings settings = squared ? among_several(declared) : declared;
  std::vector<Pixels> out;
  const View* former = nullptr;
  Picture source;  // of the `former` view
  for (const View& view : views) {
    if (!view.sizes.empty() && !(former && former->sizes == view.sizes && former->canvas == view.canvas)) {
      source = view.picture(picture, settings.resample);
      former = &view;
    }
    const Picture& shown = view.sizes.empty() ? picture : source;
    auto add = [&](const Picture& part) {
      out.push_back(settings.own_size() ? normalised(part, settings) : preprocess(part, settings));
    };
    if (view.box)
      add(part_of(shown, *view.box));
    else
      add(shown);
  }
  return out;
}

std::shared_ptr<const ImageTokens> ImagePlan::arrange(const Views& token_views, const Rows& newline) const {
  if (grid) return grid->arrange(token_views, newline);
  for (size_t i = 0; exact && i < token_views.size(); ++i) check_outputs(*token_views[i], views.at(i).tokens);
  if (!shape) return token_views.size() > 1 ? joined(token_views) : token_views.front();
  auto out = std::make_shared<ImageTokens>(*token_views.front());
  out->patches.places = count_up(0, static_cast<size_t>(tokens()));
  if (!placed) return out;
  add_squares(out->offsets.emplace(), *shape);
  out->span = std::max(shape->first, shape->second);
  return out;
}

void check_outputs(const ImageTokens& tokens, int64_t expected) {
  if (tokens.rows.count() != static_cast<size_t>(expected))
    fail(Kind::bundle, "the vision graph gives ", tokens.rows.count(), " outputs for ", expected,
         " tokens; export the bundle again");
}

View own_shape(const Size& grid, int64_t unit) {
  return {grid.first * grid.second, {{grid.first * unit, grid.second * unit}}};
}

void add_squares(Positions& offsets, const Size& grid, int64_t time) {
  for (int64_t row = 0; row < grid.second; ++row)
    for (int64_t column = 0; column < grid.first; ++column) offsets.push_back({time, row, column});
}

}  // namespace vtxcore
