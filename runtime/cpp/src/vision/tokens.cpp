#include "vision/tokens.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <set>

#include "base/errors.hpp"
#include "bundle/names.hpp"

namespace vtxcore {

Patches Patches::take(const Ids& which) const {
  Patches out{vtxcore::take(places, which), vtxcore::take(merged, which), {}, {}, std::nullopt};
  for (const auto& [name, signal] : signals) out.signals[name] = vtxcore::take(signal, which);
  if (clip.count() > 0) out.clip = vtxcore::take(clip, which);
  if (views) out.views = vtxcore::take(*views, which);
  return out;
}

Mask Patches::highest_of_each_view(const std::string& signal, double part) const {
  const Floats& values = signals.at(signal);
  Mask chosen(count(), 0);
  for (const Ids& rows : of_views()) {
    Mask best = highest(vtxcore::take(values, rows), share(part, static_cast<int64_t>(rows.size())));
    for (size_t i = 0; i < rows.size(); ++i) chosen[static_cast<size_t>(rows[i])] = best[i];
  }
  return chosen;
}

std::vector<Ids> Patches::of_views() const {
  if (!views) return {count_up(0, count())};
  std::map<int64_t, Ids> found;
  for (size_t i = 0; i < count(); ++i)
    if ((*views)[i] >= 0) found[(*views)[i]].push_back(static_cast<int64_t>(i));
  std::vector<Ids> out;
  for (auto& [view, rows] : found) out.push_back(std::move(rows));
  return out;
}

std::shared_ptr<const ImageTokens> ImageTokens::take(const Ids& which, bool keep_positions) const {
  auto out = std::make_shared<ImageTokens>();
  out->rows = vtxcore::take(rows, which);
  out->patches = patches.take(which);
  out->key = key;
  out->tower = tower;
  if (keep_positions || offsets) {
    out->offsets = vtxcore::take(offsets ? *offsets : count_up(0, rows.count()), which);
    out->span = positions();
  }
  return out;
}

Rows MergedTokens::states(const TowerTokens& tower) const {
  Rows out(starts.size(), tower.states.width);
  for (size_t i = 0; i < starts.size(); ++i) {
    size_t end = i + 1 < starts.size() ? static_cast<size_t>(starts[i + 1]) : sources.size();
    for (size_t n = static_cast<size_t>(starts[i]); n < end; ++n) {
      const float* from = tower.states.row(static_cast<size_t>(sources[n]));
      for (size_t j = 0; j < out.width; ++j) out.row(i)[j] += weights[n] * from[j];
    }
  }
  return out;
}

Rows* VisionOutputs::rows_of(const std::string& name) {
  if (name == names::kFeatures) return &features;
  if (name == names::kClipPatches) return &clip;
  if (name == names::kReceived) return &received;
  return name == names::kTowerTokens ? &tower : nullptr;
}

bool MarkedImage::has_text() const {
  return std::any_of(marks.begin(), marks.end(), [](const std::string& mark) { return !mark.empty(); });
}

std::string MarkedImage::text(const std::string& image_token) const {
  std::string out = marks.front();
  for (size_t i = 1; i < marks.size(); ++i) (out += image_token) += marks[i];
  return out;
}

std::shared_ptr<const ImageTokens> image_tokens(VisionOutputs found, int64_t states) {
  auto out = std::make_shared<ImageTokens>();
  size_t count = found.features.count();
  auto check = [&](size_t values) {
    if (values != count)
      fail(Kind::bundle, "the vision graph gives ", values, " outputs for ", count, " tokens; export the bundle again");
  };
  for (const auto& [name, values] : found.whole) check(values.size());
  for (const auto& [name, values] : found.signals) check(values.size());
  if (found.clip.width > 0) check(found.clip.count());
  if (found.received.width > 0) check(found.received.count());
  for (size_t column = 0; column < found.received.width; ++column)
    for (size_t i = 0; i < count; ++i)
      found.signals[cat(names::kReceived, ".", column)].push_back(found.received.row(i)[column]);
  auto side = static_cast<size_t>(std::sqrt(static_cast<double>(count)));
  Patches all{count_up(side * side + 1 == count ? names::kClassToken : 0, count), Mask(count, 0), std::move(found.signals),
              std::move(found.clip), std::nullopt};
  Ids there = count_up(0, count);
  if (auto places = found.whole.find(names::kPatchIndex); places != found.whole.end()) all.places = places->second;
  if (auto merged = found.whole.find(names::kMerged); merged != found.whole.end()) {
    there.clear();
    for (size_t i = 0; i < count; ++i) {
      all.merged[i] = merged->second[i] == names::kWindow;
      if (merged->second[i] != names::kGone) there.push_back(static_cast<int64_t>(i));
    }
  }
  if (found.tower.width > 0) {
    auto tower = std::make_shared<TowerTokens>();
    auto wide = static_cast<size_t>(states), last = found.tower.width - 1;
    tower->states = Rows(found.tower.count(), wide), tower->keys = Rows(found.tower.count(), last - wide);
    for (size_t i = 0; i < found.tower.count(); ++i) {
      const float* row = found.tower.row(i);
      std::copy(row, row + wide, tower->states.row(i));
      std::copy(row + wide, row + last, tower->keys.row(i));
      tower->attention.push_back(row[last]);
    }
    out->tower = std::move(tower);
  }
  bool whole = there.size() == count;
  out->rows = whole ? std::move(found.features) : take(found.features, there);
  out->patches = whole ? std::move(all) : all.take(there);
  return out;
}

std::shared_ptr<const ImageTokens> newlines(const Rows& rows) {
  auto out = std::make_shared<ImageTokens>();
  out->rows = rows;
  out->patches.places = Ids(rows.count(), names::kNewline);
  out->patches.merged = Mask(rows.count(), 0);
  return out;
}

std::shared_ptr<const ImageTokens> joined(const std::vector<std::shared_ptr<const ImageTokens>>& views, int64_t columns) {
  auto out = std::make_shared<ImageTokens>();
  Patches& all = out->patches;
  all.views.emplace();
  std::set<std::string> kinds;
  for (const auto& view : views)
    for (const auto& [name, signal] : view->patches.signals) kinds.insert(name);
  auto tower = std::make_shared<TowerTokens>();
  tower->views = 0, tower->columns = columns;
  int64_t before = 0, number = 0;
  for (const auto& view : views) {
    const Patches& own = view->patches;
    if (view->tower) {
      const TowerTokens& of_view = *view->tower;
      tower->states.width = of_view.states.width, tower->keys.width = of_view.keys.width, ++tower->views;
      tower->states.data.insert(tower->states.data.end(), of_view.states.data.begin(), of_view.states.data.end());
      tower->keys.data.insert(tower->keys.data.end(), of_view.keys.data.begin(), of_view.keys.data.end());
      tower->attention.insert(tower->attention.end(), of_view.attention.begin(), of_view.attention.end());
    }
    out->rows.width = view->rows.width;
    out->rows.data.insert(out->rows.data.end(), view->rows.data.begin(), view->rows.data.end());
    for (int64_t place : own.places) {
      all.places.push_back(place >= 0 ? place + before : place);
      all.views->push_back(place == names::kNewline ? -1 : number);
    }
    all.merged.insert(all.merged.end(), own.merged.begin(), own.merged.end());
    for (const std::string& name : kinds) {
      auto signal = own.signals.find(name);
      Floats values = signal == own.signals.end() ? Floats(own.count()) : signal->second;
      all.signals[name].insert(all.signals[name].end(), values.begin(), values.end());
    }
    Rows clip = own.clip.width > 0 ? own.clip : Rows(own.count(), views.front()->patches.clip.width);
    all.clip.width = clip.width;
    all.clip.data.insert(all.clip.data.end(), clip.data.begin(), clip.data.end());
    before += static_cast<int64_t>(own.count());
    ++number;
  }
  if (tower->views > 0) out->tower = std::move(tower);
  return out;
}

double rounded_to(double value, int digits) {
  char text[400];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return std::strtod(text, nullptr);
}

int64_t share(double part, int64_t count) {
  return static_cast<int64_t>(std::ceil(rounded_to(part * static_cast<double>(count), 9)));
}

Mask highest(const Floats& values, int64_t count) {
  Ids order = count_up(0, values.size());
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)]; });
  Mask chosen(values.size(), 0);
  for (size_t i = 0; i < std::min(values.size(), static_cast<size_t>(count)); ++i) chosen[static_cast<size_t>(order[i])] = 1;
  return chosen;
}

}  // namespace vtxcore
