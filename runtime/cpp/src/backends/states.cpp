#include "backends/states.hpp"

#include <algorithm>

#include "base/errors.hpp"

namespace vtxcore {

HeldStates::HeldStates(const ModelSpec& model) {
  const int64_t fit = std::max<int64_t>(1, names::kStateBytes / (4 * model.state_numbers));
  recent = std::min(names::kRecent, fit), tried = std::min(names::kTried, fit);
  ends = std::max(tried, 2 * recent + 1);
}

StateHistory::StateHistory(const StageSpec& stage, const ModelSpec& model)
    : layers_(stage.stateful.size()), numbers_(static_cast<size_t>(model.state_numbers)), recent_(HeldStates(model).recent),
      tried_(HeldStates(model).tried) {}

void StateHistory::check(int64_t length) const {
  if (held_.count(length) == 0) fail(Kind::device, "the state after ", length, " tokens is not held");
}

void StateHistory::mark(int64_t length) {
  marks_.insert(length);
  if (static_cast<int64_t>(marks_.size()) > 1 + recent_) marks_.erase(std::next(marks_.begin()));
}

Ids StateHistory::ends(int64_t length, int64_t count, bool more) const {
  std::set<int64_t> found;
  const int64_t first = more ? count : count > tried_ ? std::max<int64_t>(1, count - recent_ + 1) : 1;
  for (int64_t end = first; end <= count; ++end) found.insert(end);
  for (int64_t mark : marks_)
    if (mark > length && mark - length <= count) found.insert(mark - length);
  return {found.begin(), found.end()};
}

void StateHistory::keep(int64_t length) {
  check(length);
  while (*held_.rbegin() > length) forget(*held_.rbegin());
  marks_.erase(marks_.upper_bound(length), marks_.end());
}

void StateHistory::forget(int64_t length) {
  if (held_.erase(length) > 0) drop(length);
}

void StateHistory::forget_outlived(int64_t length, int64_t since) {
  for (int64_t at : Ids(held_.begin(), held_.end()))
    if (at > length || (at > 0 && at <= since - recent_ && marks_.count(at) == 0)) forget(at);
}

HostStates::HostStates(const StageSpec& stage, const ModelSpec& model) : StateHistory(stage, model) {
  states_[0] = Floats(layers_ * numbers_);
}

const Floats& HostStates::at(int64_t length) const {
  check(length);
  return states_.at(length);
}

float* HostStates::room(size_t ends) {
  const size_t size = ends * layers_ * numbers_;
  if (room_.size() != size) room_ = Floats(size);
  return room_.data();
}

void HostStates::put(int64_t length, const Ids& ends) {
  std::map<int64_t, Floats> made;
  if (ends.size() == 1) {
    made[length + ends[0]] = std::move(room_);
  } else {
    for (size_t number = 0; number < ends.size(); ++number) {
      Floats& state = made[length + ends[number]];
      state.reserve(layers_ * numbers_);
      for (size_t layer = 0; layer < layers_; ++layer) {
        const float* from = room_.data() + (layer * ends.size() + number) * numbers_;
        state.insert(state.end(), from, from + numbers_);
      }
    }
  }
  room_ = Floats();
  forget_outlived(length, length);
  for (auto& [at, state] : made) {
    states_[at] = std::move(state);
    hold(at);
  }
}

void HostStates::drop(int64_t length) {
  auto state = states_.find(length);
  if (room_.empty()) room_ = std::move(state->second);
  states_.erase(state);
}

void HostStates::take(StateHistory& other, int64_t length) {
  states_[length] = static_cast<HostStates&>(other).at(length);
  hold(length);
  mark(length);
}

}  // namespace vtxcore
