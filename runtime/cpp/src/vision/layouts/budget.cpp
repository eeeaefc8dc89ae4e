// The image in its own shape, as large as a budget of tokens allows: Gemma 4.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "bundle/fields.hpp"
#include "vision/layout.hpp"

namespace vtxcore {
namespace {

// A token is the mean of a square of `pool` x `pool` patches of `patch` pixels a side. Images are enlarged or shrunk to
// whole squares, at most `tokens` of them, a number that the model was trained for, or by request another up to `most`; 0:
// up to `tokens`.
class TokenBudget : public SquareLayout {
 public:
  TokenBudget(int64_t patch, int64_t pool, int64_t tokens, int64_t most = 0)
      : SquareLayout(patch, pool, "axial"), tokens_(tokens), most_(most) {
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
  void choices(std::optional<int64_t> tokens, const Take& take) const override {
    const int64_t most = tokens ? std::max(*tokens, names::kBudgets[0]) : tokens_;
    for (int64_t budget : budgets())
      if (budget <= most && take(std::make_shared<TokenBudget>(patch_, merge_, budget, most_))) return;
  }
  // Nearly half of the budget is lost where a single row of squares is left.
  std::optional<int64_t> min_tokens() const override { return tokens_ / 2; }

  std::optional<int64_t> pixels() const override { return tokens_ * area_; }

  // With the largest of the model's budgets whose images have at most so many pixels.
  LayoutPtr within(int64_t max_pixels) const override {
    int64_t found = 0;
    for (int64_t tokens : names::kBudgets)
      if (tokens <= tokens_ && tokens * area_ <= max_pixels) found = tokens;
    if (found == 0)
      fail(Kind::request, "max_pixels is ", max_pixels, "; the smallest budget of this model, ", names::kBudgets[0],
           " tokens of ", unit_, " x ", unit_, ", takes ", names::kBudgets[0] * area_, "; raise it");
    return std::make_shared<TokenBudget>(patch_, merge_, found);
  }

  ImagePlan plan(int64_t width, int64_t height) const override {
    ImagePlan out{{own_shape(grid(width, height), unit_)}};
    out.exact = true;
    return out;
  }

 private:
  // Columns and rows of tokens of an image of this size in pixels.
  Size grid(int64_t width, int64_t height) const {
    const double factor = std::sqrt(real_of(tokens_ * unit_ * unit_) / real_of(width * height));
    const auto columns = static_cast<int64_t>(std::floor(factor * real_of(width) / real_of(unit_)));
    const auto rows = static_cast<int64_t>(std::floor(factor * real_of(height) / real_of(unit_)));
    if (rows == 0) return {std::min(width / height, tokens_), 1};
    if (columns == 0) return {1, std::min(height / width, tokens_)};
    return {columns, rows};
  }

  int64_t tokens_, most_;
};

}  // namespace

LayoutPtr make_budget(Fields& parameters) {
  int64_t patch = parameters.whole("patch", 1, names::kMaxInputSide),
          pool = parameters.whole("pool", 1, names::kMaxInputSide);
  int64_t tokens = parameters.whole("tokens");
  return std::make_shared<TokenBudget>(patch, pool, tokens, parameters.whole_or_null("most", 1).value_or(0));
}

}  // namespace vtxcore
