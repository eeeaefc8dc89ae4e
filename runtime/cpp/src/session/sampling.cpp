#include "session/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checks.hpp"
#include "base/json.hpp"
#include "bundle/names.hpp"

namespace vtxcore {
namespace {

using Doubles = std::vector<double>;

// As numpy adds float64 along a contiguous axis: pairwise.
double sum(const double* values, size_t count) {
  if (count < 8) {
    double total = 0;
    for (size_t i = 0; i < count; ++i) total += values[i];
    return total;
  }
  if (count <= 128) {
    double part[8];
    for (size_t j = 0; j < 8; ++j) part[j] = values[j];
    size_t i = 8;
    for (; i + 8 <= count; i += 8)
      for (size_t j = 0; j < 8; ++j) part[j] += values[i + j];
    double total = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    for (; i < count; ++i) total += values[i];
    return total;
  }
  size_t half = count / 2;
  half -= half % 8;
  return sum(values, half) + sum(values + half, count - half);
}

void normalise(Doubles& odds) {
  double total = sum(odds.data(), odds.size());
  for (double& value : odds) value /= total;
}

// The smallest set of most likely tokens that holds `top_p` of the mass, renormalised.
void keep_nucleus(Doubles& odds, double top_p) {
  Ids order = count_up(0, odds.size());
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return odds[static_cast<size_t>(a)] > odds[static_cast<size_t>(b)]; });
  double running = 0;
  Doubles kept(odds.size(), 0.0);
  for (int64_t token : order) {
    auto index = static_cast<size_t>(token);
    running += odds[index];
    if (running - odds[index] < top_p) kept[index] = odds[index];
  }
  odds = std::move(kept);
  normalise(odds);
}

// The first of the largest logits, which must be a number: others may be left out as minus infinity.
size_t argmax(const Floats& logits) {
  size_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i)
    if (logits[i] > logits[best] || std::isnan(logits[i])) best = i;  // nothing is above one that is not a number
  if (!std::isfinite(logits[best])) fail(Kind::bundle, names::kNotFinite);
  return best;
}

}  // namespace

void Sampling::check() const {
  check_number("temperature", temperature, "0 (greedy) or a positive number", 0);
  check_number("top-p", top_p, "above 0 and at most 1", std::numeric_limits<double>::min(), 1);
  check_whole("top-k", top_k, 0, names::kMostWhole);
  check_number("repetition_penalty", repetition_penalty, "a number from 0.001 to 1000, 1 for none", names::kLeastPenalty,
               1000);
}

Sampler::Sampler(const Sampling& settings, const Ids& prompt_ids) : settings_(settings), random_(settings.seed) {
  settings_.check();
  if (settings_.repetition_penalty != 1) used_.insert(prompt_ids.begin(), prompt_ids.end());
}

int64_t Sampler::operator()(const Floats& logits) {
  if (settings_.repetition_penalty == 1) return draw(logits);
  Floats scores = logits;
  auto penalty = static_cast<float>(settings_.repetition_penalty);
  for (int64_t token : used_) {
    if (token >= static_cast<int64_t>(scores.size())) continue;
    float& score = scores[static_cast<size_t>(token)];
    score = score < 0 ? score * penalty : score / penalty;
  }
  int64_t token = draw(scores);
  used_.insert(token);
  return token;
}

int64_t Sampler::draw(const Floats& logits) {
  size_t best = argmax(logits);
  if (settings_.temperature == 0) return static_cast<int64_t>(best);
  Doubles odds(logits.size());
  for (size_t i = 0; i < odds.size(); ++i) odds[i] = (double{logits[i]} - double{logits[best]}) / settings_.temperature;
  auto top_k = static_cast<size_t>(settings_.top_k);
  if (top_k > 0 && top_k < odds.size()) {
    Doubles sorted = odds;
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(top_k - 1), sorted.end(),
                     std::greater<>());
    double least = sorted[top_k - 1];
    for (double& score : odds)
      if (score < least) score = -std::numeric_limits<double>::infinity();
  }
  for (double& value : odds) value = std::exp(value);
  normalise(odds);
  if (settings_.top_p < 1) keep_nucleus(odds, settings_.top_p);
  double running = 0;
  for (double& value : odds) value = running += value;  // the cumulative distribution
  double wanted = random_.uniform();
  size_t token = 0;
  while (token + 1 < odds.size() && odds[token] / running <= wanted) ++token;
  return static_cast<int64_t>(token);
}

double log_probability(const Floats& logits, int64_t token) {
  double most = double{logits[argmax(logits)]}, total = 0;
  for (float value : logits) total += std::exp(double{value} - most);
  return double{logits[static_cast<size_t>(token)]} - most - std::log(total);
}

}  // namespace vtxcore
