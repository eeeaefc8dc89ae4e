// K and V of one stage in device memory, and the stage's runs over them.
//
// A conversation's memory of a stage has the slots that it needs, and is replaced by a longer one as it grows: tokens that
// have left the decoder take no memory behind the cut.
//
// Engines read the slots before their tokens, of one buffer with parts of [slots, kv_heads, head_dim] for each layer, and
// write those of their tokens. A step, one token through all graphs, is recorded into a CUDA graph once and launched from
// then on; its slot is copied behind the others afterwards. Layers that have no K and V read those of earlier stages then, in
// a second launch.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "backends/tables.hpp"
#include "backends/tensorrt/loaded.hpp"
#include "backends/tensorrt/regions.hpp"
#include "base/errors.hpp"

namespace vtxcore {

// What a stage of one conversation holds on the device: K and V for `capacity` slots, and what is bound to them.
struct StageMemory {
  explicit StageMemory(int64_t slots) : capacity(slots) {}
  virtual ~StageMemory() = default;
  virtual void clear() = 0;  // makes it as good as new
  // Begins with the first `length` slots of shorter memory of the same kind.
  virtual void take_over(const StageMemory& other, int64_t length) = 0;
  const int64_t capacity;
};

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
  // Of each stage, by its first layer, and of hidden states of this many tokens, turned negative.
  std::map<int64_t, std::vector<std::unique_ptr<StageMemory>>> unused = {};
  int64_t made = 0;  // memories so far

  KVLayout layout(const StageSpec& spec) const { return {manifest.model, spec, manifest.kv_bytes(dialect)}; }
};

constexpr int64_t kSlotBlock = 32;  // slots by which memory grows

// Memory of at least `capacity` slots for a stage's cache: of a cache that is gone, else new. A cache gives it back as it
// goes; so the next image allocates nothing, and finds its CUDA graph recorded. All unused memory of caches is freed if the
// device has too little for new one.
template <typename Memory, typename Make>
std::unique_ptr<Memory> borrow(TensorrtCacheContext& shared, int64_t stage, int64_t capacity, const Make& make) {
  auto& unused = shared.unused[stage];
  auto best = unused.end();
  for (auto it = unused.begin(); it != unused.end(); ++it)
    if ((*it)->capacity >= capacity && (best == unused.end() || (*it)->capacity < (*best)->capacity)) best = it;
  if (best != unused.end()) {
    std::unique_ptr<Memory> found(static_cast<Memory*>(best->release()));
    unused.erase(best);
    found->clear();
    return found;
  }
  try {
    return make();
  } catch (const Error&) {
    bool any = false;
    for (auto& [first, kept] : shared.unused) {
      if (stage > 0 && first < 0) continue;  // hidden states, or a longer cache would leave no room for a prompt
      any = any || !kept.empty();
      kept.clear();
    }
    if (!any) throw;
    return make();
  }
}

// Has memory for `slots` slots, at most `limit` of them: if there is too little, longer memory that takes over the first
// `length`. If that fails, all stays as it is.
template <typename Memory>
void make_room(TensorrtCacheContext& shared, const StageSpec& spec, const std::string& graph, int64_t slots, int64_t limit,
               int64_t length, std::unique_ptr<Memory>& memory) {
  if (memory && memory->capacity >= slots) return;
  int64_t capacity = std::min(limit, (slots + kSlotBlock - 1) / kSlotBlock * kSlotBlock);
  auto longer =
      borrow<Memory>(shared, spec.first, capacity, [&] { return std::make_unique<Memory>(shared, spec, graph, capacity); });
  if (memory && length > 0) longer->take_over(*memory, length);
  memory = std::move(longer);
}

// Gives it back.
void give_back(TensorrtCacheContext& shared, int64_t stage, std::unique_ptr<StageMemory> memory) noexcept;

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

struct BoundStage;

// One token through the embedding, every stage and the head on the device: one launch, one wait.
//
// The first step over a conversation's memory is queued, the second recorded into a CUDA graph, and later ones launch it;
// all are queued if TensorRT or the driver cannot record one, and TensorRT-RTX records its own. The logits stay on the
// device unless they are asked for.
class TokenSteps {
 public:
  TokenSteps(TensorrtCacheContext& context, const Graphs& graphs);
  // See Backend; a Use is held meanwhile.
  Step run(const std::vector<StageCache*>& caches, int64_t token, const Ids& positions, bool logits);

 private:
  // Of some of the stages; with the embedding if a token `begins`, and the head if it `ends`.
  void launch(const std::vector<BoundStage*>& stages, bool begins, bool ends);
  void queue(const std::vector<BoundStage*>& stages, bool begins, bool ends);

  TensorrtCacheContext& context_;
  Cuda& cuda_;
  Pinned<int64_t> ids_;
  Pinned<int32_t> best_;
  Pinned<float> state_, logits_;
  std::map<std::string, std::unique_ptr<Pinned<float>>> zeros_;  // token inputs that the embedding does not give
  std::unique_ptr<Context> embed_, head_;
  bool recordable_;
};

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
