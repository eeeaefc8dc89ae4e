// VisionZip: the tokens that the class token looks at most enter, and the others merged into a few.
#include <algorithm>
#include <array>
#include <cmath>

#include "bundle/names.hpp"
#include "policies/methods/linear.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

// A token that enters: its place in the order (squeezed image or tiles, kind, two numbers of its place there), its view
// and patch there (-1 the class token), and the view's tokens within the tower of which it is a sum, the target first.
struct Token {
  std::array<int64_t, 4> order;
  int64_t view, patch;
  Ids sources;
};

class VisionZip : public EntryReduction {
 public:
  using EntryReduction::EntryReduction;
  std::optional<MergedTokens> merge(const ImageTokens& image) const override {
    const TowerTokens& tower = *image.tower;
    auto states = static_cast<int64_t>(tower.attention.size() / tower.views);
    std::vector<Token> tokens;
    for (int64_t view = 0; view < static_cast<int64_t>(tower.views); ++view) add_view(tower, view, states, tokens);
    std::sort(tokens.begin(), tokens.end(), [](const Token& a, const Token& b) { return a.order < b.order; });
    MergedTokens out;
    out.patches.merged = Mask(tokens.size(), 0);
    if (tower.views > 1) out.patches.views.emplace();
    for (const Token& token : tokens) {
      out.patches.places.push_back(token.patch < 0 ? names::kClassToken : token.view * (states - 1) + token.patch);
      if (out.patches.views) out.patches.views->push_back(token.view);
      out.starts.push_back(static_cast<int64_t>(out.sources.size()));
      for (int64_t source : token.sources) {
        bool target = source == token.sources.front();
        out.sources.push_back(token.view * states + source);
        out.weights.push_back(target ? 1 : static_cast<float>(1.0 / static_cast<double>(token.sources.size() - 1)));
      }
    }
    return out;
  }

 private:
  void add_view(const TowerTokens& tower, int64_t view, int64_t states, std::vector<Token>& out) const {
    int64_t count = states - 1, tiled = view > 0;
    int64_t dominant = std::min(count + 1, number_to_keep(options_.number("dominant"), count));
    int64_t contextual = std::min(count + 1 - dominant, number_to_keep(options_.number("contextual"), count));
    auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(count)));
    int64_t row = tiled ? (view - 1) / tower.columns : 0, column = tiled ? (view - 1) % tower.columns : 0;
    auto first = static_cast<size_t>(view * states + 1);
    auto begin = tower.attention.begin() + static_cast<std::ptrdiff_t>(first);
    Mask looked_at = highest(Floats(begin, begin + static_cast<std::ptrdiff_t>(count)), dominant - 1);
    out.push_back({{tiled, tiled, view, 0}, view, names::kClassToken, {0}});
    for (int64_t patch : indices_of(looked_at))
      out.push_back({{tiled, 1 - tiled, row * side + patch / side, column * side + patch % side}, view, patch, {patch + 1}});
    Ids left = indices_of(looked_at, false);
    auto step = std::max<int64_t>(1, static_cast<int64_t>(left.size()) / std::max<int64_t>(1, contextual));
    auto key = [&](int64_t patch) { return tower.keys.row(first + static_cast<size_t>(patch)); };
    size_t width = tower.keys.width, begun = out.size();
    for (int64_t number = 0; number < contextual; ++number) {
      int64_t patch = left[static_cast<size_t>(number * step)];
      out.push_back({{tiled, 2, view, patch}, view, patch, {patch + 1}});
    }
    for (size_t i = 0; i < left.size() && contextual > 0; ++i) {
      if (static_cast<int64_t>(i) % step == 0 && static_cast<int64_t>(i) / step < contextual) continue;  // a target
      size_t nearest = begun;
      float most = -2;
      for (size_t n = begun; n < out.size(); ++n) {
        double lengths = length_of(key(left[i]), width) * length_of(key(out[n].patch), width);
        auto alike = static_cast<float>(product(key(left[i]), key(out[n].patch), width) / lengths);
        if (alike > most) most = alike, nearest = n;
      }
      out[nearest].sources.push_back(left[i] + 1);
    }
  }
};

const Registered<VisionZip> kVisionZip("visionzip");

}  // namespace
}  // namespace vtxcore
