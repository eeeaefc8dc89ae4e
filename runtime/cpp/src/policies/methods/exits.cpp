#include "policies/methods/exits.hpp"

#include <chrono>
#include <cmath>

#include "bundle/names.hpp"

namespace vtxcore {
namespace {

class Full : public Method {
 public:
  std::string name() const override { return "none"; }
  std::string spec() const override { return "none"; }
  bool whole() const override { return true; }
};

class Withdraw : public Method {
 public:
  explicit Withdraw(int64_t k) : k_(k) {}
  std::string name() const override { return "withdrawal"; }
  std::string spec() const override { return cat("withdrawal:k=", k_); }
  bool whole() const override { return true; }
  bool fixed() const override { return true; }
  Needs needs() const override {
    Needs needs;
    needs.cuts = {k_};
    return needs;
  }
  std::optional<Mask> keep_mask(const Boundary& boundary) const override {
    return Mask(static_cast<size_t>(boundary.count()), 0);
  }

 private:
  int64_t k_;
};

class Gate : public Method {
 public:
  Gate(Odds odds, Ids ks, double threshold, std::shared_ptr<std::vector<Decision>> decisions)
      : odds_(std::move(odds)), ks_(std::move(ks)), threshold_(threshold), decisions_(std::move(decisions)) {}
  std::string name() const override { return "gate"; }
  std::string spec() const override { return "gate:threshold=" + python_repr(threshold_); }
  bool whole() const override { return true; }
  Needs needs() const override {
    Needs needs;
    needs.cuts = {ks_.begin(), ks_.end()};
    return needs;
  }
  std::optional<Mask> keep_mask(const Boundary& boundary) const override {
    auto start = std::chrono::steady_clock::now();
    double probability = double{odds_(boundary.layer, boundary.question_hidden).at(names::kOddsWithdraw)};
    if (!std::isfinite(probability))
      fail(Kind::bundle, "the gate before layer ", boundary.layer, " gave no number; export the bundle again");
    std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    decisions_->push_back({boundary.layer, probability, took.count()});
    if (!(probability > threshold_)) return std::nullopt;
    return Mask(static_cast<size_t>(boundary.count()), 0);
  }

 private:
  Odds odds_;
  Ids ks_;
  double threshold_;
  std::shared_ptr<std::vector<Decision>> decisions_;
};

}  // namespace

MethodPtr full() { return std::make_shared<Full>(); }

MethodPtr withdraw(int64_t k) { return std::make_shared<Withdraw>(k); }

MethodPtr gate(Odds odds, Ids ks, double threshold, std::shared_ptr<std::vector<Decision>> decisions) {
  return std::make_shared<Gate>(std::move(odds), std::move(ks), threshold, std::move(decisions));
}

}  // namespace vtxcore
