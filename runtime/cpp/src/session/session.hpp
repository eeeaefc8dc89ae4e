// Caches and hidden states of one conversation: prefill, tokens leaving between stages, decode.
//
// A prompt is cut after its last image token. The *prefix* before the cut does not depend on the question: its hidden
// states and KV slots are computed once and stay. The *suffix* after it is the question, and later the answer. Every
// stage may be needed with all image tokens and after some or all have left, with different caches: it has a segment for
// each. A prompt takes of a segment the longest beginning that it has in common with it, and runs the rest. Slots are not
// positions: a token keeps its position when tokens before it leave.
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
// what it has in common with the one before; `not_reused`: why image tokens were run, in one word, or empty.
struct PrefillResult {
  Floats logits;
  int64_t k = 0, rest = 0;
  bool reused_image = false;
  int64_t reused_layers = 0, reused_tokens = 0, vision_tokens = 0;
  std::string not_reused;
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
  // Begins with a prefix, the caches of the first stages, which hold it, and its text's hidden states after each. Only
  // while nothing has run.
  void begin(Prefix prefix, std::vector<std::unique_ptr<StageCache>> caches, std::vector<SharedRows> text);
  // Begins with the prefix of another one as far as it has come there, and copies of its K and V. Only while nothing has
  // run.
  void copy_prefix(Session& other);
  bool has_run() const { return !segments_.empty(); }
  const Prefix& prefix() const { return *remaining_.front()->prefix; }
  // The number of first tokens of the prefix that a prefix file has.
  size_t filed() const { return filed_; }
  void note_filed(size_t tokens) { filed_ = tokens; }
  // The segments of the first stages that hold the whole prefix.
  std::vector<Segment*> complete();
  // Tokens so far, or positions if there are more: the context has room for this many.
  int64_t length() const {
    return std::max(prefix().next_position, static_cast<int64_t>(prefix().size())) + static_cast<int64_t>(suffix_.size());
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
  void restore(Segment& segment);
  size_t depth();
  size_t first_pruned() const;
  std::pair<size_t, bool> key(size_t number) const { return {number, remaining_[number]->removals.empty()}; }
  int64_t slots(size_t number) const;
  Segment* segment(size_t number);
  size_t cut_back(size_t first, size_t end);
  Rows entering(size_t number, size_t start);
  bool follow(size_t number);
  Rows run_rest(size_t number, const TokenStates& suffix, bool query);
  PrefixSlots layout(size_t number) const;
  Rows run(size_t number, const TokenStates& suffix, bool query, bool alone = false);
  const Remaining& remove(size_t number, const Removal& removal);
  void shrink(int64_t from, const Mask& survivors, size_t suffix);
  PrefillResult result(Floats logits, bool reused);
  Ids per_layer(const Ids& values) const;

  Backend& backend_;
  const Manifest& m_;
  const std::vector<StageSpec>& stages_;
  std::map<std::pair<size_t, bool>, Segment> segments_;  // by stage, and whether all image tokens are there
  std::vector<RemainingPtr> remaining_;                  // the prefix's tokens in each stage, for the last question
  Sources sources_;                      // that `reading_` is over
  std::unique_ptr<StageCache> reading_;  // of the stage whose layers keep nothing
  size_t common_ = 0;  // tokens of the prefix that the first stage held when its last question began
  size_t filed_ = 0;
  std::string obstacle_;  // why the last prompt's prefix was not the one before, in one word; empty: it was
  Ids suffix_;                                 // ids after the prefix that the caches hold
  std::optional<Selection> selection_;         // the question that selected the cached image tokens
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
