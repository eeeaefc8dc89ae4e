// The prefix of a prompt, system text and images, on its way through the decoder: whole, and once tokens have left.
//
// Hidden states are shared and never written to, so that a step that fails leaves what was there before.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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

// K/V of the `dropped` slots of a full stage, after its cache has shrunk to `survivors`.
struct SavedKV {
  size_t stage;
  Ids survivors, dropped;
  SavedSlots kv;
};

// The prefix with all its image tokens, and how deep into the decoder it has come. `boundaries` hold its hidden states
// after 0, 1, 2, ... stages: the first whole, the last likewise unless the image leaves there, those between where tokens
// may leave there, else the text's only.
//
// The first `common` tokens are those of an earlier prefix: their K and V are in the caches of the first `begun.size()`
// stages, and `begun` has the hidden states of the text among them after each. Of them, boundaries after these stages hold
// the text's only.
struct Prefix {
  std::string key;
  Mask is_vision;
  Images images;
  Positions positions;
  int64_t next_position = 0;
  std::vector<SharedRows> boundaries;
  std::vector<SavedKV> saved_kv;
  std::map<std::string, Rows> inputs;  // of all its tokens, which stages read in addition to hidden states
  size_t common = 0;
  std::vector<SharedRows> begun;
  size_t filed = 0;  // the number of first tokens that a prefix file has

  size_t depth() const { return boundaries.size() - 1; }
  size_t size() const { return is_vision.size(); }
  size_t text_size() const { return size() - static_cast<size_t>(count_of(is_vision)); }
  // The number of first tokens that the next stage need not run.
  size_t start() const { return boundaries.size() <= begun.size() ? common : 0; }
  // With the hidden states after one more stage of its tokens from `start` on; `hold` the image tokens' before it.
  void deepen(Rows hidden, bool hold);
  // The hidden states of the text among the first `count` tokens after each stage so far.
  std::vector<SharedRows> text_states(size_t count) const;
  // The number of first tokens with which another prefix begins, too, before the decoder.
  size_t agreement(const Prefix& other) const;
  // Begins where caches hold another prefix: what both have in common is not run again.
  void follow(const Prefix& other);
  // With hidden states to come of all tokens from this one on, not only of those after the `common` ones.
  void run_from(size_t token);
  // Whether the image tokens' hidden states at a boundary are there, or can still come.
  bool held(size_t boundary) const;
  // Back to the last boundary up to this one where all hidden states are there.
  void rewind(size_t boundary);
};

// Positions of a prefix's tokens, and the next one: an image's tokens keep the gaps between them, and their rows and
// columns.
std::pair<Positions, int64_t> place(const Mask& is_vision, const Images& images);

// A removal of image tokens at a boundary: which stayed, and whether all tokens took new positions.
struct Removed {
  size_t boundary;
  bool renumbers;
  Mask kept;
  bool operator==(const Removed& o) const { return boundary == o.boundary && renumbers == o.renumbers && kept == o.kept; }
};

// The prefix after some image tokens have left. `present` of the prefix's tokens are still there; `hidden` stands at the
// boundary after `depth` stages, the text's only where no more was held. The first `common` of those that are left are in
// the caches of all stages to come, and `hidden` is without them.
struct PrunedPrefix {
  std::vector<Removed> removals;
  Mask present;
  Positions positions;
  int64_t next_position = 0;
  SharedRows hidden;
  size_t depth = 0, common = 0;

  static PrunedPrefix whole(const Prefix& prefix, size_t boundary);
  int64_t size() const { return count_of(present); }
  PrunedPrefix without(const Removal& removal, const Mask& is_vision) const;
  // As Prefix::follow, for what is left of both, if that is text and `other` has run through all `stages`; before,
  // `agreed` tokens of the prefix agreed.
  void follow(const PrunedPrefix& other, size_t agreed, size_t stages);
};

// What a stage's cache holds of the prefix for one question: `present` of its tokens ran there, `slots` are left. The
// suffix's first token stands in the slot after these, at `position`.
struct PrefixSlots {
  Mask present;
  int64_t slots, position;
};

}  // namespace vtxcore
