// The prefix of a prompt, system text and images, and the tokens of it that each stage runs.
//
// Hidden states are shared and never written to, so that a step that fails leaves what was there before.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "base/tensors.hpp"
#include "policies/policy.hpp"

namespace vtxcore {

using SharedRows = std::shared_ptr<const Rows>;
using ImagePtr = std::shared_ptr<const ImageTokens>;

// Equal keys mean equal image tokens; `encode` gives them and is called only where they are not cached.
struct Encoder {
  std::string key;
  std::function<ImagePtr()> encode;
};

// Token ids; those in `is_vision` stand for the image tokens of `encoders`, in order. `skipped`: positions between image
// tokens, and after them, that have no token.
struct Prompt {
  Ids ids;
  Mask is_vision;
  std::vector<Encoder> encoders;
  int64_t skipped = 0;

  size_t prefix_length() const;  // up to and including the last image token; 0 without an image
  // Equal keys mean equal prefixes; `whole`: of a prefix that sees the text behind it, so of the whole prompt.
  std::string prefix_key(bool whole) const;
};

// The tokens of a prompt up to its last image, before the decoder: what its K and V are computed from. `question`: the ids
// behind it, if its tokens see them; `hidden` and `inputs` go into the stages.
struct Prefix {
  std::string key, question;
  Mask is_vision;
  Images images;
  Positions positions;
  int64_t next_position = 0;
  Rows hidden;
  std::map<std::string, Rows> inputs;

  size_t size() const { return is_vision.size(); }
  // The number of leading tokens that are equal, so that all which follows from them is equal, too.
  size_t agreement(const Prefix& other) const;
  // Why not all of its tokens are those of a former one, in one word; empty: all are.
  std::string difference(const Prefix& former) const;
  // The first token of the group that this one continues, since those of a group see each other; or this one.
  size_t begin_of_group(size_t token) const;
};

// Positions of a prefix's tokens, and the next one: an image's tokens keep the gaps between them, and their rows and
// columns.
std::pair<Positions, int64_t> place(const Mask& is_vision, const Images& images);

struct Remaining;
using RemainingPtr = std::shared_ptr<const Remaining>;

// The tokens of a prefix that run in a stage: those that are `present`, at `positions`. `next_position` is the suffix's.
// `removals`: the stages before which tokens left, and whether those that stayed took new positions.
struct Remaining {
  std::shared_ptr<const Prefix> prefix;
  Mask present;
  Positions positions;
  int64_t next_position;
  std::vector<std::pair<size_t, bool>> removals;

  static RemainingPtr of(Prefix prefix);
  size_t size() const { return positions.size(); }
  Mask is_vision() const;  // of those present
  // Whether these are the same tokens whatever is asked: no image token has left, or all at once.
  bool serves_all() const { return removals.empty() || (removals.size() == 1 && count_of(is_vision()) == 0); }
  // The number of leading tokens whose K and V in a stage are those of `other`'s: all before them is equal. None if a
  // question chose them: with another one they run in that one's pass, as in a fresh conversation.
  size_t agreement(const Remaining& other) const;
  // As of Prefix, by the number among those present.
  size_t begin_of_group(size_t token) const;
  // The tokens that continue after a removal before stage `number`.
  RemainingPtr without(const Removal& removal, size_t number) const;
};

// K/V of the `dropped` slots of a stage, after its cache has shrunk to `survivors`.
struct SavedKV {
  Ids survivors, dropped;
  SavedSlots kv;
};

// A stage's cache and its content: the K and V of the first of `tokens`, one for each value of `known`. `states` are their
// hidden states after the stage, of those that are `known`. `saved` is missing from the cache.
struct Segment {
  std::unique_ptr<StageCache> cache;
  RemainingPtr tokens;
  Mask known;
  SharedRows states;
  std::optional<SavedKV> saved;

  // True if all of these tokens are those that it holds.
  bool holds(const RemainingPtr& all) const { return tokens == all && known.size() == all->size(); }
  // Forgets all but the first `length`, which are those of other tokens, too.
  void cut_back(const RemainingPtr& other, size_t length);
  // Further tokens, and the hidden states of those `more` of them.
  void extend(Rows hidden, const Mask& more);
  // Forgets the hidden states of image tokens.
  void leave_text();
  // The hidden states of some tokens, rising, which must be known.
  Rows states_of(const Ids& indices) const;
};

// What a stage's cache holds of the prefix for one question: `present` of its tokens ran there, `slots` are left. The
// suffix's first token stands in the slot after these, at `position`.
struct PrefixSlots {
  Mask present;
  int64_t slots, position;
};

}  // namespace vtxcore
