// The states of a stage's layers in the GPU's memory, and copied there alone.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "backends/states.hpp"
#include "backends/tensorrt/cache.hpp"

namespace vtxcore {

// Memory for `capacity` states of a stage. Nothing of it is read before it is written. `version`, of one state, is never
// that of another one.
struct StateMemory : StageMemory {
  StateMemory(Cuda& cuda, int64_t states, size_t bytes)
      : StageMemory(states),
        buffer(cuda, static_cast<size_t>(states) * bytes, cat("the states of layers after ", states, " tokens")) {}
  void clear() override {}
  Buffer buffer;
  int64_t version = 0;
};

// Memory is kept for the next states, and left to the next conversation. All work is queued on the one stream, so that
// memory may be written anew while a run is still to read it. A Use is held meanwhile.
class DeviceStates : public StateHistory {
 public:
  DeviceStates(TensorrtCacheContext& context, const StageSpec& stage);
  ~DeviceStates() override;

  // The state after so many tokens, [layers, 1, numbers], which must be held.
  const StateMemory& before(int64_t length);
  // Memory for the states after so many tokens of a run, [layers, 1, ends, numbers], to be `put`.
  uint8_t* room(size_t ends);
  // Holds the states in the room that was asked for last, of a run from `length` on, which is one of those that began
  // behind `since` tokens.
  void put(int64_t length, const Ids& ends, int64_t since);
  void take(StateHistory& other, int64_t length) override;

  // Bytes of one state.
  size_t bytes() const { return layers_ * numbers_ * sizeof(float); }

 protected:
  void drop(int64_t length) override;

 private:
  using Memory = std::unique_ptr<StateMemory>;

  MemoryKey key(bool several) const;
  Memory borrowed(bool several, int64_t capacity);
  // Memory of one state that is free, or else more of it.
  Memory taken();
  void hold(int64_t length, Memory memory);

  TensorrtCacheContext& context_;
  std::map<int64_t, Memory> states_;
  std::vector<Memory> free_;
  Memory room_, run_;  // of one state, and of those of one run, until they are put
};

}  // namespace vtxcore
