// Answers held to a form by llguidance, which is found at run time: choices, a regular expression, a JSON schema or a
// grammar.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "prompt/tokenizer.hpp"

namespace vtxcore {

struct Llguidance;

// The form of an answer. `kind` is "schema" (JSON text), "choices" (a JSON list), "regex" or "grammar" (llguidance's Lark).
struct Guide {
  std::string kind, value;
  void check() const;  // throws Error(request)
  // The texts of "choices", none for another kind. Throws Error(request).
  std::vector<std::string> choices() const;
};

// One answer held to a form.
class GuidedAnswer {
 public:
  GuidedAnswer(const Llguidance& library, std::shared_ptr<void> matcher);

  // The logits [vocab], minus infinity for tokens that may not come next. Throws Error(request).
  Floats mask(const Floats& logits);
  // One more token of the answer; true if nothing may follow it. Throws Error(request).
  bool push(int64_t token);
  // Tokens that are certain to follow, at most `most`, to run in the pass of the token last pushed.
  Ids draft(int64_t most);
  // Of the last mask: the form left one token, or masked the model's most likely one.
  bool imposes() const { return imposes_; }
  // Tokens that `draft` gave.
  int64_t forced() const { return drafted_; }

 private:
  void find_forced();
  [[noreturn]] void failed() const;
  const Llguidance& library_;
  std::shared_ptr<void> matcher_;
  std::vector<uint32_t> forced_, bits_;
  int64_t tokens_ = 0, drafted_ = 0;
  bool imposes_ = false;
};

// The forms that a bundle's tokenizer can hold answers to; safe for many threads.
class Grammars {
 public:
  // `space`: answers usually begin with one. Throws Error(device) without llguidance, Error(request) for a tokenizer that
  // it does not read.
  Grammars(const std::string& tokenizer_json, int64_t vocab, const Ids& end_ids, bool space);
  // Throws Error(request) for a form that cannot be compiled or allows no answer.
  GuidedAnswer start(const Guide& guide);

 private:
  std::shared_ptr<void> compile(const Guide& guide) const;
  const Llguidance& library_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::shared_ptr<void> handle_;
  bool space_;
  std::mutex lock_;
  std::vector<std::pair<std::string, std::shared_ptr<void>>> compiled_;  // the most recently used last
};

}  // namespace vtxcore
