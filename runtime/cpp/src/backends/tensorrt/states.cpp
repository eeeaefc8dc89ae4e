#include "backends/tensorrt/states.hpp"

namespace vtxcore {
namespace {

constexpr int64_t kFewestStates = 8;  // states that memory for those of one run has room for, and then powers of two

}  // namespace

DeviceStates::DeviceStates(TensorrtCacheContext& context, const StageSpec& stage)
    : StateHistory(stage, context.manifest.model), context_(context) {}

DeviceStates::~DeviceStates() {
  for (auto& [length, memory] : states_) give_back(context_, key(false), std::move(memory));
  for (Memory& memory : free_) give_back(context_, key(false), std::move(memory));
  give_back(context_, key(false), std::move(room_));
  give_back(context_, key(true), std::move(run_));
}

const StateMemory& DeviceStates::before(int64_t length) {
  check(length);
  if (length == 0 && states_.count(0) == 0) {  // made when it is asked for: a cache takes no memory before its first token
    Memory zeros = taken();
    context_.cuda.zero(zeros->buffer.address(), bytes());
    hold(0, std::move(zeros));
  }
  return *states_.at(length);
}

uint8_t* DeviceStates::room(size_t ends) {
  if (ends == 1) {
    if (!room_) room_ = taken();
    return room_->buffer.address();
  }
  if (!run_ || run_->capacity < static_cast<int64_t>(ends)) {
    int64_t capacity = kFewestStates;
    while (capacity < static_cast<int64_t>(ends)) capacity *= 2;
    Memory made = borrowed(true, capacity);
    give_back(context_, key(true), std::move(run_));  // of a run that failed
    run_ = std::move(made);
  }
  return run_->buffer.address();
}

void DeviceStates::put(int64_t length, const Ids& ends, int64_t since) {
  forget_outlived(length, since);
  if (ends.size() == 1) {
    hold(length + ends[0], std::move(room_));
    return;
  }
  const size_t row = numbers_ * sizeof(float);
  for (size_t number = 0; number < ends.size(); ++number) {
    Memory memory = taken();
    context_.cuda.copy_rows(memory->buffer.address(), row, run_->buffer.address() + number * row, ends.size() * row, row,
                            layers_);
    hold(length + ends[number], std::move(memory));
  }
  give_back(context_, key(true), std::move(run_));
}

void DeviceStates::take(StateHistory& other, int64_t length) {
  if (length > 0) {
    Cuda::Use held(context_.cuda);
    forget(length);
    Memory memory = taken();
    const StateMemory& from = static_cast<DeviceStates&>(other).before(length);
    context_.cuda.copy_rows(memory->buffer.address(), bytes(), from.buffer.address(), bytes(), bytes(), 1);
    hold(length, std::move(memory));
  }
  mark(length);
}

void DeviceStates::drop(int64_t length) {
  auto state = states_.find(length);
  free_.push_back(std::move(state->second));
  states_.erase(state);
}

MemoryKey DeviceStates::key(bool several) const {
  return {several ? MemoryKind::states : MemoryKind::state, static_cast<int64_t>(bytes())};
}

DeviceStates::Memory DeviceStates::borrowed(bool several, int64_t capacity) {
  return borrow<StateMemory>(context_, key(several), capacity,
                             [&] { return std::make_unique<StateMemory>(context_.cuda, capacity, bytes()); });
}

DeviceStates::Memory DeviceStates::taken() {
  if (free_.empty()) return borrowed(false, 1);
  Memory memory = std::move(free_.back());
  free_.pop_back();
  return memory;
}

void DeviceStates::hold(int64_t length, Memory memory) {
  memory->version = ++context_.made;
  states_[length] = std::move(memory);
  StateHistory::hold(length);
}

}  // namespace vtxcore
