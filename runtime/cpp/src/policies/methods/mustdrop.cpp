// MustDrop: windows merge in the tower, tokens leave by dual attention, early caches shrink to the survivors.
#include <algorithm>

#include "bundle/names.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

// Dual-attention filtering after each of `layers`, key tokens spared, and the output-aware cache. After a layer, image
// token j with sum V_j and maximum A_j of the question's attention leaves when V_j < gamma * sum V and A_j < alpha
// (MustDrop Eq. 8 to 10), unless it is among the share `key` that the class token looks at most.
class MustDrop : public Reduction {
 public:
  using Reduction::Reduction;
  bool renumbers() const override { return options_.text("positions") == "renumber"; }
  std::shared_ptr<const Entry> entry() const override { return merging_ == nullptr ? nullptr : merging_->entry(); }

  std::optional<Mask> marks(const Images& images) const override {
    if (key_ == 0) return std::nullopt;
    Mask out;
    for (const auto& image : images) {
      const char* signal = options_.text("keys") == "used-block" ? names::kClsAttention : names::kClsAttentionLast;
      Mask marked = image->patches.highest_of_each_view(signal, key_);
      out.insert(out.end(), marked.begin(), marked.end());
    }
    return out;
  }

  std::optional<Mask> keep_mask(const Boundary& boundary) const override {
    auto [total, most] = boundary.scores(false);
    float threshold = static_cast<float>(options_.number("gamma")) * pairwise_sum(total.data(), total.size());
    auto alpha = static_cast<float>(options_.number("alpha"));
    Mask kept(total.size());
    for (size_t i = 0; i < kept.size(); ++i) kept[i] = total[i] >= threshold || most[i] >= alpha;
    if (std::optional<Mask> marked = marks(boundary.images)) {
      Mask here = take(*marked, indices_of(boundary.present));
      for (size_t i = 0; i < kept.size(); ++i) kept[i] |= here[i];
    }
    return kept;
  }

 private:
  const double key_ = options_.number("key");
  const MethodPtr merging_ =
      options_.off("tau") ? nullptr : parse_spec("lsm:tau=" + options_.text("tau") + ",order=" + options_.text("order"))[0];
};

const Registered<MustDrop> kMustDrop("mustdrop");

}  // namespace

}  // namespace vtxcore
