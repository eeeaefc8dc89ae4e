#include "policies/policy.hpp"

#include <algorithm>

#include "bundle/sha256.hpp"

namespace vtxcore {

std::string PromptText::key() const {
  Sha256 hash;
  hash.update(ids.data(), ids.size() * sizeof(int64_t));
  hash.update(after.data(), after.size());
  hash.update(embeddings.data.data(), embeddings.data.size() * sizeof(float));
  return hash.hex();
}

std::optional<Mask> most_attended(const Boundary& boundary, int64_t count) {
  if (count >= boundary.count()) return std::nullopt;
  return highest(boundary.scores(true).first, count);
}

Needs Policy::needs() const {
  Needs all;
  for (const MethodPtr& part : parts) {
    Needs one = part->needs();
    all.cuts.insert(one.cuts.begin(), one.cuts.end());
    all.queries.insert(one.queries.begin(), one.queries.end());
    if (one.shrinks) all.shrinks = all.shrinks ? std::min(*all.shrinks, *one.shrinks) : *one.shrinks;
    all.merging |= one.merging, all.attention |= one.attention;
    all.last_attention |= one.last_attention, all.final_norm |= one.final_norm;
    all.text_tower |= one.text_tower, all.projector |= one.projector;
    all.tower_layers.insert(one.tower_layers.begin(), one.tower_layers.end());
    all.ahead.insert(one.ahead.begin(), one.ahead.end());
  }
  return all;
}

std::vector<MethodPtr> Policy::reductions() const {
  std::vector<MethodPtr> out;
  for (const MethodPtr& part : parts)
    if (!part->whole()) out.push_back(part);
  return out;
}

std::set<int64_t> Policy::token_cuts() const {
  std::set<int64_t> out;
  for (const MethodPtr& part : reductions()) out.merge(part->needs().cuts);
  if (std::optional<int64_t> rest = rest_cut()) out.insert(*rest);
  return out;
}

std::optional<int64_t> Policy::rest_cut() const {
  for (const MethodPtr& part : parts)
    if (Needs needs = part->needs(); part->whole() && !needs.queries.empty()) return *needs.cuts.begin();
  return std::nullopt;
}

std::pair<bool, bool> Policy::reads(int64_t layer, int64_t count) const {
  bool any = false, more = false;
  for (const MethodPtr& part : parts) {
    if (part->needs().queries.count(layer) == 0) continue;
    std::optional<int64_t> kept = part->last_query_keeps(count);
    any |= kept != count, more |= !kept;
  }
  return {any, more};
}

std::optional<int64_t> Policy::exit() const {
  for (const MethodPtr& part : parts)
    if (std::set<int64_t> cuts = part->needs().cuts; part->whole() && part->fixed() && !cuts.empty()) return *cuts.begin();
  return std::nullopt;
}

bool Policy::renumbers() const {
  return std::any_of(parts.begin(), parts.end(), [](const MethodPtr& part) { return part->renumbers(); });
}

std::vector<std::shared_ptr<const Entry>> Policy::entries() const {
  std::vector<std::shared_ptr<const Entry>> out;
  for (const MethodPtr& part : parts)
    if (auto entry = part->entry()) out.push_back(entry);
  return out;
}

std::optional<Removal> Policy::ask(const Boundary& boundary) const {
  Mask kept(static_cast<size_t>(boundary.count()), 1);
  Removal removal{{}, {}, false, false};
  bool all_whole = true;
  for (const MethodPtr& part : parts) {
    bool due = count_of(kept) > 0 && part->needs().cuts.count(boundary.layer) > 0;
    std::optional<Mask> mask = due ? part->keep_mask(boundary) : std::nullopt;
    if (!mask || count_of(*mask) == static_cast<int64_t>(mask->size())) continue;
    for (size_t i = 0; i < kept.size(); ++i) kept[i] &= (*mask)[i];
    removal.by.push_back(part->name());
    removal.renumbers |= part->renumbers();
    all_whole = all_whole && part->whole();
  }
  if (removal.by.empty()) return std::nullopt;
  removal.kept = std::move(kept);
  removal.shrinks = needs().shrinks.has_value() && !all_whole;
  return removal;
}

std::string Policy::key() const { return to_spec(parts); }

}  // namespace vtxcore
