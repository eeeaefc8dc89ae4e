// HiPrune: tokens that a middle and a deep block of the tower attend to, and the neighbours of the former, enter.
#include <algorithm>
#include <cmath>

#include "bundle/names.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

class HiPrune : public EntryReduction {
 public:
  using EntryReduction::EntryReduction;
  bool of_uncut() const override { return true; }
  std::optional<Ids> select(const ImageTokens& image, const PromptText*) const override {
    const Patches& patches = image.patches;
    Mask chosen(patches.count(), 0);
    for (Ids own : patches.of_views()) {
      auto no_patch = [&](int64_t token) { return patches.places[static_cast<size_t>(token)] < 0; };
      own.erase(std::remove_if(own.begin(), own.end(), no_patch), own.end());
      add_view(patches, own, chosen);
    }
    return indices_of(chosen);
  }

 private:
  void add_view(const Patches& patches, const Ids& own, Mask& chosen) const {
    auto size = static_cast<int64_t>(own.size());
    auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(size)));
    int64_t most = std::min(size, number_to_keep(options_.number("keep"), size));
    int64_t anchors = std::llrint(static_cast<double>(most) * options_.number("alpha") / 5);
    Mask in = highest(take(patches.signals.at(cat(names::kReceived, ".0")), own), anchors), near(own.size(), 0);
    for (int64_t token : indices_of(in))
      for (int64_t step : {int64_t{-1}, int64_t{1}, -side, side}) {
        near[static_cast<size_t>(std::clamp<int64_t>(token + step, 0, size - 1))] = 1;
      }
    int64_t left = most - count_of(in);
    for (size_t i = 0; i < in.size() && left > 0; ++i)
      if (!in[i] && near[i]) in[i] = 1, --left;
    Ids others = indices_of(in, false);
    Mask registers = highest(take(take(patches.signals.at(cat(names::kReceived, ".1")), own), others), left);
    for (int64_t register_ : indices_of(registers)) in[static_cast<size_t>(others[static_cast<size_t>(register_)])] = 1;
    for (int64_t token : indices_of(in)) chosen[static_cast<size_t>(own[static_cast<size_t>(token)])] = 1;
  }
};

const Registered<HiPrune> kHiPrune("hiprune");

}  // namespace
}  // namespace vtxcore
