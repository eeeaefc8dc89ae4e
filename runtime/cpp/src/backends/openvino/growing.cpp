#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "backends/contract.hpp"
#include "backends/openvino/cache.hpp"
#include "base/halves.hpp"

namespace vtxcore {
namespace {

using openvino::Type;

// A stage's graph as it is written, over tensors that stay where they are until its run is over.
class WrittenGraph {
 public:
  WrittenGraph(openvino::Request& request, const OpenvinoStage& stage) : request_(request), stage_(stage) {}

  void set(const std::string& name, Type type, const Ids& shape, const void* data) {
    request_.set(name, type, shape, const_cast<void*>(data));
  }

  // What every graph has of each token: hidden states, the `inputs` of these names, and rows of the rope tables.
  void set_tokens(const TokenStates& tokens, const std::vector<std::string>& inputs, const RopeRows& rope) {
    const auto count = static_cast<int64_t>(tokens.count());
    auto set_rows = [&](const std::string& name, const Rows& rows) {
      set(name, Type::f32, {count, static_cast<int64_t>(rows.width)}, rows.data.data());
    };
    set_rows(names::kHidden, tokens.hidden);
    for (const std::string& name : inputs) set_rows(names::kTokenInput + name, tokens.inputs.at(name));
    set(names::kPositions, Type::i64, {1, count}, rope.rows.data());
  }

  // Writes the hidden states that the graph gives, one for each of `out`.
  void run(Rows& out) {
    request_.run();
    openvino::TensorView hidden = request_.get(names::kHiddenOut);
    check_width(stage_.name, hidden.shape, static_cast<int64_t>(out.width));
    check_rows(stage_.name, static_cast<size_t>(hidden.shape.front()), out.count());
    std::memcpy(out.data.data(), hidden.data, sizeof(float) * out.data.size());
  }

 private:
  openvino::Request& request_;
  const OpenvinoStage& stage_;
};

// The memory is [layers, 2, kv_heads, capacity, head_dim], of the type that K and V have in the graph.
class OpenvinoGrowingCache : public StageCache {
 public:
  OpenvinoGrowingCache(const OpenvinoCacheContext& context, const OpenvinoStage& stage, const StageSpec& spec, int64_t slots)
      : StageCache(slots), context_(context), stage_(stage), spec_(spec), m_(context.manifest),
        heads_(static_cast<size_t>(m_.model.kv_heads)), dim_(static_cast<size_t>(m_.model.head_dim)),
        slot_bytes_(dim_ * (context.half_keys ? 2 : 4)), planes_(2 * spec.cached.size()),
        memory_(std::vector<size_t>(planes_ * heads_, slot_bytes_), static_cast<size_t>(slots)) {
    request_ = running(stage.name, [&] { return stage.compiled->request(); });
  }

  Scores attention(bool) override {
    fail(Kind::bundle, stage_.name, " gives its attention, and its tokens see each other both ways; export again");
  }

  Rows keys() override {
    Rows out(static_cast<size_t>(length), heads_ * dim_);
    for (size_t head = 0; head < heads_; ++head)
      for (size_t slot = 0; slot < out.count(); ++slot)
        widen(memory_.plane((planes_ - 2) * heads_ + head) + slot * slot_bytes_, context_.half_keys ? "float16" : "float32",
              dim_, out.row(slot) + head * dim_);
    return out;
  }

  SavedSlots read_kv(const Ids& slots) override { return memory_.read(slots); }

 protected:
  void put_kv(const Ids& slots, const SavedSlots& kv, int64_t) override { memory_.write(slots, kv); }

  Rows run(const TokenStates& tokens, const Positions& positions, bool, const Ids*) override {
    auto count = static_cast<int64_t>(tokens.count());
    size_t before = static_cast<size_t>(length), grown = before + tokens.count();
    Ids seen = seen_slots(tokens, length);
    RopeRows rope = rope_rows(context_.rope, m_, positions);
    SavedSlots past = memory_.read(count_up(0, before));
    Ids past_shape{1, m_.model.kv_heads, length, m_.model.head_dim};
    Type kind = context_.half_keys ? Type::f16 : Type::f32;
    Rows out(tokens.count(), tokens.hidden.width);
    running(stage_.name, [&] {
      WrittenGraph graph(*request_, stage_);
      graph.set_tokens(tokens, spec_.inputs, rope);
      graph.set(names::kSeenSlots, Type::i64, {1, count}, seen.data());
      for (const auto& [name, table] : rope.own.empty() ? context_.rope : rope.own)
        graph.set(name, Type::f32, {rope.own.empty() ? m_.max_context : count, m_.model.head_dim / 2}, table.data());
      each_plane([&](size_t plane, const char* given, const char*, const std::string& layer) {
        graph.set(given + layer, kind, past_shape, past.data() + plane * heads_ * before * slot_bytes_);
      });
      graph.run(out);
      each_plane([&](size_t plane, const char*, const char* made, const std::string& layer) {
        openvino::TensorView kv = request_->get(made + layer);
        check_rows(stage_.name, static_cast<size_t>(kv.shape.at(2)), grown);
        for (size_t head = 0; head < heads_; ++head)
          std::memcpy(memory_.plane(plane * heads_ + head) + before * slot_bytes_,
                      static_cast<const uint8_t*>(kv.data) + (head * grown + before) * slot_bytes_,
                      tokens.count() * slot_bytes_);
      });
    });
    return out;
  }

 private:
  template <typename Work>
  void each_plane(Work work) const {
    for (int64_t layer = spec_.first; layer <= spec_.last; ++layer) {
      auto plane = static_cast<size_t>(2 * (layer - spec_.first));
      work(plane, names::kPastKey, names::kPresentKey, std::to_string(layer));
      work(plane + 1, names::kPastValue, names::kPresentValue, std::to_string(layer));
    }
  }

  const OpenvinoCacheContext& context_;
  const OpenvinoStage& stage_;
  const StageSpec spec_;
  const Manifest& m_;
  const size_t heads_, dim_, slot_bytes_, planes_;
  SlotMemory memory_;
  std::unique_ptr<openvino::Request> request_;
};

class OpenvinoReadingCache : public StageCache {
 public:
  OpenvinoReadingCache(const OpenvinoCacheContext& context, const OpenvinoStage& stage, const StageSpec& spec,
                       const Sources& sources)
      : StageCache(0), context_(context), stage_(stage), spec_(spec), m_(context.manifest) {
    for (const auto& [layer, cache] : sources) sources_[layer] = static_cast<OpenvinoStageCache*>(cache);
    request_ = running(stage.name, [&] { return stage.compiled->request(); });
  }

  bool reads_only() const override { return true; }
  Scores attention(bool) override { nothing_is_held(); }
  Rows keys() override { nothing_is_held(); }
  SavedSlots read_kv(const Ids&) override { nothing_is_held(); }

 protected:
  void put_kv(const Ids&, const SavedSlots&, int64_t) override { nothing_is_held(); }

  Rows run(const TokenStates& tokens, const Positions& positions, bool, const Ids*) override {
    auto count = static_cast<int64_t>(tokens.count());
    const RopeRows rope = rope_rows(context_.rope, m_, positions);
    std::vector<Layer> held;  // until the run is over
    for (const auto& [layer, cache] : sources_)
      for (bool values : {false, true}) held.push_back(layer_of(layer, *cache, values));
    const OpenvinoStageCache* sliding = sources_.rbegin()->second;  // none may slide: then the graph does not use it
    for (const auto& [layer, cache] : sources_)
      if (m_.model.slides(layer)) sliding = cache;
    const Ids firsts = sliding->first_slots(positions, sliding->length);
    Rows out(tokens.count(), tokens.hidden.width);
    running(stage_.name, [&] {
      WrittenGraph graph(*request_, stage_);
      graph.set_tokens(tokens, spec_.inputs, rope);
      for (const auto& [name, table] : context_.rope) graph.set(name, Type::f32, table_shape(m_, name), table.data());
      if (m_.model.sliding) graph.set(names::kFirstSlot, Type::i64, {1, count}, firsts.data());
      for (const Layer& layer : held)
        graph.set(layer.name, context_.half_keys ? Type::f16 : Type::f32, layer.shape,
                  context_.half_keys ? static_cast<const void*>(layer.halves.data()) : layer.numbers.data());
      graph.run(out);
    });
    return out;
  }

 private:
  // Keys or values as the graph reads them, [1, kv_heads, length, head_dim].
  struct Layer {
    std::string name;
    Ids shape;
    Floats numbers;
    std::vector<uint16_t> halves;
  };

  Layer layer_of(int64_t layer, OpenvinoStageCache& cache, bool values) const {
    const auto heads = static_cast<size_t>(m_.model.kv_heads), dim = static_cast<size_t>(m_.model.heads_of(layer));
    const Rows found = cache.numbers(layer, values);  // [length, kv_heads * head_dim]
    Layer out{(values ? names::kPastValue : names::kPastKey) + std::to_string(layer),
              {1, m_.model.kv_heads, cache.length, m_.model.heads_of(layer)},
              Floats(found.data.size()),
              {}};
    for (size_t head = 0; head < heads; ++head)
      for (size_t slot = 0; slot < found.count(); ++slot)
        std::copy_n(found.row(slot) + head * dim, dim,
                    out.numbers.begin() + static_cast<std::ptrdiff_t>((head * found.count() + slot) * dim));
    if (context_.half_keys)
      for (float number : out.numbers) out.halves.push_back(float_to_half(number));
    return out;
  }

  [[noreturn]] static void nothing_is_held() { throw std::logic_error("nothing is held"); }

  const OpenvinoCacheContext& context_;
  const OpenvinoStage& stage_;
  const StageSpec spec_;
  const Manifest& m_;
  std::map<int64_t, OpenvinoStageCache*> sources_;
  std::unique_ptr<openvino::Request> request_;
};

}  // namespace

std::unique_ptr<StageCache> make_openvino_reading_cache(const OpenvinoCacheContext& context, const OpenvinoStage& stage,
                                                        const StageSpec& spec, const Sources& sources) {
  return std::make_unique<OpenvinoReadingCache>(context, stage, spec, sources);
}

std::unique_ptr<StageCache> make_openvino_growing_cache(const OpenvinoCacheContext& context, const OpenvinoStage& stage,
                                                        const StageSpec& spec, int64_t slots) {
  return std::make_unique<OpenvinoGrowingCache>(context, stage, spec, slots);
}

}  // namespace vtxcore
