// MustDrop: windows merge in the tower, tokens leave by dual attention, early caches shrink to the survivors.
#include <algorithm>

#include "bundle/names.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

struct MustDropOptions {
  double gamma, alpha;
  std::optional<double> tau;
  double key;
  Ids layers;
  std::string positions, order, keys;
};

// Dual-attention filtering after each of `layers`, key tokens spared, and the output-aware cache. After a layer, image
// token j with sum V_j and maximum A_j of the question's attention leaves when V_j < gamma * sum V and A_j < alpha
// (MustDrop Eq. 8 to 10), unless it is among the share `key` that the class token looks at most.
class MustDrop : public Method {
 public:
  explicit MustDrop(MustDropOptions options) : o_(std::move(options)) { check(); }
  std::string name() const override { return "mustdrop"; }
  std::string spec() const override {
    std::string layers;
    for (int64_t layer : o_.layers) layers += (layers.empty() ? "" : "/") + std::to_string(layer);
    return "mustdrop:gamma=" + spec_number(o_.gamma) + ",alpha=" + spec_number(o_.alpha) +
           ",tau=" + (o_.tau ? spec_number(*o_.tau) : "off") + ",key=" + spec_number(o_.key) + ",layers=" + layers +
           ",positions=" + o_.positions + ",order=" + o_.order + ",keys=" + o_.keys;
  }
  bool renumbers() const override { return o_.positions == "renumber"; }
  Needs needs() const override {
    Needs needs;
    for (int64_t layer : o_.layers) needs.cuts.insert(layer + 1);
    needs.queries = {o_.layers.begin(), o_.layers.end()};
    needs.shrinks = o_.layers.front();
    needs.merging = o_.tau.has_value();
    needs.attention = o_.key > 0 && o_.keys == "used-block";
    needs.last_attention = o_.key > 0 && o_.keys == "last-block";
    return needs;
  }
  std::shared_ptr<const Entry> entry() const override { return o_.tau ? lsm_entry(*o_.tau, o_.order) : nullptr; }

  std::optional<Mask> marks(const Images& images) const override {
    if (o_.key == 0) return std::nullopt;
    Mask out;
    for (const auto& image : images) {
      const char* signal = o_.keys == "used-block" ? names::kClsAttention : names::kClsAttentionLast;
      Mask marked = image->patches.highest_of_each_view(signal, o_.key);
      out.insert(out.end(), marked.begin(), marked.end());
    }
    return out;
  }

  std::optional<Mask> keep_mask(const Boundary& boundary) const override {
    auto [total, most] = boundary.scores(false);
    float threshold = static_cast<float>(o_.gamma) * pairwise_sum(total.data(), total.size());
    auto alpha = static_cast<float>(o_.alpha);
    Mask kept(total.size());
    for (size_t i = 0; i < kept.size(); ++i) kept[i] = total[i] >= threshold || most[i] >= alpha;
    if (std::optional<Mask> marked = marks(boundary.images)) {
      Mask here = take(*marked, indices_of(boundary.present));
      for (size_t i = 0; i < kept.size(); ++i) kept[i] |= here[i];
    }
    return kept;
  }

 private:
  void check() const {
    if (o_.tau) check_tau("mustdrop", *o_.tau);
    if (!(o_.key >= 0 && o_.key <= 1))
      fail(Kind::request, "mustdrop: key is ", python_repr(o_.key), "; give the share never to drop, from 0 to 1");
    for (auto [option, value] : {std::pair("gamma", o_.gamma), std::pair("alpha", o_.alpha)})
      if (value < 0) fail(Kind::request, "mustdrop: ", option, " is ", python_repr(value), "; give a threshold from 0 on");
    bool rising = std::adjacent_find(o_.layers.begin(), o_.layers.end(), std::greater_equal<>()) == o_.layers.end();
    if (o_.layers.empty() || o_.layers.front() < 1 || !rising)
      fail(Kind::request, "mustdrop: layers must be rising numbers from 1 on, as 3/7/11/15");
  }

  MustDropOptions o_;
};

}  // namespace

MethodPtr make_mustdrop(SpecOptions& options) {
  MustDropOptions o;
  o.gamma = options.number("gamma", 0.001);
  o.alpha = options.number("alpha", 0.001);
  o.tau = options.number_or_off("tau", 0.8);
  o.key = options.number("key", 0.08);
  o.layers = options.wholes("layers", {3, 7, 11, 15});
  o.positions = options.one_of("positions", {"keep", "renumber"});
  o.order = options.one_of("order", {"raster", "merged-first"});
  o.keys = options.one_of("keys", {"used-block", "last-block"});
  return std::make_shared<MustDrop>(std::move(o));
}

}  // namespace vtxcore
