// From logits to a token: repetition penalty, then greedy, or temperature, top-k and top-p, in transformers' order.
#pragma once

#include <optional>
#include <set>

#include "base/tensors.hpp"
#include "base/random.hpp"

namespace vtxcore {

// `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave all tokens in; a penalty of 1 does nothing.
struct Sampling {
  double temperature = 0, top_p = 1;
  int64_t top_k = 0;
  std::optional<uint64_t> seed;
  double repetition_penalty = 1;

  void check() const;  // throws Error(request)
};

// Draws the tokens of one answer; the same seed gives the same answer. The prompt's ids count as repetitions too.
class Sampler {
 public:
  Sampler(const Sampling& settings, const Ids& prompt_ids);
  int64_t operator()(const Floats& logits);
  // Whether it chooses the largest logit as the model gives them.
  bool greedy() const { return settings_.temperature == 0 && settings_.repetition_penalty == 1; }

 private:
  int64_t draw(const Floats& logits);
  Sampling settings_;
  Random random_;
  std::set<int64_t> used_;
};

// The natural logarithm of a token's probability under logits, as the model gives them.
double log_probability(const Floats& logits, int64_t token);

}  // namespace vtxcore
