#include <utility>

#include "backends/tensorrt/cache.hpp"

namespace vtxcore {
namespace {

using Lock = Cuda::Use;

// Two buffers of parts [kv_heads, slots, head_dim], a layer's K or V each; `now` is laid out for `held` slots.
struct GrowingMemory : StageMemory {
  GrowingMemory(const TensorrtCacheContext& context, const StageSpec& spec, const std::string&, int64_t slots)
      : StageMemory(slots), cuda(context.cuda), row(context.row_bytes()), parts(static_cast<size_t>(2 * spec.layers())),
        part_bytes(context.bytes_of(slots)), first(buffer(spec)), second(buffer(spec)), now(first.address()),
        next(second.address()), queries(context) {}
  void clear() override { held = 0; }
  void take_over(const StageMemory& other, int64_t) override {
    const auto& shorter = static_cast<const GrowingMemory&>(other);
    held = shorter.held;
    if (held > 0) cuda.copy_rows(now, part_bytes, shorter.now, shorter.part_bytes, held * row, parts);
    cuda.wait();
  }
  void swap(size_t slots) {
    std::swap(now, next);
    held = slots;
  }
  Buffer buffer(const StageSpec& spec) const {
    return {cuda, parts * part_bytes, cat("the KV cache of layers ", spec.first, " to ", spec.last)};
  }

  Cuda& cuda;
  const size_t row, parts, part_bytes;
  Buffer first, second;
  uint8_t *now, *next;
  size_t held = 0;
  Queries queries;
};

// Slots that were dropped leave when the buffer is next used.
class GrowingStageCache : public StageCache {
 public:
  GrowingStageCache(TensorrtCacheContext& context, const StageSpec& spec, const std::string& graph, int64_t asked)
      : StageCache(asked), context_(context), spec_(spec), graph_(graph), cuda_(context.cuda),
        kv_heads_(static_cast<size_t>(context.manifest.model.kv_heads)), unit_(context.slot_bytes()),
        parts_(static_cast<size_t>(2 * spec.layers())) {}

  ~GrowingStageCache() override { give_back(context_, spec_.first, std::move(memory_)); }

  Scores attention(bool last_only) override {
    Lock held(cuda_);
    lay_out(length);
    const ModelSpec& model = context_.manifest.model;
    return memory_->queries.attention(last_key(), {1, model.kv_heads, length, model.head_dim}, length, last_only);
  }

  Rows keys() override {
    Lock held(cuda_);
    lay_out(length);
    return read_keys(context_, last_key(), static_cast<size_t>(length), true);
  }

  SavedSlots read(const Ids& slots) override {
    Lock held(cuda_);
    lay_out(length);
    SavedSlots kept(parts_ * packed(slots.size()));
    if (kept.empty()) return kept;
    Buffer buffer(cuda_, kept.size(), "saved K and V");
    for (size_t part = 0; part < parts_; ++part)
      for (const SlotRun& run : slot_runs(slots))
        copy({buffer.address() + part * packed(slots.size()), slots.size()}, run.start, now(part), run.first, run.count);
    cuda_.copy_out(kept.data(), buffer.address(), kept.size());
    cuda_.wait();
    return kept;
  }

  void write(const Ids& slots, const SavedSlots& kv, int64_t filled) override {
    Lock held(cuda_);
    room(filled);
    lay_out(filled);
    if (!kv.empty()) {
      Buffer buffer(cuda_, kv.size(), "saved K and V");
      cuda_.copy_in(buffer.address(), kv.data(), kv.size());
      for (size_t part = 0; part < parts_; ++part)
        for (const SlotRun& run : slot_runs(slots))
          copy(now(part), run.first, {buffer.address() + part * packed(slots.size()), slots.size()}, run.start, run.count);
      cuda_.wait();
    }
    length = filled;
  }

 protected:
  Rows run(const TokenStates& tokens, const Ids& positions, bool query, const Ids*) override {
    Lock held(cuda_);
    room(length + static_cast<int64_t>(tokens.count()));
    lay_out(length);
    auto longest = static_cast<size_t>(context_.engines.longest(graph_));
    return in_parts(
        tokens.count(), longest, query ? &memory_->queries : nullptr,
        [&](size_t start, size_t count, uint8_t* queries) { return grow(tokens, positions, start, count, queries); });
  }

 private:
  void room(int64_t slots) { make_room(context_, spec_, graph_, slots, capacity, length, memory_); }
  uint8_t* last_key() const { return memory_->now + (parts_ - 2) * memory_->part_bytes; }

  // A part of a buffer: one layer's K or V, laid out for so many slots of each head.
  struct Part {
    uint8_t* address;
    size_t slots;
  };

  size_t packed(size_t slots) const { return kv_heads_ * slots * unit_; }
  Part now(size_t part) const { return {memory_->now + part * memory_->part_bytes, memory_->held}; }

  void copy(Part to, size_t to_slot, Part from, size_t slot, size_t count) {
    cuda_.copy_rows(to.address + to_slot * unit_, to.slots * unit_, from.address + slot * unit_, from.slots * unit_,
                    count * unit_, kv_heads_);
  }

  // Lays the buffer out for `filled` slots; the first that it held stay.
  void lay_out(int64_t filled) {
    auto wanted = static_cast<size_t>(filled);
    if (!memory_ || memory_->held == wanted) return;
    size_t stay = std::min(memory_->held, wanted);
    if (stay > 0) {
      for (size_t part = 0; part < parts_; ++part)
        copy({memory_->next + part * memory_->part_bytes, wanted}, 0, now(part), 0, stay);
      cuda_.wait();
    }
    memory_->swap(wanted);
  }

  // One run of the stage, from one buffer to the other.
  Rows grow(const TokenStates& tokens, const Ids& positions, size_t start, size_t count, uint8_t* query) {
    LoadedEngines& engines = context_.engines;
    const ModelSpec& model = context_.manifest.model;
    Context& context = engines.context(graph_, count == 1 ? kDecode : kPrefill);
    Shapes shapes;
    Addresses addresses;
    bind_stage(context_, spec_, count, query, shapes, addresses);
    for (const auto& [name, address] : context_.rope) shapes[name] = {context_.manifest.max_context, model.head_dim / 2};
    size_t part = 0;
    for (int64_t layer = spec_.first; layer <= spec_.last; ++layer) {
      const std::pair<const char*, const char*> halves[] = {{names::kPastKey, names::kPresentKey},
                                                            {names::kPastValue, names::kPresentValue}};
      for (const auto& [past, present] : halves) {
        std::string number = std::to_string(layer);
        shapes[past + number] = {1, model.kv_heads, static_cast<int64_t>(memory_->held), model.head_dim};
        addresses[past + number] = memory_->now + part * memory_->part_bytes;
        addresses[present + number] = memory_->next + part * memory_->part_bytes;
        ++part;
      }
    }
    context.bind(shapes, addresses);
    Rows out(count, static_cast<size_t>(model.hidden));
    copy_tokens(context_, spec_, tokens, positions, start, count);
    context.enqueue();
    cuda_.copy_out(out.data.data(), addresses[names::kHiddenOut], out.data.size() * sizeof(float));
    cuda_.wait();
    memory_->swap(memory_->held + count);
    return out;
  }

  TensorrtCacheContext& context_;
  const StageSpec spec_;
  const std::string graph_;
  Cuda& cuda_;
  const size_t kv_heads_, unit_, parts_;  // `unit_`: bytes of a slot of a head
  std::unique_ptr<GrowingMemory> memory_;
};

}  // namespace

std::unique_ptr<StageCache> make_growing_cache(TensorrtCacheContext& context, const StageSpec& spec,
                                               const std::string& graph, int64_t capacity) {
  return std::make_unique<GrowingStageCache>(context, spec, graph, capacity);
}

}  // namespace vtxcore
