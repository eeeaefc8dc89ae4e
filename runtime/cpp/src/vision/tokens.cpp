#include "vision/tokens.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "base/errors.hpp"
#include "bundle/names.hpp"

namespace vtxcore {

Patches Patches::take(const Ids& which) const {
  Patches out{vtxcore::take(places, which), vtxcore::take(merged, which), {}};
  for (const auto& [name, signal] : signals) out.signals[name] = vtxcore::take(signal, which);
  return out;
}

std::shared_ptr<const ImageTokens> ImageTokens::take(const Ids& which, bool keep_positions) const {
  auto out = std::make_shared<ImageTokens>();
  out->rows = vtxcore::take(rows, which);
  out->patches = patches.take(which);
  if (keep_positions || offsets) {
    out->offsets = vtxcore::take(offsets ? *offsets : count_up(0, rows.count()), which);
    out->span = positions();
  }
  return out;
}

std::shared_ptr<const ImageTokens> image_tokens(VisionOutputs found) {
  auto out = std::make_shared<ImageTokens>();
  size_t count = found.features.count();
  for (const auto& [name, values] : found.whole)
    if (values.size() != count) fail(Kind::bundle, "the vision graph gives another number of ", name, " than of tokens");
  for (const auto& [name, values] : found.signals)
    if (values.size() != count) fail(Kind::bundle, "the vision graph gives another number of ", name, " than of tokens");
  auto side = static_cast<size_t>(std::sqrt(static_cast<double>(count)));
  Patches all{count_up(side * side + 1 == count ? -1 : 0, count), Mask(count, 0), std::move(found.signals)};
  Ids there = count_up(0, count);
  if (auto places = found.whole.find(names::kPatchIndex); places != found.whole.end()) all.places = places->second;
  if (auto merged = found.whole.find(names::kMerged); merged != found.whole.end()) {
    there.clear();
    for (size_t i = 0; i < count; ++i) {
      all.merged[i] = merged->second[i] == names::kWindow;
      if (merged->second[i] != names::kGone) there.push_back(static_cast<int64_t>(i));
    }
  }
  bool whole = there.size() == count;
  out->rows = whole ? std::move(found.features) : take(found.features, there);
  out->patches = whole ? std::move(all) : all.take(there);
  return out;
}

double round9(double value) {
  char text[400];
  std::snprintf(text, sizeof text, "%.9f", value);
  return std::strtod(text, nullptr);
}

int64_t share(double part, int64_t count) {
  return static_cast<int64_t>(std::ceil(round9(part * static_cast<double>(count))));
}

Mask highest(const Floats& values, int64_t count) {
  Ids order = count_up(0, values.size());
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  Mask chosen(values.size(), 0);
  for (size_t i = 0; i < std::min(values.size(), static_cast<size_t>(count)); ++i)
    chosen[static_cast<size_t>(order[i])] = 1;
  return chosen;
}

}  // namespace vtxcore
