#include "backends/tensorrt/cache.hpp"

#include <algorithm>
#include <cstring>

#include "base/halves.hpp"

namespace vtxcore {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

class TensorrtStageCache : public StageCache {
 public:
  TensorrtStageCache(const TensorrtCacheContext& context, const StageSpec& spec, const std::string& graph, int64_t asked)
      : StageCache(asked), context_(context), spec_(spec), graph_(graph), cuda_(context.cuda),
        slots_(static_cast<size_t>(context.manifest.max_context)),
        heads_(static_cast<size_t>(spec.layers() * 2 * context.manifest.model.kv_heads)),
        half_bytes_(static_cast<size_t>(context.manifest.model.kv_heads) * slots_ * context.slot_bytes()),
        kv_(cuda_, heads_ * slots_ * context.slot_bytes(), cat("the KV cache of layers ", spec.first, " to ", spec.last)),
        queries_(context), token_(cuda_, hidden()), token_out_(cuda_, hidden()), position_(cuda_, 1), total_(cuda_, 1),
        decode_(context.engines.new_context(graph, kDecode)) {
    cuda_.zero(kv_.address(), kv_.size());  // what is masked must still be a number
    cuda_.wait();
    bind(*decode_, 1, nullptr);
  }

  ~TensorrtStageCache() override {
    if (recorded_) cuda_.forget(recorded_);
  }

  Scores attention(bool last_only) override {
    Lock held(cuda_.lock);
    return queries_.attention(last_key(), context_.manifest.max_context, length, last_only);
  }

  Rows keys() override {
    Lock held(cuda_.lock);
    return read_keys(context_, last_key(), slots_, static_cast<size_t>(length));
  }

  SavedSlots read(const Ids& slots) override {
    Lock held(cuda_.lock);
    size_t bytes = heads_ * slots.size() * context_.slot_bytes();
    SavedSlots kept(bytes);
    if (bytes == 0) return kept;
    Buffer packed(cuda_, bytes, "saved K and V");
    move(slots, packed.address(), true);
    cuda_.copy_out(kept.data(), packed.address(), bytes);
    cuda_.wait();
    return kept;
  }

  void write(const Ids& slots, const SavedSlots& kv, int64_t filled) override {
    Lock held(cuda_.lock);
    if (!kv.empty()) {
      Buffer packed(cuda_, kv.size(), "saved K and V");
      cuda_.copy_in(packed.address(), kv.data(), kv.size());
      move(slots, packed.address(), false);
      cuda_.wait();
    }
    length = filled;
  }

 protected:
  Rows run(const Rows& rows, const Ids& positions, bool query) override {
    Lock held(cuda_.lock);
    *total_.data() = static_cast<int32_t>(length + static_cast<int64_t>(rows.count()));
    return rows.count() == 1 && !query ? one(rows, positions) : many(rows, positions, query);
  }

 private:
  size_t hidden() const { return static_cast<size_t>(context_.manifest.model.hidden); }
  uint8_t* last_key() const { return kv_.address() + static_cast<size_t>(spec_.layers() - 1) * 2 * half_bytes_; }

  // Copies slots between the cache and a packed buffer, run by run.
  void move(const Ids& slots, uint8_t* packed, bool out) {
    size_t unit = context_.slot_bytes(), pitch = slots_ * unit, packed_pitch = slots.size() * unit;
    for (const SlotRun& run : slot_runs(slots)) {
      uint8_t *in_cache = kv_.address() + run.first * unit, *in_packed = packed + run.start * unit;
      if (out)
        cuda_.copy_rows(in_packed, packed_pitch, in_cache, pitch, run.count * unit, heads_);
      else
        cuda_.copy_rows(in_cache, pitch, in_packed, packed_pitch, run.count * unit, heads_);
    }
  }

  void bind(Context& context, size_t count, uint8_t* query) {
    Shapes shapes;
    Addresses addresses;
    bind_stage(context_, spec_, count, query, shapes, addresses);
    addresses[names::kTotalSlots] = context_.engines.address(names::kTotalSlots);
    uint8_t* key = kv_.address();
    for (int64_t layer = spec_.first; layer <= spec_.last; ++layer, key += 2 * half_bytes_) {
      std::string number = std::to_string(layer);
      for (const char* name : {names::kPastKey, names::kPresentKey}) addresses[name + number] = key;
      for (const char* name : {names::kPastValue, names::kPresentValue}) addresses[name + number] = key + half_bytes_;
    }
    context.bind(shapes, addresses);
  }

  // One token: the first run as it comes, the second recorded, from then on launched.
  Rows one(const Rows& rows, const Ids& positions) {
    std::copy(rows.data.begin(), rows.data.end(), token_.data());
    *position_.data() = positions[0];
    bind(*decode_, 1, nullptr);
    if (recorded_ == nullptr && ran_ && decode_->capturable()) recorded_ = cuda_.record([this] { queue_one(); });
    if (recorded_)
      cuda_.launch(recorded_);
    else
      queue_one();
    cuda_.wait();
    ran_ = true;
    Rows out(1, hidden());
    std::copy(token_out_.data(), token_out_.data() + hidden(), out.data.begin());
    return out;
  }

  void queue_one() {
    const LoadedEngines& engines = context_.engines;
    cuda_.copy_in(engines.address(names::kHidden), token_.data(), token_.bytes());
    cuda_.copy_in(engines.address(names::kPositions), position_.data(), position_.bytes());
    cuda_.copy_in(engines.address(names::kTotalSlots), total_.data(), total_.bytes());
    decode_->enqueue();
    cuda_.copy_out(token_out_.data(), engines.address(names::kHiddenOut), token_out_.bytes());
  }

  Rows many(const Rows& rows, const Ids& positions, bool query) {
    LoadedEngines& engines = context_.engines;
    engines.check_tokens(graph_, rows.count());
    Context& prefill = engines.context(graph_, kPrefill);
    bind(prefill, rows.count(), query ? queries_.room(rows.count()) : nullptr);
    cuda_.copy_in(engines.address(names::kHidden), rows.data.data(), rows.data.size() * sizeof(float));
    cuda_.copy_in(engines.address(names::kPositions), positions.data(), positions.size() * sizeof(int64_t));
    cuda_.copy_in(engines.address(names::kTotalSlots), total_.data(), total_.bytes());
    prefill.enqueue();
    Rows out(rows.count(), hidden());
    cuda_.copy_out(out.data.data(), engines.address(names::kHiddenOut), out.data.size() * sizeof(float));
    cuda_.wait();
    return out;
  }

  const TensorrtCacheContext& context_;
  const StageSpec spec_;
  const std::string graph_;
  Cuda& cuda_;
  const size_t slots_, heads_, half_bytes_;  // of the buffer: slots of a head, heads in all, bytes of a layer's K or V
  Buffer kv_;
  Queries queries_;
  Pinned<float> token_, token_out_;  // the one token of a step
  Pinned<int64_t> position_;
  Pinned<int32_t> total_;
  std::unique_ptr<Context> decode_;
  void* recorded_ = nullptr;
  bool ran_ = false;
};

}  // namespace

std::unique_ptr<StageCache> make_tensorrt_cache(const TensorrtCacheContext& context, const StageSpec& spec,
                                                const std::string& graph, int64_t capacity) {
  return std::make_unique<TensorrtStageCache>(context, spec, graph, capacity);
}

uint8_t* Queries::room(size_t count) {
  size_t bytes = 4 * count * static_cast<size_t>(context_.manifest.model.heads * context_.manifest.model.head_dim);
  if (!buffer_ || buffer_->size() < bytes) {
    buffer_.reset();
    buffer_.emplace(context_.cuda, bytes, "the tokens' queries");
  }
  count_ = count;
  return buffer_->address();
}

Scores Queries::attention(uint8_t* key, int64_t slots, int64_t length, bool last_only) {
  auto longest = static_cast<size_t>(context_.engines.longest(context_.score));
  Scores out{Floats(static_cast<size_t>(slots)), Floats(static_cast<size_t>(slots))};
  for (size_t start = last_only ? count_ - 1 : 0; start < count_; start += longest) {
    size_t end = std::min(start + longest, count_);
    Scores part = run(start, end, key, slots, length - static_cast<int64_t>(count_ - end));
    for (size_t slot = 0; slot < out.first.size(); ++slot) {
      out.first[slot] += part.first[slot];
      out.second[slot] = std::max(out.second[slot], part.second[slot]);
    }
  }
  out.first.resize(static_cast<size_t>(length));
  out.second.resize(static_cast<size_t>(length));
  return out;
}

// The scores of tokens `start` to `end`, the last of which fills slot `filled` - 1: none sees a later one.
Scores Queries::run(size_t start, size_t end, uint8_t* key, int64_t slots, int64_t filled) {
  const ModelSpec& model = context_.manifest.model;
  LoadedEngines& engines = context_.engines;
  Cuda& cuda = context_.cuda;
  int64_t width = model.heads * model.head_dim;
  auto total = static_cast<int32_t>(filled);
  Addresses addresses{{names::kQuery, buffer_->address() + 4 * static_cast<size_t>(width) * start}, {names::kKey, key}};
  for (const char* name : {names::kTotalSlots, names::kAttentionSum, names::kAttentionMax})
    addresses[name] = engines.address(name);
  Shapes shapes{{names::kQuery, {static_cast<int64_t>(end - start), width}},
                {names::kKey, {1, model.kv_heads, slots, model.head_dim}}};
  Context& context = engines.context(context_.score, 0);
  cuda.copy_in(addresses[names::kTotalSlots], &total, sizeof total);
  context.bind(shapes, addresses);
  context.enqueue();
  Scores out{Floats(static_cast<size_t>(slots)), Floats(static_cast<size_t>(slots))};
  cuda.copy_out(out.first.data(), addresses[names::kAttentionSum], out.first.size() * sizeof(float));
  cuda.copy_out(out.second.data(), addresses[names::kAttentionMax], out.second.size() * sizeof(float));
  cuda.wait();
  return out;
}

std::vector<SlotRun> slot_runs(const Ids& slots) {
  std::vector<SlotRun> out;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (i > 0 && slots[i] == slots[i - 1] + 1)
      ++out.back().count;
    else
      out.push_back({i, static_cast<size_t>(slots[i]), 1});
  }
  return out;
}

void bind_stage(const TensorrtCacheContext& context, const StageSpec& spec, size_t count, uint8_t* query, Shapes& shapes,
                Addresses& addresses) {
  auto tokens = static_cast<int64_t>(count);
  shapes[names::kHidden] = {tokens, context.manifest.model.hidden};
  shapes[names::kPositions] = {1, tokens};
  for (const char* name : {names::kHidden, names::kHiddenOut, names::kPositions})
    addresses[name] = context.engines.address(name);
  addresses.insert(context.rope.begin(), context.rope.end());
  if (spec.query) addresses[names::kQuery] = query ? query : context.engines.address(names::kQuery);
}

Rows read_keys(const TensorrtCacheContext& context, const uint8_t* key, size_t slots, size_t length) {
  auto heads = static_cast<size_t>(context.manifest.model.kv_heads);
  auto dim = static_cast<size_t>(context.manifest.model.head_dim);
  std::string raw(heads * slots * context.slot_bytes(), '\0');
  if (!raw.empty()) context.cuda.copy_out(raw.data(), key, raw.size());
  context.cuda.wait();
  bool half = context.manifest.kv_bytes(context.dialect) == 2;
  Rows out(length, heads * dim);
  for (size_t head = 0; head < heads; ++head)
    for (size_t slot = 0; slot < length; ++slot)
      for (size_t d = 0; d < dim; ++d) {
        size_t at = (head * slots + slot) * dim + d;
        float value = 0;
        uint16_t bits = 0;
        if (half)
          std::memcpy(&bits, raw.data() + 2 * at, 2);
        else
          std::memcpy(&value, raw.data() + 4 * at, 4);
        out.row(slot)[head * dim + d] = half ? half_to_float(bits) : value;
      }
  return out;
}

}  // namespace vtxcore
