// DivPrune: the image tokens that are least alike enter the decoder.
#include <algorithm>
#include <cmath>

#include "policies/methods/linear.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

// The first token is the one farthest from its nearest other, each next one the farthest from its nearest among those
// chosen, by 1 - cosine; of equal ones the earlier. A share is rounded to the nearest number, at a half to the even one.
class DivPrune : public EntryReduction {
 public:
  using EntryReduction::EntryReduction;
  std::optional<Ids> select(const ImageTokens& image, const PromptText*) const override {
    size_t n = image.rows.count();
    double keep = options_.number("keep");
    int64_t count = keep <= 1 ? std::max<int64_t>(1, std::llrint(keep * static_cast<double>(n))) : number_to_keep(keep, 0);
    if (count >= static_cast<int64_t>(n)) return std::nullopt;
    const Floats& cosines = likeness_of(image).cosines;
    Floats nearest(n, -2);
    for (size_t i = 0; i < n; ++i)
      for (size_t j = 0; j < n; ++j)
        if (i != j) nearest[j] = std::max(nearest[j], cosines[i * n + j]);
    Mask taken(n, 0);
    for (int64_t step = 0; step < count; ++step) {
      size_t best = n;
      for (size_t i = 0; i < n; ++i)
        if (!taken[i] && (best == n || nearest[i] < nearest[best])) best = i;
      for (size_t i = 0; i < n; ++i) nearest[i] = std::max(step ? nearest[i] : -2.0f, cosines[best * n + i]);
      taken[best] = 1;
    }
    return indices_of(taken);
  }
};

const Registered<DivPrune> kDivPrune("divprune");

}  // namespace

}  // namespace vtxcore
