// The image in its own shape, as large as a budget of tokens allows: Gemma 4.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "bundle/fields.hpp"
#include "vision/layout.hpp"

namespace vtxcore {
namespace {

// A token is the mean of a square of `pool` x `pool` patches of `patch` pixels a side. Images are enlarged or shrunk to
// whole squares, at most `tokens` of them, a number that the model was trained for, or by request another up to `most`; 0: up
// to `tokens`.
class TokenBudget : public Layout {
 public:
  TokenBudget(int64_t patch, int64_t pool, int64_t tokens, int64_t most = 0)
      : patch_(patch), pool_(pool), tokens_(tokens), most_(most), unit_(patch * pool) {
    for (int64_t number : {tokens, most ? most : tokens})
      if (std::count(std::begin(names::kBudgets), std::end(names::kBudgets), number) == 0)
        fail(Kind::bundle, "layout 'budget' has ", number, " tokens of ", unit_, " x ", unit_, " pixels; it needs one of ",
             listed(Ids(std::begin(names::kBudgets), std::end(names::kBudgets))));
  }

  int64_t max_tokens() const override { return std::max(tokens_, most_); }
  Ids budgets() const override {
    Ids out;
    for (int64_t tokens : names::kBudgets)
      if (tokens <= max_tokens()) out.insert(out.begin(), tokens);
    return out;
  }
  void choices(int64_t tokens, const Take& take) const override {
    for (int64_t budget : budgets())
      if ((budget <= tokens || budget == names::kBudgets[0]) &&
          take(std::make_shared<TokenBudget>(patch_, pool_, budget, most_)))
        return;
  }
  // Nearly half of the budget is lost where a single row of squares is left.
  std::optional<int64_t> min_tokens() const override { return tokens_ / 2; }

  void check(const TowerSpec& tower) const override { check_squares(tower, patch_, pool_, tower.positions == "axial"); }

  // With the largest of the model's budgets whose images have at most so many pixels.
  LayoutPtr within(int64_t max_pixels) const override {
    int64_t found = 0;
    for (int64_t tokens : names::kBudgets)
      if (tokens <= tokens_ && tokens * unit_ * unit_ <= max_pixels) found = tokens;
    if (found == 0)
      fail(Kind::request, "max_pixels is ", max_pixels, "; the smallest budget of this model, ", names::kBudgets[0],
           " tokens of ", unit_, " x ", unit_, ", takes ", names::kBudgets[0] * unit_ * unit_, "; raise it");
    return std::make_shared<TokenBudget>(patch_, pool_, found);
  }

  std::optional<int64_t> fitting(const std::vector<std::pair<int64_t, int64_t>>& sizes, int64_t tokens) const override {
    std::optional<int64_t> found;
    for (int64_t budget : names::kBudgets) {
      if (budget > tokens_) break;
      const TokenBudget layout(patch_, pool_, budget);
      int64_t total = 0;
      for (auto [width, height] : sizes) total += layout.count(width, height);
      if (total <= tokens) found = budget * unit_ * unit_;
    }
    return found;
  }

  int64_t count(int64_t width, int64_t height) const override {
    auto [columns, rows] = grid(width, height);
    return columns * rows;
  }

  std::vector<Pixels> views(const Picture& picture, const ImageSettings& settings) const override {
    auto [columns, rows] = grid(picture.width, picture.height);
    const int wide = static_cast<int>(columns * unit_), high = static_cast<int>(rows * unit_);
    if (picture.width == wide && picture.height == high) return {normalised(picture, settings)};
    return {normalised(resized(picture, wide, high, settings.resample), settings)};
  }

  std::shared_ptr<const ImageTokens> arrange(const Views& views, int64_t width, int64_t height, const Rows&) const override {
    if (int64_t wanted = count(width, height); static_cast<int64_t>(views.front()->rows.count()) != wanted)
      fail(Kind::bundle, "the vision graph gives ", views.front()->rows.count(), " outputs for ", wanted,
           " tokens; export the bundle again");
    return views.front();
  }

 private:
  // Columns and rows of tokens of an image of this size in pixels.
  std::pair<int64_t, int64_t> grid(int64_t width, int64_t height) const {
    const double factor = std::sqrt(real_of(tokens_ * unit_ * unit_) / real_of(width * height));
    const auto columns = static_cast<int64_t>(std::floor(factor * real_of(width) / real_of(unit_)));
    const auto rows = static_cast<int64_t>(std::floor(factor * real_of(height) / real_of(unit_)));
    if (rows == 0) return {std::min(width / height, tokens_), 1};
    if (columns == 0) return {1, std::min(height / width, tokens_)};
    return {columns, rows};
  }

  int64_t patch_, pool_, tokens_, most_, unit_;
};

}  // namespace

LayoutPtr make_budget(Fields& parameters) {
  int64_t patch = parameters.whole("patch", 1, names::kMaxInputSide),
          pool = parameters.whole("pool", 1, names::kMaxInputSide);
  int64_t tokens = parameters.whole("tokens");
  return std::make_shared<TokenBudget>(patch, pool, tokens, parameters.whole_or_null("most", 1).value_or(0));
}

}  // namespace vtxcore
