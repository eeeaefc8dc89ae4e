// FastV: after one layer, the image tokens that the prompt's last token looks at least are left out.
#include <cmath>

#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

// After layer `k`, `ratio` of the image tokens leave, rounded down; positions are kept (FastV section 4.1).
class FastV : public Method {
 public:
  FastV(int64_t k, double ratio) : k_(k), ratio_(ratio) {
    if (k < 1) fail(Kind::request, "fastv: k is ", k, "; give the layer after which rows leave, from 1 on");
    if (!(ratio >= 0 && ratio <= 1))
      fail(Kind::request, "fastv: ratio is ", python_repr(ratio), "; give the share to leave out, from 0 to 1");
  }
  std::string name() const override { return "fastv"; }
  std::string spec() const override { return cat("fastv:k=", k_, ",ratio=", spec_number(ratio_)); }
  Needs needs() const override {
    Needs needs;
    needs.cuts = {k_ + 1};
    needs.queries = {k_};
    return needs;
  }
  std::optional<Mask> keep_mask(const Boundary& boundary) const override {
    int64_t count = boundary.count();
    auto leave = static_cast<int64_t>(std::floor(rounded_to(ratio_ * static_cast<double>(count), 9)));
    if (leave == 0) return std::nullopt;
    return highest(boundary.scores(true).first, count - leave);
  }

 private:
  int64_t k_;
  double ratio_;
};

}  // namespace

MethodPtr make_fastv(SpecOptions& options) {
  int64_t k = options.whole("k", 2);
  return std::make_shared<FastV>(k, options.number("ratio", 0.5));
}

}  // namespace vtxcore
