// FastV: after one layer, the image tokens that the prompt's last token looks at least are left out.
#include <cmath>

#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

// After layer `k`, `ratio` of the image tokens leave, rounded down; positions are kept (FastV section 4.1).
class FastV : public Reduction {
 public:
  using Reduction::Reduction;
  std::optional<int64_t> last_query_keeps(int64_t count) const override {
    return count - static_cast<int64_t>(std::floor(rounded_to(options_.number("ratio") * static_cast<double>(count), 9)));
  }
  std::optional<Mask> keep_mask(const Boundary& boundary) const override {
    return most_attended(boundary, *last_query_keeps(boundary.count()));
  }
};

const Registered<FastV> kFastV("fastv");

}  // namespace

}  // namespace vtxcore
