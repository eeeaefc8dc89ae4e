// An answer: its text, its tokens and what it cost.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "api/boxes.hpp"
#include "base/json.hpp"
#include "prompt/guiding.hpp"
#include "session/sampling.hpp"
#include "session/session.hpp"

namespace vtxcore {

// Gets each token with the text that is certain with it, maybe none; false ends the answer.
using OnToken = std::function<bool(int64_t id, const std::string& text)>;

void check_stop_count(size_t count);  // throws Error(request)

// Limits and sampling of one answer.
struct Options {
  std::string k = "default", reduce = "default";
  int64_t max_new_tokens = 256;
  bool ignore_eos = false, logprobs = false, boxes = false;
  std::optional<bool> thinking;     // with or without a thought before the answer; none: as the chat template has it
  int64_t max_thinking_tokens = 0;  // of the thought, after which it is ended; 0: no limit
  Sampling sampling;
  double gate_threshold = 0.5;
  std::vector<std::string> stop;
  double timeout = 0;  // seconds from the question to the answer's end; 0: no limit
  OnToken on_token;
  std::optional<std::string> rest;    // image tokens that stay from K on, "10%" or "57"; none: the default with that K
  std::optional<std::string> accept;  // with choices, the probability that an answer must have, or "card"; none: any
  std::optional<std::string> about;   // text by which image tokens are chosen in place of the question
  std::optional<Guide> guide;         // the form that the answer is held to

  void check() const;  // throws Error(request)
};

struct Timings {
  double load = 0, vision = 0, prefill = 0, first_token = 0, decode_per_token = 0;  // milliseconds
};

// The tokens of a guided answer that its form imposed, with the mean and smallest log probability that the model gave them.
struct Imposed {
  int64_t tokens = 0;
  double mean = 0, least = 0;
  static Imposed of(const Doubles& logprobs);
};

// `stopped` is "end", "stop", "length", "context", "timeout" or "cancelled"; the last two leave the text as far as it
// had come.
struct Answer {
  std::string text, stopped;
  Ids token_ids;
  std::vector<double> logprobs;
  std::vector<std::pair<std::string, double>> choices;  // the probability of each, normalised over them
  double choices_mass = 0;                              // the probability that the answer is one of the choices at all
  std::optional<int64_t> forced;                        // of a guided answer: tokens that ran in an earlier one's pass
  std::optional<Doubles> imposed;     // of a guided answer: log probabilities of the tokens that its form left no choice of
  std::optional<double> threshold;    // what `accept` asks for
  std::optional<std::string> unsure;  // why the answer is not accepted
  Rows seg_states;  // of each segmentation token the state [hidden] that chose it, behind the decoder's last norm
  std::optional<std::vector<Box>> boxes;  // if they were asked for
  std::optional<std::string> thought;     // before the answer, which is no part of the text
  int64_t thought_tokens = 0;             // with the end mark
  int64_t prompt_tokens = 0;
  std::optional<PrefillResult> prefill;
  Timings timings;
  Json json;  // the object that vtx-run --json prints of an answer
};

class Model;

// Sets `answer.unsure` if it does not reach its threshold.
void judge(Answer& answer);
// True for a guided answer that ended before its form was complete.
bool is_incomplete(const Answer& answer);
// Sets `answer.json`.
void describe(Answer& answer, const Model& model, const Policy& policy, bool logprobs);

}  // namespace vtxcore
