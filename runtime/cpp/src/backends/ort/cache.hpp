// K and V of a stage on ONNX Runtime: buffers allocated once, bound as input and output alike.
#pragma once

#include <map>
#include <memory>
#include <optional>

#include "backends/backend.hpp"
#include "backends/ort/graph.hpp"
#include "backends/slots.hpp"
#include "backends/tables.hpp"

namespace vtxcore {

// What the caches of a bundle share: the rotary tables, the scales of int8 K and V, and the score graph.
struct OrtCacheContext {
  const OrtLibrary& ort;
  const Manifest& manifest;
  std::map<std::string, Floats> constants;   // by name
  std::map<std::string, OrtTensor> tensors;  // over `constants`
  HostGraph* score = nullptr;
};

// One token, as in decoding, runs through a binding made once.
class OrtStageCache : public StageCache {
 public:
  OrtStageCache(const OrtCacheContext& context, const OrtGraph& stage, const StageSpec& spec, int64_t slots);

  Scores attention(bool last_only) override;
  Rows keys() override;
  SavedSlots read(const Ids& slots) override { return memory_.read(slots); }
  std::optional<LayerForm> layer_form(int64_t slots) const override;
  void write(const Ids& slots, const SavedSlots& kv, int64_t filled) override;

 protected:
  Rows run(const TokenStates& tokens, const Positions& positions, bool query, const Ids* outputs) override;

 private:
  // Over tokens, their rows of rotary tables, the slots they see and hidden states after the stage, which must stay until
  // the binding has run.
  void bind(OrtBinding& binding, const TokenStates& tokens, const RopeRows& rope, const Ids& seen, const Rows& out);
  // Runs a binding of `count` tokens. Layers that keep a state read and write it where it is held.
  void run_bound(OrtBinding& binding, int64_t count);

  const OrtCacheContext& context_;
  const OrtGraph& stage_;
  const StageSpec spec_;
  SlotMemory memory_;
  std::vector<OrtTensor> buffers_;  // key, value of each layer
  int32_t last_ = 0, total_ = 0;    // the slots that a run is told of
  OrtTensor last_tensor_, total_tensor_;
  Rows query_;
  TokenStates token_;  // the one token of a step
  Rows token_out_;
  RopeRows token_rope_;
  Ids token_seen_;
  OrtBinding token_binding_;
};

}  // namespace vtxcore
