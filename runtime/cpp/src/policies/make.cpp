// From K and a spec of reductions to a policy, checked against the bundle.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "bundle/names.hpp"
#include "policies/policy.hpp"

namespace vtxcore {
namespace {

constexpr char kTextTowerFix[] = " --text-tower CLIP, or use text=embedding, the form without a text tower";

// The methods that remove a whole image: never, before a fixed layer (VTW), or where a gate says so (DyVTE). What each
// gate said is kept in `decisions`.
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

// All but a rest leave before layer `k`: those that the prompt's last token attends to most in layer k - 1.
class WithdrawToRest : public Method {
 public:
  WithdrawToRest(int64_t k, Rest rest) : k_(k), rest_(rest) {}
  std::string name() const override { return "rest"; }
  std::string spec() const override {
    return cat("rest:k=", k_, rest_.is_share ? ",share=" : ",number=", python_repr(rest_.value));
  }
  bool whole() const override { return true; }
  Needs needs() const override {
    Needs needs;
    needs.cuts = {k_};
    needs.queries = {k_ - 1};
    return needs;
  }
  std::optional<int64_t> last_query_keeps(int64_t count) const override {
    return std::min(count, rest_.is_share ? share(rest_.value, count) : static_cast<int64_t>(rest_.value));
  }
  std::optional<Mask> keep_mask(const Boundary& boundary) const override {
    return most_attended(boundary, *last_query_keeps(boundary.count()));
  }

 private:
  int64_t k_;
  Rest rest_;
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
    double probability = double{odds_(boundary.layer, boundary.question_hidden()).at(names::kOddsWithdraw)};
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

// What of `needs` the graphs do not have, in words; empty if they have all.
std::string lacking(const Needs& needs, const Manifest& m, const std::string& dialect) {
  const Graphs& graphs = m.dialects.at(dialect);
  std::set<int64_t> firsts, asked, wanted = needs.cuts;
  for (const StageSpec& stage : m.stages) {
    firsts.insert(stage.first);
    if (stage.query) asked.insert(stage.last);
  }
  if (needs.shrinks) wanted.insert(*needs.shrinks);
  for (int64_t layer : needs.ahead) wanted.insert(layer + 1);
  wanted.erase(1);
  std::set<int64_t> scored = needs.queries;
  scored.insert(needs.ahead.begin(), needs.ahead.end());
  Ids cuts, queries;
  std::set_difference(wanted.begin(), wanted.end(), firsts.begin(), firsts.end(), std::back_inserter(cuts));
  std::set_difference(scored.begin(), scored.end(), asked.begin(), asked.end(), std::back_inserter(queries));
  if (!cuts.empty()) return "a cut before layer " + listed(cuts);
  if (!queries.empty()) return "the attention of layer " + listed(queries);
  if (needs.merging && !graphs.vision_merges) return "a vision graph that merges windows";
  if (needs.final_norm && m.files.count(names::kFileFinalNorm) == 0) return "the weight of the decoder's last norm";
  if (needs.text_tower && !m.text_tower) return "CLIP's text tower";
  for (int64_t block : needs.tower_layers)
    if (block != graphs.vision_received) return cat("the attention of the tower's block ", block);
  if (needs.projector && !graphs.projector) return "the tower's tokens and a graph of the projector";
  if (needs.last_attention && !graphs.vision_last_attention) return "the class token's attention in the tower's last block";
  return needs.attention && !graphs.vision_attention ? "the class token's attention" : "";
}

// The reason why no export of this model meets `needs`, and what to use; empty: one can.
std::string never_there(const Needs& needs, const TowerSpec& tower) {
  if (tower.several && (needs.of_patches() || needs.projector))
    return "reads the patches of a single tower, but this model has several; use fastv, cdpruner, divprune, dart, or "
           "mustdrop:...,tau=off,key=0";
  const int64_t side = std::max(tower.square, tower.pool);  // in patches, of a token
  const std::string patches = cat(side, " x ", side, " patches");
  if (needs.of_patches() && !needs.text_tower && side > 1)
    return cat("works on single patches, but each token of this model covers ", patches,
               "; use fastv, cdpruner, dart, or mustdrop:...,tau=off,key=0");
  if (needs.projector && (side > 1 || !tower.class_token))
    return cat("merges patches by the attention of the tower's class token and projects each patch by itself, but this ",
               "model does not: ", side == 1 ? "its tower has no class token" : "each of its tokens covers " + patches,
               "; use divprune, cdpruner or dart");
  if ((needs.attention || needs.last_attention) && !tower.class_token)
    return "ranks patches by the class token's attention, but this model's tower has no class token; use mustdrop without "
           "key "
           "tokens (mustdrop:...,key=0), lsm or fastv";
  return "";
}

void check_provided(const std::vector<MethodPtr>& reductions, const Manifest& m, const std::string& dialect) {
  for (const MethodPtr& part : reductions) {
    Needs needs = part->needs();
    int64_t most = m.model.layers - (needs.ahead.empty() ? 0 : 1);  // the last layer is no stage of its own
    for (int64_t cut : needs.cuts)
      if (cut < 2 || cut > most)
        fail(Kind::request, part->name(), " drops tokens after layer ", cut - 1, ", and this model has ", m.model.layers,
             " layers: give it layers from 1 to ", most - 1);
  }
  for (const MethodPtr& part : reductions) {
    if (part->renumbers() && !m.model.rope_parts.empty())
      fail(Kind::request, part->name(), ": this model has ", names::kNotRenumbered);
    std::string never = never_there(part->needs(), m.model.tower);
    if (!never.empty()) fail(Kind::request, part->name(), " ", never);
    std::string lack = lacking(part->needs(), m, dialect);
    if (!lack.empty())
      fail(Kind::request, "this bundle was not exported for ", part->name(), ": it lacks ", lack,
           "; export it with vtx-export --reduce ", to_spec(reductions), part->needs().text_tower ? kTextTowerFix : "");
  }
}

// What leaves before layer `k`.
MethodPtr withdrawal(int64_t k, const std::optional<Rest>& rest, const Manifest& m, const std::string& dialect) {
  if (!rest || rest->value == 0) return std::make_shared<Withdraw>(k);
  if (rest->is_share && rest->value == 1) return std::make_shared<Full>();
  auto out = std::make_shared<WithdrawToRest>(k, *rest);
  if (std::string lack = lacking(out->needs(), m, dialect); !lack.empty()) {
    std::string why = unscored(m.model, k - 1);
    fail(Kind::request, "at K = ", k, " this bundle cannot keep a rest: it lacks ", lack, "; ",
         why.empty() ? "export it again with this vtx" : why + "; use another K, or leave the rest out");
  }
  return out;
}

// The policy that decides where the whole image leaves, or all but a rest of it.
MethodPtr make_exit(const std::string& k, const std::optional<Rest>& rest, const Manifest& m, const std::string& dialect,
                    const Odds& odds, double threshold, std::shared_ptr<std::vector<Decision>>& decisions) {
  if (rest && (k == "none" || k == "auto" || k == "card"))
    fail(Kind::request, "a rest is what stays of the image from a prebuilt K on, and K is ", k,
         "; give K as a number, or leave the rest out");
  if (k == "none") return std::make_shared<Full>();
  if (k == "auto") {
    if (m.gates.empty())
      fail(Kind::request,
           "--k auto needs gates and this bundle has none; use --k none or a prebuilt K, or train gates with ",
           "vtx-train-gate and export with --gates");
    if (!(threshold >= 0 && threshold <= 1))
      fail(Kind::request, "the gate threshold is ", python_repr(threshold), "; give a probability from 0 to 1");
    decisions = std::make_shared<std::vector<Decision>>();
    return std::make_shared<Gate>(odds, m.gates, threshold, decisions);
  }
  bool digits = !k.empty() && k.size() < 19 && std::all_of(k.begin(), k.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits) fail(Kind::request, "K is '", k.substr(0, 20), "'; give a number from 2 to ", m.model.layers, ", or none");
  int64_t number = std::stoll(k);
  if (number < 2 || number > m.model.layers)
    fail(Kind::request, "K = ", number, " is outside 2..", m.model.layers, ": it is the first layer without vision tokens; ",
         "give another, or none");
  if (std::find(m.variants.begin(), m.variants.end(), number) == m.variants.end())
    fail(Kind::request, "K = ", number, " was not prebuilt, this bundle has ",
         m.variants.empty() ? "none at all" : listed(m.variants), "; use one of these, or export with --k ", number);
  const Ids sources = m.model.shared ? m.model.sources(*m.model.shared, m.model.layers) : Ids();
  if (!sources.empty() && number > sources.front())  // of bundles that an earlier vtx made
    fail(Kind::request, "K = ", number, ": layers that read the keys and values of layer ", sources.front(),
         " would still see the image there; use a lower K, or none");
  return withdrawal(number, rest, m, dialect);
}

}  // namespace

std::string unscored(const ModelSpec& model, int64_t layer) {
  if (model.two_way == TwoWay::prompt) return "the image tokens of this model also attend to the question";
  if (std::count(model.conv_layers.begin(), model.conv_layers.end(), layer) > 0)
    return cat("layer ", layer, " of this model keeps a state in place of attention");
  return model.slides(layer) ? cat("layer ", layer, " of this model has a sliding window") : "";
}

Rest read_rest(const std::string& text) {
  bool percent = !text.empty() && text.back() == '%';
  std::string digits = text.substr(0, text.size() - (percent ? 1 : 0));
  size_t point = digits.find('.');
  auto is_number = [](const std::string& part) {
    return !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
  };
  bool sound = is_number(digits.substr(0, point));
  if (point != std::string::npos) sound = sound && percent && is_number(digits.substr(point + 1));
  double value = sound ? std::stod(digits) : -1;
  if (percent) value /= 100;
  if (!sound || (percent && value > 1))
    fail(Kind::request, "rest is '", text.substr(0, 38), "'; it must be a share of the image tokens such as 10%, at most ",
         "100%, or a number of them such as 57");
  return {percent, value};
}

Policy make_policy(const std::string& k, const std::optional<Rest>& rest, const std::string& reduce, const Manifest& m,
                   const std::string& dialect, const Odds& odds, double threshold,
                   const std::function<Floats()>& final_norm) {
  Policy policy;
  std::vector<MethodPtr> reductions = parse_spec(reduce);
  check_provided(reductions, m, dialect);
  policy.parts.push_back(make_exit(k, rest, m, dialect, odds, threshold, policy.decisions));
  policy.parts.insert(policy.parts.end(), reductions.begin(), reductions.end());
  if (policy.needs().final_norm) policy.final_norm = final_norm();
  return policy;
}

}  // namespace vtxcore
