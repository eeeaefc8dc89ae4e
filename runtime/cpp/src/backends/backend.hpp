// What a backend must do, and nothing more: run the graphs and hold the caches.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/states.hpp"
#include "base/errors.hpp"
#include "base/tensors.hpp"
#include "vision/tokens.hpp"

namespace vtxcore {

// The change of actions [horizon, width] at a time from 1 to 0.
using ExpertStep = std::function<Floats(const Floats& actions, float time)>;
using Extras = std::map<std::string, float>;  // extra inputs of a vision graph by name, [1] each

// The type, as safetensors names it, and the shape of one layer's K and V of some slots.
struct LayerForm {
  std::string dtype;
  Ids shape;
  size_t bytes() const;
};

// K/V of one stage for one conversation, [layers, 2, kv_heads, capacity, head_dim], and the stage's run.
//
// `length` counts filled slots. Positions live with the tokens, not here: after a withdrawal the next token's position
// is larger than `length`. Only where layers slide the cache notes those of its slots, as windows count positions.
class StageCache {
 public:
  explicit StageCache(int64_t slots) : capacity(slots) {}
  // `states`: of its layers that keep one, where that is not the host's memory.
  StageCache(int64_t slots, const StageSpec& stage, const ModelSpec& model, std::unique_ptr<StateHistory> states = nullptr)
      : capacity(slots), states_(std::move(states)) {
    if (!states_ && !stage.stateful.empty()) states_ = std::make_unique<HostStates>(stage, model);
    if (model.sliding) window_ = model.sliding->window, placed_.resize(static_cast<size_t>(slots));
  }
  virtual ~StageCache() = default;

  // Runs tokens [n] at their positions; their K/V fill the next n slots. Gives their hidden states, or those of `outputs`
  // alone, which rise: of the others the stage's last layer needs K and V only. With `query` the queries of that layer
  // are kept for `attention`.
  Rows append(const TokenStates& tokens, const Positions& positions, bool query = false, const Ids* outputs = nullptr) {
    auto count = static_cast<int64_t>(tokens.count());
    if (reads_only()) {
      Rows out = run(tokens, positions, query, nullptr);
      return outputs ? take(out, *outputs) : out;
    }
    if (length + count > capacity)
      fail(Kind::context, length + count, " tokens in a cache of ", capacity, " slots, ", length, " of them before");
    place(positions);
    if (int64_t most = run_limit(); most > 0 && count > most && !query)
      return append_in_parts(tokens, positions, most, outputs);
    Rows out = run(tokens, positions, query, selects_outputs() ? outputs : nullptr);
    length += count;
    if (outputs && !selects_outputs()) return take(out, *outputs);
    return out;
  }
  // Whether hidden states that are not asked for cost less.
  virtual bool selects_outputs() const { return false; }
  // Whether its layers keep nothing, and read K and V of other caches.
  virtual bool reads_only() const { return false; }
  // What the tokens last appended with `query` give to each slot in the stage's last layer: mean over heads, then sum
  // and maximum over these tokens, or `last_only` their last one; [length] each.
  virtual Scores attention(bool last_only) = 0;
  // The keys of the stage's last layer, all heads side by side, [length, kv_heads * head_dim], rotated.
  virtual Rows keys() = 0;
  // Forgets every slot from `filled` on, which must be its own `nearest`.
  virtual void keep(int64_t filled) {
    if (reads_only()) return;  // nothing is held
    if (filled > length) fail(Kind::device, "a cache of ", length, " tokens cannot keep ", filled);
    if (states_) states_->keep(filled);
    length = filled;
  }
  // The largest length, at most this, that `keep` can go back to: this one, unless layers keep a state.
  virtual int64_t nearest(int64_t filled) const { return states_ ? states_->nearest(filled) : filled; }
  // Makes this length one that `keep` can go back to, as soon as a run reaches it.
  virtual void mark(int64_t filled) {
    if (states_) states_->mark(filled);
  }
  // Begins with the first `filled` slots of another cache of this stage, a length that `mark` has named there.
  void copy(StageCache& other, int64_t filled) {
    const Ids slots = count_up(0, static_cast<size_t>(filled));
    write(slots, other.read(slots), filled);
    if (states_) states_->take(*other.states_, filled);
  }
  // A copy of the K/V of some slots, rising, and of their positions where layers slide; only `write` looks into it.
  SavedSlots read(const Ids& slots);
  // Puts K/V that `read` gave into as many slots; from then on the first `filled` ones are filled.
  void write(const Ids& slots, const SavedSlots& saved, int64_t filled);
  // A copy of the K/V alone. Of each layer so much as its `layer_form` says, one layer after the other as the Python runtime
  // saves them.
  virtual SavedSlots read_kv(const Ids& slots) = 0;
  // Puts such a copy into as many slots, whose tokens stand at `positions`; the first `filled` slots are filled then.
  void write_kv(const Ids& slots, const SavedSlots& kv, const Positions& positions, int64_t filled);
  // The form of the `index`-th cached layer's K and V of so many slots; none if they stay on a device.
  virtual std::optional<LayerForm> layer_form(int64_t, size_t) const { return std::nullopt; }
  // Of the first `filled` slots the first one within the window of each of these tokens, which have the last of them.
  Ids first_slots(const Positions& positions, int64_t filled) const;

  int64_t length = 0;
  const int64_t capacity;

 protected:
  virtual Rows run(const TokenStates& tokens, const Positions& positions, bool query, const Ids* outputs) = 0;
  virtual void put_kv(const Ids& slots, const SavedSlots& kv, int64_t filled) = 0;
  // The most tokens of a run without queries, unless those of one image; 0: any number.
  virtual int64_t run_limit() const { return 0; }
  bool slides() const { return window_ > 0; }
  // Notes the positions of tokens that are about to fill the next slots.
  void place(const Positions& positions) {
    for (size_t i = 0; i < positions.size() && slides(); ++i)
      placed_[static_cast<size_t>(length) + i] = positions[i].front();
  }

  // Those of its layers that keep one in the host's memory.
  HostStates& host_states() { return static_cast<HostStates&>(*states_); }

  std::unique_ptr<StateHistory> states_;  // null: none of its layers keeps one

 private:
  Rows append_in_parts(const TokenStates& tokens, const Positions& positions, int64_t most, const Ids* outputs);

  int64_t window_ = 0;  // the positions that a token sees in layers that slide; 0: none slides
  Ids placed_;          // the positions of the tokens in slots, where layers slide
};

// The caches of earlier stages by the layers whose K and V are read.
using Sources = std::map<int64_t, StageCache*>;

// What one token gives: the id of the largest logit after it, -1 if they are not finite, and its hidden state [hidden] of
// the last layer; `logits` [vocab] where they were asked for.
struct Step {
  int64_t best;
  Floats state, logits;
};

// The graphs of one bundle, loaded on one device. Safe to share between threads.
class Backend {
 public:
  virtual ~Backend() = default;
  // Of the manifest's token inputs those that the embed graph gives.
  virtual TokenStates embed(const Ids& ids) = 0;
  // One view to its tokens.
  virtual std::shared_ptr<const ImageTokens> vision(const Pixels& view, const Extras& extras) = 0;
  // One view of a video, a frame or a pair of frames, to its tokens. Only where the manifest declares videos.
  virtual std::shared_ptr<const ImageTokens> video(const Pixels& view) { return vision(view, {}); }
  // Views of one size in one pass to the tokens of the first, then of the next ones. Only of a model with an expert.
  virtual Rows views(const std::vector<const Pixels*>& views);
  // The steps of the expert for a state at positions [1 + horizon], by what `StageCache::read` gave of each stage's slots.
  virtual ExpertStep expert(const std::vector<SavedSlots>& prompt, Floats state, Ids positions);
  // Hidden states [n, hidden] to logits [n, vocab].
  virtual Rows head(const Rows& rows) = 0;
  // Whether `step` is there.
  virtual bool steps() const { return false; }
  // Runs a token of text through the embedding, every stage and the head without the host in between: behind the filled
  // slots of each stage's cache, at its position in each.
  virtual Step step(const std::vector<StageCache*>& caches, int64_t token, const Ids& positions, bool logits);
  // The odds [2] (stay, withdraw) that the gate before layer `k` gives.
  virtual Floats gate(int64_t k, const Rows& rows) = 0;
  // The embedding [width] of a text by the ids [n] of the text tower's own tokenizer. Only where the manifest declares one.
  virtual Floats text_tower(const Ids& ids) = 0;
  // The tower's hidden states [n, width] to image tokens [n, hidden]. Only where the manifest names a graph of the
  // projector.
  virtual Rows project(const Rows& states) = 0;
  // An empty cache of `capacity` slots for stage `index` (from 0).
  virtual std::unique_ptr<StageCache> stage(size_t index, int64_t capacity) = 0;
  // For a stage whose layers keep nothing: a cache over those that they read, of this backend, which must stay.
  virtual std::unique_ptr<StageCache> reading(size_t index, const Sources& sources);

  std::string device, dialect, compute;
  std::string library;        // the engine, its version, and where it was found
  int64_t kv_slot_bytes = 0;  // of one KV slot of one layer
};

}  // namespace vtxcore
