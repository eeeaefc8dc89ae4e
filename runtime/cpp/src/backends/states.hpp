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
  // Holds the states [layers, 1, ends, numbers] of a run from `length` on; older ones go, but for marked ones.
  void put(int64_t length, const Ids& ends, const float* states);
  // Forgets what comes behind so many tokens, whose state must be held.
  void keep(int64_t length);
  // Holds the state of another one after so many tokens, and marks it.
  void take(const StateHistory& other, int64_t length);

  int64_t layers() const { return static_cast<int64_t>(layers_); }
  int64_t numbers() const { return static_cast<int64_t>(numbers_); }

 private:
  size_t layers_, numbers_;
  int64_t recent_, tried_;  // tokens that it goes back among; those of a run whose states are all held
  std::set<int64_t> marks_;
  std::map<int64_t, Floats> held_;
};

}  // namespace vtxcore
