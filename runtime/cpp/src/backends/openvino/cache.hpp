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
  size_t most_rows = 0;                       // of one run; 0: any number
  std::map<int64_t, Floats> key_scales = {};  // [kv_heads, head_dim] by layer: keys in u8 are divided by them

  size_t element_bytes() const;
  // Array elements of one slot of one head of a layer.
  size_t slot_width(int64_t layer) const;
  // Bytes of one slot of one layer, K and V of all heads.
  int64_t slot_bytes() const;
};

// The memory has of each layer [2, blocks, kv_heads, slots of a block, slot width]. One token, as in decoding, runs through
// tensors made once.
class OpenvinoStageCache : public StageCache {
 public:
  OpenvinoStageCache(const OpenvinoCacheContext& context, const OpenvinoStage& stage, const StageSpec& spec, int64_t slots);

  Scores attention(bool last_only) override;
  Rows keys() override;
  SavedSlots read_kv(const Ids& slots) override;
  std::optional<LayerForm> layer_form(int64_t slots, size_t index) const override;
  // Keys, or values, of a layer that it keeps: [length, kv_heads * head_dim].
  Rows numbers(int64_t layer, bool values);
  // Throws Error(device) if the engine's attention is causal for these two tokens of an image, too.
  void check_both_ways(TokenStates tokens);
  bool selects_outputs() const override { return !spec_.cached.empty() && spec_.cached.back() == spec_.last; }

 protected:
  // Many hidden states in runs of nearly the same size, which gives the same ones.
  Rows run(const TokenStates& tokens, const Positions& positions, bool query, const Ids* outputs) override;
  void put_kv(const Ids& slots, const SavedSlots& kv, int64_t filled) override;

 private:
  // Where a run ends, and the slots that its tokens see in layers that slide: so many, or all from `from` on; 0: all.
  struct Run {
    size_t end;
    int32_t window = 0;
    int64_t from = 0;
  };
  // Inputs of attention that say which blocks have a run's slots.
  struct RunSlots {
    std::string prefix;
    int32_t past[1] = {}, block_begins[2] = {}, filled = 0;
    int64_t first = 0;  // block
  };
  // As few runs as the engine allows, before they are cut to the number of one run. Where tokens see all slots from one on,
  // as behind an image that was withdrawn, these are copied to blocks that nothing else is in. Throws Error(request): the
  // tokens of an image would have to go in several.
  std::vector<Run> windows(const TokenStates& tokens, const Positions& positions) const;
  std::vector<Run> runs(const TokenStates& tokens, const Positions& positions) const;
  void set(const std::string& name, openvino::Type type, const Ids& shape, const void* data);
  // Runs `count` tokens over what is set, behind `before` others.
  void run_request(int64_t before, size_t count);
  void run_parts(const TokenStates& tokens, const RopeRows& rope, const Ids& outputs, const std::vector<Run>& runs,
                 Rows& out, Rows* queries);
  // Takes the queries of a run of `count` tokens into those of all, from the `first` on.
  void take_queries(size_t first, size_t count, Rows& queries);
  // Tensors over the caller's memory, which must stay until others are bound: `count` tokens from the `first` on, which of
  // them are `asked` for, and where these go.
  void bind(size_t first, size_t count, const TokenStates& tokens, const RopeRows& rope, const std::vector<int32_t>& asked,
            float* out);
  void set_slots(RunSlots& slots);
  void place_slots(RunSlots& slots, int64_t before, int64_t count, int64_t first_block);
  // Tells attention the slots of a run of `count` tokens behind `before` others, runs it, and takes K and V from copies.
  void run_at(const Run& run, int64_t before, size_t count);
  // Copies K and V of layers that slide: slots from `first` to `end`, to those as many as `distance` further on.
  void copy_sliding(int64_t first, int64_t end, int64_t distance);
  size_t head_bytes(size_t plane) const { return context_.slot_width(spec_.cached[plane / 2]) * context_.element_bytes(); }
  static std::vector<size_t> plane_bytes(const OpenvinoCacheContext& context, const StageSpec& spec, int64_t slots);
  // The bytes of a slot's row of one head; `plane` counts layers and, in each, K and V.
  uint8_t* row(size_t plane, int64_t slot, size_t head);
  // Each row of these slots, in the order [layers, slots, 2, kv_heads] of saved ones.
  template <typename Work>
  void each_row(const Ids& slots, Work work) {
    for (size_t plane = 0; plane < 2 * spec_.cached.size(); plane += 2)
      for (int64_t slot : slots)
        for (size_t part : {plane, plane + 1})
          for (size_t head = 0; head < heads_; ++head) work(row(part, slot, head), head_bytes(part));
  }

  const OpenvinoCacheContext& context_;
  const OpenvinoStage& stage_;
  const StageSpec spec_;
  const size_t heads_, blocks_;
  const std::vector<size_t> begins_;  // of each plane in the memory, and its end
  ZeroedPages memory_;
  std::unique_ptr<openvino::Request> request_, for_many_;
  openvino::Request* ran_;  // last
  int32_t run_begins_[2] = {}, window_ = 0;
  RunSlots slots_, slots_of_sliding_{names::kPagedSliding};
  std::vector<int32_t> images_;  // of each token of a run: 1 where those beside it with a 1 see it, and it sees them
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

// The cache of a stage whose layers keep nothing: its graph runs as it is written, over K and V of `sources`, caches by
// layer, whose last slots have the tokens of a run already. They are copied out of their blocks for each run.
std::unique_ptr<StageCache> make_openvino_reading_cache(const OpenvinoCacheContext& context, const OpenvinoStage& stage,
                                                        const StageSpec& spec, const Sources& sources);

}  // namespace vtxcore
