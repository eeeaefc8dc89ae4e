// PyramidDrop: after several layers, the image tokens that the prompt's last token is about to look at least leave.
#include <algorithm>
#include <cmath>

#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

// After the i-th of `layers`, floor(`ratio` ** i * V) of the V image tokens that entered the decoder go on, by the
// attention of the prompt's last token in the next layer.
class PyramidDrop : public Reduction {
 public:
  using Reduction::Reduction;
  bool renumbers() const override { return options_.text("positions") == "renumber"; }

  std::optional<Mask> keep_mask(const Boundary& boundary) const override {
    const Ids& layers = options_.layers("layers");
    auto cut = std::find(layers.begin(), layers.end(), boundary.layer - 1) - layers.begin() + 1;
    double entered = static_cast<double>(boundary.present.size());
    auto kept = static_cast<int64_t>(
        std::floor(rounded_to(entered * std::pow(options_.number("ratio"), static_cast<double>(cut)), 9)));
    if (kept >= boundary.count()) return std::nullopt;
    return highest(boundary.next_scores().first, kept);
  }
};

const Registered<PyramidDrop> kPyramidDrop("pyramiddrop");

}  // namespace

}  // namespace vtxcore
