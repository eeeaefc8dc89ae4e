// K and V of a stage on OpenVINO: blocks in arrays of ours, which the engine's paged attention reads and fills.
#pragma once

#include <map>
#include <memory>

#include "backends/slots.hpp"
#include "backends/backend.hpp"
#include "backends/openvino/graph.hpp"
#include "backends/tables.hpp"

namespace vtxcore {

// What the caches of a bundle share. In u8 a row of a head is its scale, its zero point, and its numbers.
struct OpenvinoCacheContext {
  const Manifest& manifest;
  openvino::Type kv;  // of K and V as they are kept
  bool half_keys;     // whether the score graph takes keys in float16
  std::map<std::string, Floats> rope;
  HostGraph* score = nullptr;
  size_t most_rows = 0;  // of one run; 0: any number

  size_t element_bytes() const;
  // Array elements of one slot of one head.
  size_t slot_width() const;
  // Bytes of one slot of one layer, K and V of all heads.
  int64_t slot_bytes() const;
};

// The memory is [layers, 2, blocks, kv_heads, slots of a block, slot width]. One token, as in decoding, runs through
// tensors made once.
class OpenvinoStageCache : public StageCache {
 public:
  OpenvinoStageCache(const OpenvinoCacheContext& context, const OpenvinoStage& stage, const StageSpec& spec, int64_t slots);

  Scores attention(bool last_only) override;
  Rows keys() override;
  SavedSlots read(const Ids& slots) override;
  std::optional<LayerForm> layer_form(int64_t slots) const override;
  void write(const Ids& slots, const SavedSlots& kv, int64_t filled) override;
  bool selects_outputs() const override { return !spec_.cached.empty() && spec_.cached.back() == spec_.last; }

 protected:
  // Many hidden states in runs of nearly the same size, which gives the same ones.
  Rows run(const TokenStates& tokens, const Positions& positions, bool query, const Ids* outputs) override;

 private:
  void set(const std::string& name, openvino::Type type, const Ids& shape, const void* data);
  // Runs `count` tokens over what is set, behind `before` others.
  void run_request(int64_t before, size_t count);
  void run_parts(const TokenStates& tokens, const RopeRows& rope, const Ids& outputs, size_t runs, Rows& out);
  // Tensors over the caller's memory, which must stay until others are bound: `count` tokens from the `first` on, which of
  // them are `asked` for, and where these go.
  void bind(size_t first, size_t count, const TokenStates& tokens, const RopeRows& rope, const std::vector<int32_t>& asked,
            float* out);
  void place(int64_t before, int64_t count);
  size_t head_bytes() const { return context_.slot_width() * context_.element_bytes(); }
  // The bytes of a slot's row of one head; `plane` counts layers and, in each, K and V.
  uint8_t* row(size_t plane, int64_t slot, size_t head);
  // Each row of these slots, in the order [layers, slots, 2, kv_heads] of saved ones.
  template <typename Work>
  void each_row(const Ids& slots, Work work) {
    for (size_t plane = 0; plane < 2 * spec_.cached.size(); plane += 2)
      for (int64_t slot : slots)
        for (size_t part : {plane, plane + 1})
          for (size_t head = 0; head < heads_; ++head) work(row(part, slot, head));
  }

  const OpenvinoCacheContext& context_;
  const OpenvinoStage& stage_;
  const StageSpec spec_;
  const size_t heads_, blocks_;
  ZeroedPages memory_;
  std::unique_ptr<openvino::Request> request_, for_many_;
  openvino::Request* ran_;  // last
  int32_t past_[1] = {}, begins_[2] = {}, block_begins_[2] = {}, filled_ = 0;
  std::vector<int32_t> block_numbers_;
  Rows query_;
  TokenStates token_;  // the one token of a step
  Rows token_out_;
  RopeRows token_rope_;
  const std::vector<int32_t> token_asked_{0};
  bool token_bound_ = false;
};

// The cache of a stage whose tokens see each other both ways: its graph runs as it is written, K and V of the filled slots
// go in, and those of the new tokens come out.
std::unique_ptr<StageCache> make_openvino_growing_cache(const OpenvinoCacheContext& context, const OpenvinoStage& stage,
                                                        const StageSpec& spec, int64_t slots);

}  // namespace vtxcore
