// K and V of one stage in device memory, and the stage's runs over them.
//
// Engines of the `trt` dialect update caches in place: one buffer [layers, 2, kv_heads, slots, head_dim] with as many
// slots as the engine was built for; each layer's K and V are bound as input and output at one address. Decoding one
// token is recorded into a CUDA graph once and launched from then on.
//
// Engines of the `plain` dialect have caches that grow: a past of [1, kv_heads, slots, head_dim] for each layer goes in,
// a present longer by the new tokens comes out, so two buffers take turns.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "backends/tensorrt/loaded.hpp"
#include "base/errors.hpp"

namespace vtxcore {

// What a stage of one conversation holds on the device: K and V for `capacity` slots, and what is bound to them.
struct StageMemory {
  explicit StageMemory(int64_t slots) : capacity(slots) {}
  virtual ~StageMemory() = default;
  virtual void clear() = 0;  // makes it as good as new
  const int64_t capacity;
};

// What the caches of a bundle share. `rope`: cos and sin on the device; `score`: a graph's file, "" for none.
struct TensorrtCacheContext {
  LoadedEngines& engines;
  Cuda& cuda;
  const Manifest& manifest;
  std::string dialect;
  Addresses rope;
  std::string score;
  std::map<int64_t, std::vector<std::unique_ptr<StageMemory>>> unused = {};  // of each stage, by its first layer

  // Bytes of K or V of one layer for these slots, so that what follows them is aligned.
  size_t bytes_of(int64_t slots) const {
    size_t bytes = static_cast<size_t>(manifest.model.kv_heads * slots) * slot_bytes();
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  // Bytes of one slot of one head, K or V.
  size_t slot_bytes() const { return static_cast<size_t>(manifest.model.head_dim * manifest.kv_bytes(dialect)); }
};

// Memory of at least `capacity` slots for a stage's cache: of a cache that is gone, else new. A cache gives it back as it
// goes; so the next image allocates nothing, and finds its CUDA graph recorded. All unused memory is freed if the device
// has too little for new one.
template <typename Memory>
std::unique_ptr<Memory> borrow(TensorrtCacheContext& shared, int64_t stage, int64_t capacity,
                               const std::function<std::unique_ptr<Memory>()>& make) {
  Cuda::Use held(shared.cuda);
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
    for (const auto& [first, kept] : shared.unused) any = any || !kept.empty();
    if (!any) throw;
    shared.unused.clear();
    return make();
  }
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
  // What these tokens give to the first `length` of the `slots` slots whose keys lie at `key`.
  Scores attention(uint8_t* key, int64_t slots, int64_t length, bool last_only);

 private:
  Scores run(size_t start, size_t end, uint8_t* key, int64_t slots, int64_t filled);

  const TensorrtCacheContext& context_;
  std::optional<Buffer> buffer_;
  size_t count_ = 0;
};

// A stage's cache of either dialect.
std::unique_ptr<StageCache> make_tensorrt_cache(TensorrtCacheContext& context, const StageSpec& spec,
                                                const std::string& graph, int64_t capacity);
std::unique_ptr<StageCache> make_growing_cache(TensorrtCacheContext& context, const StageSpec& spec,
                                               const std::string& graph, int64_t capacity);

// Runs of neighbouring slots: `count` from `first` on, the `start`-th of them.
struct SlotRun {
  size_t start, first, count;
};
std::vector<SlotRun> slot_runs(const Ids& slots);

// Runs `one(start, count, queries)` on parts of `tokens` tokens that the stage's engine takes at once, and joins what comes
// out. `queries`: where those of the part go, null for none.
Rows in_parts(size_t tokens, size_t longest, Queries* queries,
              const std::function<Rows(size_t start, size_t count, uint8_t* queries)>& one);

// What every stage is bound to besides K and V: shapes of `count` tokens, and addresses.
void bind_stage(const TensorrtCacheContext& context, const StageSpec& spec, size_t count, uint8_t* query, Shapes& shapes,
                Addresses& addresses);

// Queues copies of what a stage reads of `count` tokens from `start` on to where it reads it.
void copy_tokens(const TensorrtCacheContext& context, const StageSpec& spec, const TokenStates& tokens, const Ids& positions,
                 size_t start, size_t count);

// Keys [kv_heads, slots, head_dim] as they lie on the device, of which `length` slots are filled, as numbers, all heads
// side by side.
Rows read_keys(const TensorrtCacheContext& context, const uint8_t* key, size_t slots, size_t length);

}  // namespace vtxcore
