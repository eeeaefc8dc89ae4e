#include <utility>

#include "backends/tensorrt/cache.hpp"

namespace vtxcore {
namespace {

using Lock = Cuda::Use;

// Two buffers of parts [kv_heads, slots, head_dim], a layer's K or V each; `now` is laid out for `held` slots.
struct GrowingMemory : StageMemory {
  GrowingMemory(const TensorrtCacheContext& context, const StageSpec& spec, int64_t slots)
      : StageMemory(slots), part_bytes(context.bytes_of(slots)), first(buffer(context, spec)), second(buffer(context, spec)),
        now(first.address()), next(second.address()), queries(context) {}
  void clear() override { held = 0; }
  void swap(size_t slots) {
    std::swap(now, next);
    held = slots;
  }
  Buffer buffer(const TensorrtCacheContext& context, const StageSpec& spec) const {
    return {context.cuda, static_cast<size_t>(2 * spec.layers()) * part_bytes,
            cat("the KV cache of layers ", spec.first, " to ", spec.last)};
  }

  const size_t part_bytes;
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
        parts_(static_cast<size_t>(2 * spec.layers())),
        memory_(borrow<GrowingMemory>(context, spec.first, asked,
                                      [&] { return std::make_unique<GrowingMemory>(context, spec, asked); })),
        part_bytes_(memory_->part_bytes) {}

  ~GrowingStageCache() override { give_back(context_, spec_.first, std::move(memory_)); }

  Scores attention(bool last_only) override {
    Lock held(cuda_);
    lay_out(length);
    return memory_->queries.attention(memory_->now + (parts_ - 2) * part_bytes_, length, length, last_only);
  }

  Rows keys() override {
    Lock held(cuda_);
    lay_out(length);
    return read_keys(context_, memory_->now + (parts_ - 2) * part_bytes_, memory_->held, memory_->held);
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
    lay_out(length);
    auto longest = static_cast<size_t>(context_.engines.longest(graph_));
    return in_parts(
        tokens.count(), longest, query ? &memory_->queries : nullptr,
        [&](size_t start, size_t count, uint8_t* queries) { return grow(tokens, positions, start, count, queries); });
  }

 private:
  // A part of a buffer: one layer's K or V, laid out for so many slots of each head.
  struct Part {
    uint8_t* address;
    size_t slots;
  };

  size_t packed(size_t slots) const { return kv_heads_ * slots * unit_; }
  Part now(size_t part) const { return {memory_->now + part * part_bytes_, memory_->held}; }

  void copy(Part to, size_t to_slot, Part from, size_t slot, size_t count) {
    cuda_.copy_rows(to.address + to_slot * unit_, to.slots * unit_, from.address + slot * unit_, from.slots * unit_,
                    count * unit_, kv_heads_);
  }

  // Lays the buffer out for `filled` slots; the first that it held stay.
  void lay_out(int64_t filled) {
    auto wanted = static_cast<size_t>(filled);
    if (memory_->held == wanted) return;
    size_t stay = std::min(memory_->held, wanted);
    if (stay > 0) {
      for (size_t part = 0; part < parts_; ++part) copy({memory_->next + part * part_bytes_, wanted}, 0, now(part), 0, stay);
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
        addresses[past + number] = memory_->now + part * part_bytes_;
        addresses[present + number] = memory_->next + part * part_bytes_;
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
  const size_t part_bytes_;
};

}  // namespace

std::unique_ptr<StageCache> make_growing_cache(TensorrtCacheContext& context, const StageSpec& spec,
                                               const std::string& graph, int64_t capacity) {
  return std::make_unique<GrowingStageCache>(context, spec, graph, capacity);
}

}  // namespace vtxcore
