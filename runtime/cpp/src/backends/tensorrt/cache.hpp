// K and V of one stage in device memory, and the stage's runs over them.
//
// A conversation's memory of a stage has the slots that it needs, and is replaced by a longer one as it grows: tokens that
// have left the decoder take no memory behind the cut.
//
// Engines read the slots before their tokens, of one buffer with parts of [slots, kv_heads, head_dim] for each layer, and
// write those of their tokens. Layers that keep a state have theirs in the history of states.hpp. A stage reads and writes
// them there, but for decoding, whose recorded work needs one address: it has a copy of the last one, of which it makes the
// next one. step.hpp decodes.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/backend.hpp"
#include "backends/tables.hpp"
#include "backends/tensorrt/loaded.hpp"
#include "backends/tensorrt/regions.hpp"
#include "base/errors.hpp"

namespace vtxcore {

// What a stage of one conversation holds on the device: K and V for `capacity` slots, and what is bound to them, or as many
// hidden states or states of layers.
struct StageMemory {
  explicit StageMemory(int64_t slots) : capacity(slots) {}
  virtual ~StageMemory() = default;
  virtual void clear() = 0;  // makes it as good as new
  const int64_t capacity;
};

// Of slots the number is that of the stage's first layer, of hidden states that of their tokens, and of states of layers,
// one or several in a row, the bytes of one.
enum class MemoryKind { slots, hidden, state, states };
using MemoryKey = std::pair<MemoryKind, int64_t>;

// What the caches of a bundle share. `score`: a graph's file, "" for none. `rope`: cos and sin on the device, `tables` the
// same on the host. If positions have several parts, `own_rope` has room on the device for tables with a row for each token.
struct TensorrtCacheContext {
  LoadedEngines& engines;
  Cuda& cuda;
  const Manifest& manifest;
  std::string dialect;
  std::string score;
  std::map<std::string, Floats> tables = {};
  Addresses rope = {}, own_rope = {};
  std::map<MemoryKey, std::vector<std::unique_ptr<StageMemory>>> unused = {};
  int64_t made = 0;  // memories and states so far

  KVLayout layout(const StageSpec& spec) const { return {manifest.model, spec, manifest.kv_bytes(dialect)}; }
};

// Memory of that capacity, or up to twice as many slots, as a token reads all: of a cache that is gone, else new. A cache
// gives it back as it goes; so the next image allocates nothing, and finds its CUDA graph recorded. All unused memory is
// freed if the device has too little for new one.
template <typename Memory, typename Make>
std::unique_ptr<Memory> borrow(TensorrtCacheContext& shared, const MemoryKey& key, int64_t capacity, const Make& make) {
  auto& unused = shared.unused[key];
  auto best = unused.end();
  for (auto it = unused.begin(); it != unused.end(); ++it)
    if ((*it)->capacity >= capacity && (*it)->capacity <= 2 * capacity &&
        (best == unused.end() || (*it)->capacity < (*best)->capacity))
      best = it;
  if (best != unused.end()) {
    std::unique_ptr<Memory> found(static_cast<Memory*>(best->release()));
    unused.erase(best);
    found->clear();
    return found;
  }
  try {
    return make();
  } catch (const Error&) {
    std::vector<decltype(&unused)> spare;
    for (auto& [other, kept] : shared.unused) {
      // a longer cache would leave no room for a prompt
      if (key.first == MemoryKind::slots && other.first != MemoryKind::slots) continue;
      if (!kept.empty()) spare.push_back(&kept);
    }
    if (spare.empty()) throw;
    shared.cuda.wait();  // queued work may still read it
    for (auto* kept : spare) kept->clear();
    return make();
  }
}

// Gives it back, if there is any.
void give_back(TensorrtCacheContext& shared, const MemoryKey& key, std::unique_ptr<StageMemory> memory) noexcept;

// The queries of a stage's last tokens, on the device, and the score graph's runs over them.
class Queries {
 public:
  explicit Queries(const TensorrtCacheContext& context) : context_(context) {}
  // Makes room for the queries of `count` tokens.
  void room(size_t count);
  // Where the query of that token is to be written.
  uint8_t* address(size_t token) const;
  // What these tokens give to the `length` slots whose keys, of this shape, lie at `key`.
  Scores attention(uint8_t* key, const Ids& shape, int64_t length, bool last_only);

 private:
  Scores run(size_t start, size_t end, uint8_t* key, const Ids& shape, int64_t length, int64_t filled);

  const TensorrtCacheContext& context_;
  std::optional<Buffer> buffer_;
  size_t count_ = 0;
};

std::unique_ptr<StageCache> make_tensorrt_cache(TensorrtCacheContext& context, const StageSpec& spec,
                                                const std::string& graph, int64_t capacity);

// For a stage whose layers keep nothing: over the caches that they read.
std::unique_ptr<StageCache> make_tensorrt_reading_cache(TensorrtCacheContext& context, const StageSpec& spec,
                                                        const std::string& graph, const Sources& sources);

// Runs of neighbouring slots: `count` from `first` on, the `start`-th of them.
struct SlotRun {
  size_t start, first, count;
};
std::vector<SlotRun> slot_runs(const Ids& slots);

// What every stage is bound to besides K and V: shapes of `count` tokens, and addresses. `own_rope`: the rotary tables have
// a row for each token.
void bind_stage(const TensorrtCacheContext& context, const StageSpec& spec, size_t count, bool own_rope, uint8_t* query,
                Shapes& shapes, Addresses& addresses);

// Queues copies of what a stage reads of `count` tokens from `start` on to where it reads it.
void copy_tokens(const TensorrtCacheContext& context, const StageSpec& spec, const TokenStates& tokens, const RopeRows& rope,
                 size_t start, size_t count);

// A layer's keys of `length` slots on the device as numbers, all heads side by side.
Rows read_keys(const TensorrtCacheContext& context, int64_t layer, const uint8_t* key, size_t length);

}  // namespace vtxcore
