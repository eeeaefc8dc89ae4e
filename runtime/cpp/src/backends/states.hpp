// States of a stage's layers that have a convolution or the gated delta rule in place of attention.
#pragma once

#include <map>
#include <set>

#include "bundle/manifest.hpp"

namespace vtxcore {

// States [layers, numbers] by the number of tokens that they have seen.
//
// After 0 tokens they are zeros. Kept are those of the last tokens, and those that are marked: the first mark, which is the
// image's end, and the last ones. A state cannot be cut as slots can: a cache that goes back to another number of tokens
// goes back to the `nearest` one before, and runs the tokens between again.
//
// While tokens run one by one nothing is copied: a run reads the state before it where it is held, and writes the next one
// into `room`, which is the memory of one that is held no more, and is then held itself.
class StateHistory {
 public:
  StateHistory(const StageSpec& stage, const ModelSpec& model);

  // [layers, numbers] after so many tokens, which must be held.
  const Floats& at(int64_t length) const;
  // The most tokens, at most `length`, whose state is held.
  int64_t nearest(int64_t length) const;
  // Has the state after so many tokens held, now or once they have run.
  void mark(int64_t length);
  // Of a run of `count` tokens, behind `length` others, the numbers of those after which states are to be held.
  Ids ends(int64_t length, int64_t count) const;
  // Memory for the states after so many tokens of a run, [layers, 1, ends, numbers], to be `put`.
  float* room(size_t ends);
  // Holds the states in `room`, of a run from `length` on; older ones go, but for marked ones.
  void put(int64_t length, const Ids& ends);
  // Forgets what comes behind so many tokens, whose state must be held.
  void keep(int64_t length);
  // Holds a copy of another one's state after so many tokens, and marks it.
  void take(const StateHistory& other, int64_t length);

  int64_t layers() const { return static_cast<int64_t>(layers_); }
  int64_t numbers() const { return static_cast<int64_t>(numbers_); }

 private:
  using Held = std::map<int64_t, Floats>;
  Held::iterator forget(Held::iterator state);

  size_t layers_, numbers_;
  int64_t recent_, tried_;  // tokens that it goes back among; those of a run whose states are all held
  std::set<int64_t> marks_;
  Held held_;
  Floats room_;
};

}  // namespace vtxcore
