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
#include <memory>
#include <optional>
#include <string>

#include "backends/backend.hpp"
#include "backends/tensorrt/loaded.hpp"

namespace vtxcore {

// What the caches of a bundle share. `rope`: cos and sin on the device; `score`: a graph's file, "" for none.
struct TensorrtCacheContext {
  LoadedEngines& engines;
  Cuda& cuda;
  const Manifest& manifest;
  std::string dialect;
  Addresses rope;
  std::string score;

  // Bytes of one slot of one head, K or V.
  size_t slot_bytes() const { return static_cast<size_t>(manifest.model.head_dim * manifest.kv_bytes(dialect)); }
};

// The queries of a stage's last tokens, on the device, and the score graph's runs over them.
class Queries {
 public:
  explicit Queries(const TensorrtCacheContext& context) : context_(context) {}
  // The address where the queries of `count` tokens are to be written.
  uint8_t* room(size_t count);
  // What these tokens give to the first `length` of the `slots` slots whose keys lie at `key`.
  Scores attention(uint8_t* key, int64_t slots, int64_t length, bool last_only);

 private:
  Scores run(size_t start, size_t end, uint8_t* key, int64_t slots, int64_t filled);

  const TensorrtCacheContext& context_;
  std::optional<Buffer> buffer_;
  size_t count_ = 0;
};

// A stage's cache of either dialect.
std::unique_ptr<StageCache> make_tensorrt_cache(const TensorrtCacheContext& context, const StageSpec& spec,
                                                const std::string& graph, int64_t capacity);
std::unique_ptr<StageCache> make_growing_cache(const TensorrtCacheContext& context, const StageSpec& spec,
                                               const std::string& graph, int64_t capacity);

// Runs of neighbouring slots: `count` from `first` on, the `start`-th of them.
struct SlotRun {
  size_t start, first, count;
};
std::vector<SlotRun> slot_runs(const Ids& slots);

// What every stage is bound to besides K and V: shapes of `count` tokens, and addresses.
void bind_stage(const TensorrtCacheContext& context, const StageSpec& spec, size_t count, uint8_t* query, Shapes& shapes,
                Addresses& addresses);

// Keys [kv_heads, slots, head_dim] as they lie on the device, of which `length` slots are filled, as numbers, all heads
// side by side.
Rows read_keys(const TensorrtCacheContext& context, const uint8_t* key, size_t slots, size_t length);

}  // namespace vtxcore
