#include "vision/tokens.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <set>

#include "base/errors.hpp"
#include "bundle/manifest.hpp"
#include "bundle/names.hpp"

namespace vtxcore {
namespace {

double middle(int64_t size, int64_t wanted, int64_t at) {
  return (static_cast<double>(at) + 0.5) * (static_cast<double>(size) / static_cast<double>(wanted)) - 0.5;
}

// Of each step along one side the two that it lies between, and the second one's share.
struct Between {
  int64_t first, second;
  float share;
};

Between between(int64_t size, int64_t wanted, int64_t at) {
  double place = std::max(middle(size, wanted, at), 0.0);
  auto first = static_cast<int64_t>(place);
  return {first, std::min(first + 1, size - 1), static_cast<float>(place - static_cast<double>(first))};
}

void mix(const float* first, const float* second, float share, size_t width, float* out) {
  for (size_t d = 0; d < width; ++d) out[d] = first[d] * (1 - share) + second[d] * share;
}

}  // namespace

Patches Patches::take(const Ids& which) const {
  Patches out{vtxcore::take(places, which), vtxcore::take(merged, which), {}, vtxcore::take(states, which), std::nullopt};
  for (const auto& [name, signal] : signals) out.signals[name] = vtxcore::take(signal, which);
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
    out->offsets = vtxcore::take(offsets ? *offsets : text_positions(0, rows.count()), which);
    out->span = offsets ? span : positions();
  }
  Ids own;  // of each token the number of its run
  for (size_t run = 0; run < runs.size(); ++run) own.insert(own.end(), static_cast<size_t>(runs[run]), int64_t(run));
  out->runs.assign(runs.size(), 0);
  for (int64_t run : vtxcore::take(own, runs.empty() ? Ids() : which)) ++out->runs[static_cast<size_t>(run)];
  return out;
}

int64_t ImageTokens::positions() const {
  if (!offsets) return static_cast<int64_t>(rows.count());
  return span * (runs.empty() ? 1 : std::count_if(runs.begin(), runs.end(), [](int64_t run) { return run > 0; }));
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

bool MarkedImage::has_text() const {
  return std::any_of(marks.begin(), marks.end(), [](const std::string& mark) { return !mark.empty(); });
}

int64_t MarkedImage::tokens() const { return std::accumulate(spans.begin(), spans.end(), int64_t{0}); }

std::string MarkedImage::text(const std::string& image_token, size_t at) const {
  std::string out = (number ? number->first + std::to_string(at) + number->second : "") + marks.front();
  for (size_t i = 1; i < marks.size(); ++i) (out += image_token) += marks[i];
  return out;
}

std::shared_ptr<const ImageTokens> image_tokens(VisionOutputs found, const TowerSpec& spec) {
  auto out = std::make_shared<ImageTokens>();
  auto taken = [&](const char* name) {
    auto at = found.states.extract(name);
    return at ? std::move(at.mapped()) : Rows();
  };
  Rows features = taken(names::kFeatures), received = taken(names::kReceived), own = taken(names::kTowerTokens);
  size_t count = features.count();
  auto check = [&](size_t values) {
    if (values != count)
      fail(Kind::bundle, "the vision graph gives ", values, " outputs for ", count, " tokens; export the bundle again");
  };
  for (const auto& [name, values] : found.whole) check(values.size());
  for (const auto& [name, values] : found.signals) check(values.size());
  for (const auto& [name, rows] : found.states) check(rows.count());
  if (received.width > 0) check(received.count());
  for (size_t column = 0; column < received.width; ++column)
    for (size_t i = 0; i < count; ++i) found.signals[cat(names::kReceived, ".", column)].push_back(received.row(i)[column]);
  Patches all{count_up(spec.class_first(count) ? names::kClassToken : 0, count), Mask(count, 0), std::move(found.signals),
              std::move(found.states), std::nullopt};
  Ids there = count_up(0, count);
  if (auto places = found.whole.find(names::kPatchIndex); places != found.whole.end()) all.places = places->second;
  if (auto merged = found.whole.find(names::kMerged); merged != found.whole.end()) {
    there.clear();
    for (size_t i = 0; i < count; ++i) {
      all.merged[i] = merged->second[i] == names::kWindow;
      if (merged->second[i] != names::kGone) there.push_back(static_cast<int64_t>(i));
    }
  }
  if (own.width > 0) {
    auto tower = std::make_shared<TowerTokens>();
    auto wide = static_cast<size_t>(spec.state_width), last = own.width - 1;
    tower->states = Rows(own.count(), wide), tower->keys = Rows(own.count(), last - wide);
    for (size_t i = 0; i < own.count(); ++i) {
      const float* row = own.row(i);
      std::copy(row, row + wide, tower->states.row(i));
      std::copy(row + wide, row + last, tower->keys.row(i));
      tower->attention.push_back(row[last]);
    }
    out->tower = std::move(tower);
  }
  bool whole = there.size() == count;
  out->rows = whole ? std::move(features) : take(features, there);
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

Rows shrunk_grid(const Rows& grid, int64_t height, int64_t width, int64_t rows, int64_t columns) {
  auto at = [](int64_t y, int64_t x, int64_t wide) { return static_cast<size_t>(y * wide + x); };
  Rows high(static_cast<size_t>(rows * width), grid.width), out(static_cast<size_t>(rows * columns), grid.width);
  for (int64_t y = 0; y < rows; ++y) {
    Between b = between(height, rows, y);
    for (int64_t x = 0; x < width; ++x)
      mix(grid.row(at(b.first, x, width)), grid.row(at(b.second, x, width)), b.share, grid.width, high.row(at(y, x, width)));
  }
  for (int64_t x = 0; x < columns; ++x) {
    Between b = between(width, columns, x);
    for (int64_t y = 0; y < rows; ++y)
      mix(high.row(at(y, b.first, width)), high.row(at(y, b.second, width)), b.share, grid.width,
          out.row(at(y, x, columns)));
  }
  return out;
}

Ids nearest_steps(int64_t size, int64_t wanted) {
  Ids out;
  for (int64_t at = 0; at < wanted; ++at)
    out.push_back(static_cast<int64_t>(std::min(middle(size, wanted, at) + 0.5, static_cast<double>(size - 1))));
  return out;
}

std::shared_ptr<const ImageTokens> joined(const std::vector<std::shared_ptr<const ImageTokens>>& views, int64_t columns) {
  auto out = std::make_shared<ImageTokens>();
  Patches& all = out->patches;
  all.views.emplace();
  std::set<std::string> kinds;
  std::map<std::string, size_t> widths;
  for (const auto& view : views) {
    for (const auto& [name, signal] : view->patches.signals) kinds.insert(name);
    for (const auto& [name, rows] : view->patches.states) widths[name] = rows.width;
  }
  auto tower = std::make_shared<TowerTokens>();
  tower->views = 0, tower->columns = columns;
  int64_t before = 0, number = 0;
  for (const auto& view : views) {
    const Patches& own = view->patches;
    if (view->tower) {
      ++tower->views;
      append(tower->states, view->tower->states), append(tower->keys, view->tower->keys);
      tower->attention.insert(tower->attention.end(), view->tower->attention.begin(), view->tower->attention.end());
    }
    append(out->rows, view->rows);
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
    for (const auto& [name, width] : widths) {
      auto found = own.states.find(name);
      append(all.states[name], found == own.states.end() ? Rows(own.count(), width) : found->second);
    }
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
