#include "backends/states.hpp"

#include <algorithm>

#include "base/errors.hpp"

namespace vtxcore {

StateHistory::StateHistory(const StageSpec& stage, const ModelSpec& model)
    : layers_(stage.stateful.size()), numbers_(static_cast<size_t>(model.state_numbers)) {
  const int64_t fit = std::max<int64_t>(1, names::kStateBytes / (4 * model.state_numbers));
  recent_ = std::min(names::kRecent, fit), tried_ = std::min(names::kTried, fit);
  held_[0] = Floats(layers_ * numbers_);
}

const Floats& StateHistory::at(int64_t length) const {
  auto found = held_.find(length);
  if (found == held_.end()) fail(Kind::device, "the state after ", length, " tokens is not held");
  return found->second;
}

int64_t StateHistory::nearest(int64_t length) const { return std::prev(held_.upper_bound(length))->first; }

void StateHistory::mark(int64_t length) {
  marks_.insert(length);
  if (static_cast<int64_t>(marks_.size()) > 1 + recent_) marks_.erase(std::next(marks_.begin()));
}

Ids StateHistory::ends(int64_t length, int64_t count) const {
  std::set<int64_t> found;
  for (int64_t end = count > tried_ ? std::max<int64_t>(1, count - recent_ + 1) : 1; end <= count; ++end) found.insert(end);
  for (int64_t mark : marks_)
    if (mark > length && mark - length <= count) found.insert(mark - length);
  return {found.begin(), found.end()};
}

float* StateHistory::room(size_t ends) {
  const size_t size = ends * layers_ * numbers_;
  if (room_.size() != size) room_ = Floats(size);
  return room_.data();
}

void StateHistory::put(int64_t length, const Ids& ends) {
  Held made;
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
  for (auto it = held_.begin(); it != held_.end();)
    it = it->first == 0 || it->first > length - recent_ || marks_.count(it->first) > 0 ? std::next(it) : forget(it);
  for (auto& [at, state] : made) held_[at] = std::move(state);
}

void StateHistory::keep(int64_t length) {
  at(length);
  for (auto it = held_.upper_bound(length); it != held_.end();) it = forget(it);
  marks_.erase(marks_.upper_bound(length), marks_.end());
}

// Drops a state, and has its memory as room for the next.
StateHistory::Held::iterator StateHistory::forget(Held::iterator state) {
  if (room_.empty()) room_ = std::move(state->second);
  return held_.erase(state);
}

void StateHistory::take(const StateHistory& other, int64_t length) {
  held_[length] = other.at(length);
  mark(length);
}

}  // namespace vtxcore
