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
  std::optional<Ids> select(const ImageTokens& image, const PromptText*) const override {
    const Patches& patches = image.patches;
    Mask chosen(patches.count(), 0);
    int64_t count = 0;  // of the first view, which is whole; of others the layout may have cut off padding
    for (Ids own : patches.of_views()) {
      auto no_patch = [&](int64_t token) { return patches.places[static_cast<size_t>(token)] < 0; };
      own.erase(std::remove_if(own.begin(), own.end(), no_patch), own.end());
      if (count == 0) count = static_cast<int64_t>(own.size());
      add_view(patches, own, count, chosen);
    }
    return indices_of(chosen);
  }

 private:
  void add_view(const Patches& patches, const Ids& own, int64_t count, Mask& chosen) const {
    auto size = static_cast<int64_t>(own.size());
    auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(count)));
    int64_t most = std::min(size, number_to_keep(options_.number("keep"), size));
    int64_t anchors = std::llrint(static_cast<double>(most) * options_.number("alpha") / 5);
    Ids numbers = take(patches.places, own);
    for (int64_t& number : numbers) number %= count;
    Mask in = highest(take(patches.signals.at(cat(names::kReceived, ".0")), own), anchors),
         near(static_cast<size_t>(count), 0);
    for (int64_t token : indices_of(in))
      for (int64_t step : {int64_t{-1}, int64_t{1}, -side, side}) {
        int64_t number = numbers[static_cast<size_t>(token)] + step;
        near[static_cast<size_t>(std::clamp<int64_t>(number, 0, count - 1))] = 1;
      }
    int64_t left = most - count_of(in);
    for (size_t i = 0; i < in.size() && left > 0; ++i)
      if (!in[i] && near[static_cast<size_t>(numbers[i])]) in[i] = 1, --left;
    Ids others = indices_of(in, false);
    Mask registers = highest(take(take(patches.signals.at(cat(names::kReceived, ".1")), own), others), left);
    for (int64_t register_ : indices_of(registers)) in[static_cast<size_t>(others[static_cast<size_t>(register_)])] = 1;
    for (int64_t token : indices_of(in)) chosen[static_cast<size_t>(own[static_cast<size_t>(token)])] = 1;
  }
};

const Registered<HiPrune> kHiPrune("hiprune");

}  // namespace
}  // namespace vtxcore
