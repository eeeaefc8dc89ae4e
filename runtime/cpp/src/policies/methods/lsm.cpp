// LSM, local spatial merging: windows of like patches become one token in the tower (MustDrop Eq. 5).
#include <cmath>
#include <limits>

#include "bundle/names.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

// With order=merged-first merged tokens stand before all others, the most similar window first, as in the code that
// came with the paper; of equal ones the earlier.
class Lsm : public EntryReduction {
 public:
  using EntryReduction::EntryReduction;
  Extras vision_inputs() const override { return {{names::kTau, static_cast<float>(options_.number("tau"))}}; }
  std::optional<Ids> select(const ImageTokens& image, const PromptText*) const override {
    if (options_.text("order") == "raster") return std::nullopt;
    const Patches& patches = image.patches;
    const Floats& similarity = patches.signals.at(names::kSimilarity);
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    Floats rank(patches.count());
    for (size_t i = 0; i < rank.size(); ++i)
      rank[i] = patches.places[i] < 0 ? -kInfinity : patches.merged[i] ? -similarity[i] : kInfinity;
    Ids order = count_up(0, rank.size());
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return rank[static_cast<size_t>(a)] < rank[static_cast<size_t>(b)]; });
    return order;
  }
};

const Registered<Lsm> kLsm("lsm");

}  // namespace

}  // namespace vtxcore
