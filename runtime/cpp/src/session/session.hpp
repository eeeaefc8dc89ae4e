// Caches and hidden states of one conversation: prefill, tokens leaving between stages, decode.
//
// A prompt is cut after its last image token. The *prefix* before the cut does not depend on the question: its hidden
// states and KV slots are computed once and stay. The *suffix* after it is the question, and later the answer. Every
// stage may be needed with all image tokens (`full_`) and after some or all have left (`pruned_`), with different
// caches. Slots are not positions: a token keeps its position when tokens before it leave.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "backends/backend.hpp"
#include "session/prefix.hpp"

namespace vtxcore {

// A question that selected which image tokens stay: the prefix it followed, its policy, its ids.
struct Selection {
  std::string key, policy;
  Ids ids;
  bool operator==(const Selection& o) const { return key == o.key && policy == o.policy && ids == o.ids; }
};

// Image tokens left before `layer`; `kept` of those that entered continued, `by` names what left out the others.
struct Cut {
  int64_t layer;
  std::vector<std::string> by;
  Mask kept;
};

// What a prefill did. Per-layer vectors start with layer 1; `k` is the first layer without image tokens but for
// a `rest` of them that stayed there, 0 where none left by K; `reused_layers`: in layers 1 to this one no image token was
// run; `reused_tokens`: of the prompt that caches of an earlier question served: the prefix where no image token was run, or
// what it has in common with the one before.
struct PrefillResult {
  Floats logits;
  int64_t k = 0, rest = 0;
  bool reused_image = false;
  int64_t reused_layers = 0, reused_tokens = 0, vision_tokens = 0;
  Ids slots, vision_kept;
  Images images;
  std::vector<Cut> cuts;
  Selection selection;
};

using Check = std::function<void()>;  // called before every image and stage; may throw, to stop there

// One conversation over a shared backend. Not safe for two threads at once; its owner locks it. An exception at any
// point costs a computation and leaves the session correct.
class Session {
 public:
  Session(Backend& backend, const Manifest& manifest);

  // Runs a prompt, and gives the logits [vocab] at its last token. The policy is asked anew, unless the prompt continues
  // `after` a question: then the image tokens that stay are those of that question. Throws Error(context) where prompt
  // and one new token do not fit, Error(request) where no text stands after the last image.
  PrefillResult prefill(const Prompt& prompt, const Policy& policy, const Selection* after, const Check& check);
  // Runs the next tokens in one pass; the logits [tokens, vocab] after each.
  Rows decode(const Ids& tokens);
  // Runs the next token; the id of the largest logit after it, the first of equal ones. None, and nothing has run, where
  // only `decode` can do that. Throws Error(bundle): the logits are not finite.
  std::optional<int64_t> choose(int64_t token);
  // The same for tokens that leave the caches again.
  Rows try_tokens(const Ids& tokens);

  int64_t capacity() const { return m_.max_context; }
  // The hidden states [tokens, hidden] of the last layer, of which `prefill` or `decode` last gave the logits.
  const Rows& states() const { return states_; }
  // The next prompt's prefix may be another one. What it has in common with this one is then not run again; its K and V come
  // from a run of another length, so they are equal up to rounding. Not of a model whose tokens see those behind them, nor
  // where layers keep a state, which cannot be cut back.
  void continue_prefix() { continues_ = !whole_prompt() && m_.model.conv_layers.empty(); }
  // Begins with another prefix, which the next one continues, and the caches of the first stages, which hold it. Only while
  // nothing has run.
  void begin(Prefix prefix, std::vector<std::unique_ptr<StageCache>> caches);
  // Begins with the prefix of another one as far as it has come in full caches, and copies of its K and V. Only while
  // nothing has run.
  void copy_prefix(Session& other);
  bool has_run() const { return !full_.empty() || !pruned_.empty(); }
  const Prefix& prefix() const { return prefix_; }
  void note_filed(size_t tokens) { prefix_.filed = tokens; }
  StageCache& full_cache(size_t number) { return *full_.at(number); }
  // Tokens so far, or positions if there are more: the context has room for this many.
  int64_t length() const {
    return std::max(prefix_.next_position, static_cast<int64_t>(prefix_.size())) + static_cast<int64_t>(suffix_.size());
  }
  // The cache that stage `number` runs in for this question; for whoever records positions.
  StageCache& cache(size_t number);

 private:
  void check_room(int64_t tokens, int64_t vision) const;
  Rows run_suffix(const Prompt& prompt, const Policy& policy, const Selection* after);
  Rows select(const Selection& selection, const Policy& policy);
  Rows append(const Ids& ids, bool of_prompt = false);
  size_t held(size_t agreed);
  Step step(bool logits, int64_t token);
  TokenStates embed(const Ids& ids, bool of_prompt = false);
  int64_t image_count(size_t number) const;
  bool whole_prompt() const { return m_.model.two_way == TwoWay::prompt; }  // its tokens see each other both ways
  std::unique_ptr<StageCache> new_cache(size_t number, int64_t slots);
  Boundary boundary(size_t number, const TokenStates& suffix, const Policy& policy);
  void replace_prefix(const Prompt& prompt);
  Prefix empty_prefix() const;
  void prepare(const Policy& policy);
  PrefixSlots layout(size_t number) const;
  Rows run(size_t number, const TokenStates& suffix, bool query, bool alone = false);
  const PrunedPrefix& remove(size_t number, const Removal& removal);
  void shrink(int64_t from, const Mask& survivors, size_t suffix);
  PrefillResult result(Floats logits, bool reused);
  Ids per_layer(const Ids& values) const;

  using Caches = std::map<size_t, std::unique_ptr<StageCache>>;

  Backend& backend_;
  const Manifest& m_;
  const std::vector<StageSpec>& stages_;
  Caches full_, pruned_;
  Sources sources_;                      // that `reading_` is over
  std::unique_ptr<StageCache> reading_;  // of the stage whose layers keep nothing
  Prefix prefix_;
  bool continues_ = false;  // the next other prefix does not run again what it has in common with this one
  std::optional<PrunedPrefix> pruned_prefix_;  // what `pruned_` holds of the prefix
  std::optional<PrunedPrefix> former_;         // what it holds of the one before, until another one runs there
  Ids suffix_;                                 // ids after the prefix that the caches hold
  std::optional<Selection> selection_;         // the question that selected the cached image tokens
  size_t first_pruned_;                        // the stage from which on the suffix runs in `pruned_`
  std::set<size_t> holding_;                   // boundaries at which hidden states of all image tokens are kept
  size_t exit_ = 0;                            // the stage before which all image tokens leave for certain
  bool drops_unread_ = true;                   // whether hidden states that only another K would read are left out
  size_t reused_suffix_ = 0;                   // tokens of the last prefill's suffix that were cached
  std::optional<int64_t> rest_cut_;            // of the policy that selected them
  size_t reused_stages_ = 0;                   // from the first on, in which the last prefill ran no image token
  std::vector<PrefixSlots> layouts_;
  std::vector<Cut> cuts_;
  Check check_;
  Rows states_;
};

}  // namespace vtxcore
