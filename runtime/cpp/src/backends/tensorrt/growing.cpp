#include <utility>

#include "backends/tensorrt/cache.hpp"

namespace vtxcore {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

// Two buffers [layers * 2, kv_heads, slots, head_dim], each laid out for exactly as many slots as it holds; slots that
// were dropped leave when the buffer is next used.
class GrowingStageCache : public StageCache {
 public:
  GrowingStageCache(const TensorrtCacheContext& context, const StageSpec& spec, const std::string& graph, int64_t asked)
      : StageCache(asked), context_(context), spec_(spec), graph_(graph), cuda_(context.cuda),
        kv_heads_(static_cast<size_t>(context.manifest.model.kv_heads)), unit_(context.slot_bytes()),
        parts_(static_cast<size_t>(2 * spec.layers())), part_bytes_(kv_heads_ * static_cast<size_t>(asked) * unit_),
        first_(cuda_, parts_ * part_bytes_, purpose()), second_(cuda_, parts_ * part_bytes_, purpose()),
        now_(first_.address()), next_(second_.address()), queries_(context) {}

  Scores attention(bool last_only) override {
    Lock held(cuda_.lock);
    lay_out(length);
    return queries_.attention(now_ + (parts_ - 2) * part_bytes_, length, length, last_only);
  }

  Rows keys() override {
    Lock held(cuda_.lock);
    lay_out(length);
    return read_keys(context_, now_ + (parts_ - 2) * part_bytes_, held_, held_);
  }

  SavedSlots read(const Ids& slots) override {
    Lock held(cuda_.lock);
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
    Lock held(cuda_.lock);
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
  Rows run(const Rows& rows, const Ids& positions, bool query) override {
    Lock held(cuda_.lock);
    lay_out(length);
    Rows out = grow(rows, positions, query ? queries_.room(rows.count()) : nullptr);
    std::swap(now_, next_);
    held_ += rows.count();
    return out;
  }

 private:
  // A part of a buffer: one layer's K or V, laid out for so many slots of each head.
  struct Part {
    uint8_t* address;
    size_t slots;
  };

  std::string purpose() const { return cat("the KV cache of layers ", spec_.first, " to ", spec_.last); }
  size_t packed(size_t slots) const { return kv_heads_ * slots * unit_; }
  Part now(size_t part) const { return {now_ + part * part_bytes_, held_}; }

  void copy(Part to, size_t to_slot, Part from, size_t slot, size_t count) {
    cuda_.copy_rows(to.address + to_slot * unit_, to.slots * unit_, from.address + slot * unit_, from.slots * unit_,
                    count * unit_, kv_heads_);
  }

  // Lays the buffer out for `filled` slots; the first that it held stay.
  void lay_out(int64_t filled) {
    auto wanted = static_cast<size_t>(filled);
    if (held_ == wanted) return;
    size_t stay = std::min(held_, wanted);
    if (stay > 0) {
      for (size_t part = 0; part < parts_; ++part) copy({next_ + part * part_bytes_, wanted}, 0, now(part), 0, stay);
      cuda_.wait();
    }
    std::swap(now_, next_);
    held_ = wanted;
  }

  // One run of the stage, from one buffer to the other.
  Rows grow(const Rows& rows, const Ids& positions, uint8_t* query) {
    LoadedEngines& engines = context_.engines;
    const ModelSpec& model = context_.manifest.model;
    engines.check_tokens(graph_, rows.count());
    Context& context = engines.context(graph_, rows.count() == 1 ? kDecode : kPrefill);
    Shapes shapes;
    Addresses addresses;
    bind_stage(context_, spec_, rows.count(), query, shapes, addresses);
    for (const auto& [name, address] : context_.rope) shapes[name] = {context_.manifest.max_context, model.head_dim / 2};
    size_t part = 0;
    for (int64_t layer = spec_.first; layer <= spec_.last; ++layer) {
      const std::pair<const char*, const char*> halves[] = {{names::kPastKey, names::kPresentKey},
                                                            {names::kPastValue, names::kPresentValue}};
      for (const auto& [past, present] : halves) {
        std::string number = std::to_string(layer);
        shapes[past + number] = {1, model.kv_heads, static_cast<int64_t>(held_), model.head_dim};
        addresses[past + number] = now_ + part * part_bytes_;
        addresses[present + number] = next_ + part * part_bytes_;
        ++part;
      }
    }
    context.bind(shapes, addresses);
    cuda_.copy_in(addresses[names::kHidden], rows.data.data(), rows.data.size() * sizeof(float));
    cuda_.copy_in(addresses[names::kPositions], positions.data(), positions.size() * sizeof(int64_t));
    context.enqueue();
    Rows out(rows.count(), rows.width);
    cuda_.copy_out(out.data.data(), addresses[names::kHiddenOut], out.data.size() * sizeof(float));
    cuda_.wait();
    return out;
  }

  const TensorrtCacheContext& context_;
  const StageSpec spec_;
  const std::string graph_;
  Cuda& cuda_;
  const size_t kv_heads_, unit_, parts_, part_bytes_;  // `unit_`: bytes of a slot of a head
  Buffer first_, second_;
  uint8_t *now_, *next_;
  size_t held_ = 0;  // slots that `now_` is laid out for
  Queries queries_;
};

}  // namespace

std::unique_ptr<StageCache> make_growing_cache(const TensorrtCacheContext& context, const StageSpec& spec,
                                               const std::string& graph, int64_t capacity) {
  return std::make_unique<GrowingStageCache>(context, spec, graph, capacity);
}

}  // namespace vtxcore
