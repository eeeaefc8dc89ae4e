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

// One token, as in decoding, runs through a binding made once. Of a stage whose layers keep nothing it is a cache over
// `sources`, whose last slots have the tokens of a run already.
class OrtStageCache : public StageCache {
 public:
  OrtStageCache(const OrtCacheContext& context, const OrtGraph& stage, const StageSpec& spec, int64_t slots,
                const Sources& sources = {});

  Scores attention(bool last_only) override;
  Rows keys() override;
  SavedSlots read_kv(const Ids& slots) override { return memory_.read(slots); }
  std::optional<LayerForm> layer_form(int64_t slots, size_t index) const override;
  bool reads_only() const override { return !sources_.empty(); }

 protected:
  Rows run(const TokenStates& tokens, const Positions& positions, bool query, const Ids* outputs) override;
  void put_kv(const Ids& slots, const SavedSlots& kv, int64_t) override { memory_.write(slots, kv); }
  // The products of a run's tokens with all slots are held at once where images see themselves both ways.
  int64_t run_limit() const override;

 private:
  struct Layer {
    int64_t number;
    const OrtTensor *keys, *values;
  };
  // The cache of a layer that is read, and a tensor over its last filled slot.
  struct Source {
    const OrtStageCache* cache;
    OrtTensor last_tensor;
  };

  // The slots that a run's tokens see: how many of the first, and from which one on in layers that slide.
  struct Seen {
    Ids slots, first;
  };

  // Over tokens, their rows of rotary tables, the slots they see and hidden states after the stage, which must stay until
  // the binding has run.
  void bind(OrtBinding& binding, const TokenStates& tokens, const RopeRows& rope, const Seen& seen, const Rows& out);
  // Runs a binding of `count` tokens. Layers that keep a state read and write it where it is held.
  void run_bound(OrtBinding& binding, int64_t count);
  // Sets the inputs for slots, those of `count` new tokens included; where they see.
  Seen count_slots(const TokenStates& tokens, const Positions& positions);

  const OrtCacheContext& context_;
  const OrtGraph& stage_;
  const StageSpec spec_;
  SlotMemory memory_;
  std::vector<OrtTensor> buffers_;  // key, value of each layer that it keeps
  std::map<int64_t, Source> sources_;
  std::map<int64_t, int32_t> source_slots_;
  std::vector<Layer> layers_;     // that its graph reads
  int32_t last_ = 0, total_ = 0;  // the slots that a run is told of
  OrtTensor last_tensor_, total_tensor_;
  Rows query_;
  TokenStates token_;  // the one token of a step
  Rows token_out_;
  RopeRows token_rope_;
  Seen token_seen_;
  OrtBinding token_binding_;
};

}  // namespace vtxcore
