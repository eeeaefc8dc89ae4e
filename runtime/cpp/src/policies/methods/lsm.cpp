// LSM, local spatial merging: windows of like patches become one token in the tower (MustDrop Eq. 5).
#include <cmath>
#include <limits>

#include "bundle/names.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

// With order=merged-first merged tokens stand before all others, the most similar window first, as in the code that
// came with the paper; of equal ones the earlier.
class Lsm : public Method, public Entry, public std::enable_shared_from_this<Lsm> {
 public:
  Lsm(double tau, std::string order) : tau_(tau), order_(std::move(order)) {}
  std::string name() const override { return "lsm"; }
  std::string spec() const override { return "lsm:tau=" + spec_number(tau_) + ",order=" + order_; }
  std::string key() const override { return spec(); }
  Needs needs() const override {
    Needs needs;
    needs.merging = true;
    return needs;
  }
  std::shared_ptr<const Entry> entry() const override { return shared_from_this(); }
  Extras vision_inputs() const override { return {{names::kTau, static_cast<float>(tau_)}}; }
  std::optional<Ids> select(const ImageTokens& image, const PromptText*) const override {
    if (order_ == "raster") return std::nullopt;
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

 private:
  double tau_;
  std::string order_;
};

}  // namespace

void check_tau(const std::string& name, double tau) {
  if (!(tau >= -1 && tau <= 1)) fail(Kind::request, name, ": tau is ", python_repr(tau), "; give a cosine from -1 to 1");
}

std::shared_ptr<const Entry> lsm_entry(double tau, const std::string& order) { return std::make_shared<Lsm>(tau, order); }

MethodPtr make_lsm(SpecOptions& options) {
  double tau = options.number("tau", 0.8);
  std::string order = options.one_of("order", {"raster", "merged-first"});
  check_tau("lsm", tau);
  return std::make_shared<Lsm>(tau, order);
}

}  // namespace vtxcore
