// States of a stage's layers that have a convolution or the gated delta rule in place of attention.
#pragma once

#include <map>
#include <set>

#include "bundle/manifest.hpp"

namespace vtxcore {

// The number of states that a cache holds, by the size of one.
struct HeldStates {
  explicit HeldStates(const ModelSpec& model);
  int64_t recent;  // last tokens whose states are held
  int64_t tried;   // tokens of a run that has the state after each of them held
  int64_t ends;    // the most states of one run: of each of few tokens, or of the last ones and of every mark
};

// States [layers, numbers] by the number of tokens that they have seen; where they are is up to who derives from it.
//
// After 0 tokens they are zeros. Kept are those of the last tokens, and those that are marked: the first mark, which is the
// image's end, and the last ones. A state cannot be cut as slots can: a cache that goes back to another number of tokens
// goes back to the `nearest` one before, and runs the tokens between again.
class StateHistory {
 public:
  StateHistory(const StageSpec& stage, const ModelSpec& model);
  virtual ~StateHistory() = default;

  // The most tokens, at most `length`, whose state is held.
  int64_t nearest(int64_t length) const { return *std::prev(held_.upper_bound(length)); }
  // Has the state after so many tokens held, now or once they have run.
  void mark(int64_t length);
  // Of a run of `count` tokens, behind `length` others, the numbers of those after which states are to be held. `more`:
  // another run follows at once, so that only the last token of this one is gone back to, and marks.
  Ids ends(int64_t length, int64_t count, bool more = false) const;
  // Forgets what comes behind so many tokens, whose state must be held.
  void keep(int64_t length);
  // Holds a copy of another one's state after so many tokens, and marks it.
  virtual void take(StateHistory& other, int64_t length) = 0;

  int64_t layers() const { return static_cast<int64_t>(layers_); }
  int64_t numbers() const { return static_cast<int64_t>(numbers_); }

 protected:
  // Drops the memory of the state after so many tokens, or has it as room for the next.
  virtual void drop(int64_t length) = 0;
  // Throws Error(device) unless that state is held.
  void check(int64_t length) const;
  void hold(int64_t length) { held_.insert(length); }
  // Forgets one state, if it is held.
  void forget(int64_t length);
  // Forgets what goes when tokens have run behind `length`: states of a run behind it that failed, and old ones, but for
  // marked ones. `since`: where the first of several runs began, all of whose tokens may leave again.
  void forget_outlived(int64_t length, int64_t since);

  const size_t layers_, numbers_;

 private:
  const int64_t recent_, tried_;
  std::set<int64_t> marks_, held_{0};
};

// In the host's memory.
//
// While tokens run one by one nothing is copied: a run reads the state before it where it is held, and writes the next one
// into `room`, which is the memory of one that is held no more, and is then held itself.
class HostStates : public StateHistory {
 public:
  HostStates(const StageSpec& stage, const ModelSpec& model);

  // [layers, numbers] after so many tokens, which must be held.
  const Floats& at(int64_t length) const;
  // Memory for the states after so many tokens of a run, [layers, 1, ends, numbers], to be `put`.
  float* room(size_t ends);
  // Holds the states in `room`, of a run from `length` on; older ones go, but for marked ones.
  void put(int64_t length, const Ids& ends);
  void take(StateHistory& other, int64_t length) override;

 protected:
  void drop(int64_t length) override;

 private:
  std::map<int64_t, Floats> states_;
  Floats room_;
};

}  // namespace vtxcore
