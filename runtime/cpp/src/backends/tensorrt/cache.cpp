#include "backends/tensorrt/cache.hpp"

#include <algorithm>
#include <cstring>

#include "backends/tensorrt/device_rows.hpp"
#include "base/halves.hpp"

namespace vtxcore {
namespace {

using Lock = Cuda::Use;

}  // namespace

// A stage's K and V with what is bound to them: its context for one token, and that token's position. `id` is never that
// of another one; `recordings` are of steps that end with this memory, by the ids of all stages' memories; null once one
// has run.
struct DeviceSlots : StageMemory {
  DeviceSlots(TensorrtCacheContext& context, const StageSpec& stage, const std::string& graph, int64_t slots)
      : StageMemory(slots), shared(context), spec(stage), cuda(context.cuda), row(context.row_bytes()),
        parts(static_cast<size_t>(2 * stage.layers())), part(context.bytes_of(slots)), id(context.made++),
        kv(cuda, parts * part, cat("the KV cache of layers ", stage.first, " to ", stage.last)), queries(context),
        position(cuda, 1), total(cuda, 1), decode(context.engines.new_context(graph, kDecode, true)) {
    bind(*decode, 1, capacity, new_slots(), aligned(row), false, nullptr);
    DeviceSlots::clear();
  }
  ~DeviceSlots() override { forget(); }
  void forget() {
    for (const auto& [key, recorded] : recordings)
      if (recorded) cuda.forget(recorded);
    recordings.clear();
  }
  void clear() override {
    cuda.zero(kv.address(), kv.size());  // what is masked must still be a number
    cuda.wait();
  }
  void take_over(const StageMemory& other, int64_t length) override {
    const auto& shorter = static_cast<const DeviceSlots&>(other);
    cuda.copy_rows(kv.address(), part, shorter.kv.address(), shorter.part, static_cast<size_t>(length) * row, parts);
    cuda.wait();
  }
  uint8_t* slot(int64_t number) const { return kv.address() + static_cast<size_t>(number) * row; }
  uint8_t* last_key() const { return kv.address() + (parts - 2) * part; }
  // The buffer for new K and V that the engine cannot write where they belong.
  uint8_t* new_slots() const { return shared.engines.address(new_slots_of(spec)); }

  // Copies new K and V from that buffer to the slots from `start` on.
  void put(int64_t start, size_t tokens) {
    cuda.copy_rows(slot(start), part, new_slots(), aligned(tokens * row), tokens * row, parts);
  }

  // Binds a context for `tokens` tokens after `filled` slots; their K and V go to `fresh`, a part each `pitch` bytes.
  void bind(Context& context, size_t tokens, int64_t filled, uint8_t* fresh, size_t pitch, bool own_rope, uint8_t* query) {
    Shapes shapes;
    Addresses addresses;
    bind_stage(shared, spec, tokens, own_rope, query, shapes, addresses);
    addresses[names::kTotalSlots] = shared.engines.address(names::kTotalSlots);
    uint8_t* past = kv.address();
    for (int64_t layer = spec.first; layer <= spec.last; ++layer)
      for (auto [in, out] : {std::pair(names::kPastKey, names::kPresentKey), {names::kPastValue, names::kPresentValue}}) {
        std::string number = std::to_string(layer);
        shapes[in + number] = {1, filled, shared.manifest.model.kv_heads, shared.manifest.model.head_dim};
        addresses[in + number] = past;
        addresses[out + number] = fresh;
        past += part, fresh += pitch;
      }
    context.bind(shapes, addresses);
  }

  TensorrtCacheContext& shared;
  const StageSpec spec;
  Cuda& cuda;
  const size_t row, parts, part;  // bytes of a slot, number of parts, bytes of a part
  const int64_t id;
  Buffer kv;
  Queries queries;
  Pinned<int64_t> position;
  Pinned<int32_t> total;
  std::unique_ptr<Context> decode;
  std::map<Ids, void*> recordings;
};

namespace {

class TensorrtStageCache : public StageCache {
 public:
  TensorrtStageCache(TensorrtCacheContext& context, const StageSpec& spec, const std::string& graph, int64_t asked)
      : StageCache(asked), context_(context), spec_(spec), graph_(graph), cuda_(context.cuda) {}

  ~TensorrtStageCache() override { give_back(context_, spec_.first, std::move(memory_)); }

  // The memory, with room for one more token.
  DeviceSlots& for_one_more() {
    room(length + 1);
    return *memory_;
  }

  Scores attention(bool last_only) override {
    Lock held(cuda_);
    const ModelSpec& model = context_.manifest.model;
    return memory_->queries.attention(memory_->last_key(), {1, length, model.kv_heads, model.head_dim}, length, last_only);
  }

  Rows keys() override {
    Lock held(cuda_);
    return read_keys(context_, memory_->last_key(), static_cast<size_t>(length));
  }

  SavedSlots read_kv(const Ids& slots) override {
    Lock held(cuda_);
    size_t bytes = static_cast<size_t>(2 * spec_.layers()) * context_.row_bytes() * slots.size();
    SavedSlots kept(bytes);
    if (bytes == 0) return kept;
    Buffer packed(cuda_, bytes, "saved K and V");
    move(slots, packed.address(), true);
    cuda_.copy_out(kept.data(), packed.address(), bytes);
    cuda_.wait();
    return kept;
  }

  void put_kv(const Ids& slots, const SavedSlots& kv, int64_t filled) override {
    Lock held(cuda_);
    room(filled);
    if (!kv.empty()) {
      Buffer packed(cuda_, kv.size(), "saved K and V");
      cuda_.copy_in(packed.address(), kv.data(), kv.size());
      move(slots, packed.address(), false);
      cuda_.wait();
    }
  }

 protected:
  Rows run(const TokenStates& tokens, const Positions& positions, bool query, const Ids*) override {
    Lock held(cuda_);
    room(length + static_cast<int64_t>(tokens.count()));
    RopeRows rope = rope_rows(context_.tables, context_.manifest, positions);
    size_t all = tokens.count(), longest = static_cast<size_t>(context_.engines.longest(graph_));
    if (query) memory_->queries.room(all);
    auto out = std::make_shared<TensorrtRows>(context_, all);
    for (size_t start = 0; start < all; start += longest)
      many(tokens, rope, start, std::min(longest, all - start), query ? memory_->queries.address(start) : nullptr,
           out->row(start));
    cuda_.wait();
    return {std::move(out), static_cast<size_t>(context_.manifest.model.hidden)};
  }

 private:
  void room(int64_t slots) { make_room(context_, spec_, graph_, slots, capacity, length, memory_); }

  // Copies slots between the cache and a packed buffer, run by run.
  void move(const Ids& slots, uint8_t* packed, bool out) {
    DeviceSlots& m = *memory_;
    size_t pitch = slots.size() * m.row;
    for (const SlotRun& run : slot_runs(slots)) {
      uint8_t *in_cache = m.slot(static_cast<int64_t>(run.first)), *in_packed = packed + run.start * m.row;
      if (out)
        cuda_.copy_rows(in_packed, pitch, in_cache, m.part, run.count * m.row, m.parts);
      else
        cuda_.copy_rows(in_cache, m.part, in_packed, pitch, run.count * m.row, m.parts);
    }
  }

  // Queues the run of some tokens; their hidden states go to `out`.
  void many(const TokenStates& tokens, const RopeRows& rope, size_t start, size_t count, uint8_t* queries, uint8_t* out) {
    DeviceSlots& m = *memory_;
    LoadedEngines& engines = context_.engines;
    Context& used = engines.context(graph_, count == 1 ? kDecode : kPrefill);
    int64_t filled = length + static_cast<int64_t>(start);
    bool in_place = m.row % kAlignment == 0;  // else no slot but the first has an address that TensorRT takes
    m.bind(used, count, filled, in_place ? m.slot(filled) : m.new_slots(), in_place ? m.part : aligned(count * m.row),
           !rope.own.empty(), queries);
    auto total = static_cast<int32_t>(filled + static_cast<int64_t>(count));
    copy_tokens(context_, spec_, tokens, rope, start, count);
    cuda_.copy_in(engines.address(names::kTotalSlots), &total, sizeof total);
    used.enqueue();
    if (!in_place) m.put(filled, count);
    size_t bytes = count * static_cast<size_t>(context_.manifest.model.hidden) * sizeof(float);
    cuda_.copy_rows(out, bytes, engines.address(names::kHiddenOut), bytes, bytes, 1);
  }

  TensorrtCacheContext& context_;
  const StageSpec spec_;
  const std::string graph_;
  Cuda& cuda_;
  std::unique_ptr<DeviceSlots> memory_;
};

}  // namespace

std::unique_ptr<StageCache> make_tensorrt_cache(TensorrtCacheContext& context, const StageSpec& spec,
                                                const std::string& graph, int64_t capacity) {
  return std::make_unique<TensorrtStageCache>(context, spec, graph, capacity);
}

TokenSteps::TokenSteps(TensorrtCacheContext& context, const Graphs& graphs)
    : context_(context), cuda_(context.cuda), ids_(cuda_, 1), best_(cuda_, 1),
      state_(cuda_, static_cast<size_t>(context.manifest.model.hidden)),
      logits_(cuda_, static_cast<size_t>(context.manifest.model.vocab)),
      embed_(context.engines.new_context(graphs.embed, 0, true)), head_(context.engines.new_context(graphs.head, 0, true)),
      recordable_(context.engines.records()) {
  const Manifest& m = context.manifest;
  for (const TokenInput& each : m.token_inputs)
    if (!each.of_text) zeros_[names::kTokenInput + each.name] = std::make_unique<Pinned<float>>(cuda_, size_t(each.width));
  auto bind = [&](Context& to, const GraphIO& io, const Shapes& shapes) {
    Addresses addresses;
    for (const std::vector<TensorSpec>& side : {io.inputs, io.outputs})
      for (const TensorSpec& spec : side) addresses[spec.name] = context.engines.address(spec.name);
    to.bind(shapes, addresses);
  };
  bind(*embed_, embed_io(m), {{names::kIds, {1}}});
  bind(*head_, head_io(m, context.dialect), {{names::kHidden, {1, m.model.hidden}}});
}

Step TokenSteps::run(const std::vector<StageCache*>& caches, int64_t token, const Ids& positions, bool logits) {
  std::vector<DeviceSlots*> memories;
  for (StageCache* cache : caches) memories.push_back(&static_cast<TensorrtStageCache*>(cache)->for_one_more());
  *ids_.data() = token;
  for (size_t i = 0; i < caches.size(); ++i) {
    *memories[i]->position.data() = positions[i];
    *memories[i]->total.data() = static_cast<int32_t>(caches[i]->length + 1);
  }
  launch(memories);
  for (size_t i = 0; i < caches.size(); ++i) memories[i]->put(caches[i]->length, 1);
  if (logits) cuda_.copy_out(logits_.data(), context_.engines.address(names::kLogits), logits_.bytes());
  cuda_.wait();
  for (StageCache* cache : caches) ++cache->length;
  auto copy = [](const Pinned<float>& from) { return Floats(from.data(), from.data() + from.bytes() / sizeof(float)); };
  return {*best_.data(), copy(state_), logits ? copy(logits_) : Floats()};
}

void TokenSteps::launch(const std::vector<DeviceSlots*>& memories) {
  DeviceSlots& last = *memories.back();
  Ids key;
  for (const DeviceSlots* memory : memories) key.push_back(memory->id);
  auto known = last.recordings.find(key);
  void* recorded = nullptr;
  if (known == last.recordings.end()) {
    if (last.recordings.size() == kRecordings) last.forget();
  } else if (recorded = known->second; !recorded && recordable_) {
    recorded = cuda_.record([&] { queue(memories); });
    recordable_ = recorded != nullptr;
  }
  last.recordings[key] = recorded;
  if (recorded)
    cuda_.launch(recorded);
  else
    queue(memories);
}

void TokenSteps::queue(const std::vector<DeviceSlots*>& memories) {
  const LoadedEngines& engines = context_.engines;
  uint8_t *hidden = engines.address(names::kHidden), *hidden_out = engines.address(names::kHiddenOut);
  cuda_.copy_in(engines.address(names::kIds), ids_.data(), ids_.bytes());
  for (const auto& [name, zeros] : zeros_) cuda_.copy_in(engines.address(name), zeros->data(), zeros->bytes());
  embed_->enqueue();
  for (DeviceSlots* memory : memories) {
    cuda_.copy_in(engines.address(names::kPositions), memory->position.data(), memory->position.bytes());
    cuda_.copy_in(engines.address(names::kTotalSlots), memory->total.data(), memory->total.bytes());
    memory->decode->enqueue();
    cuda_.copy_rows(hidden, state_.bytes(), hidden_out, state_.bytes(), state_.bytes(), 1);
  }
  head_->enqueue();
  cuda_.copy_out(state_.data(), hidden, state_.bytes());
  cuda_.copy_out(best_.data(), engines.address(names::kBest), best_.bytes());
}

void give_back(TensorrtCacheContext& shared, int64_t stage, std::unique_ptr<StageMemory> memory) noexcept {
  if (!memory) return;
  try {
    Cuda::Use held(shared.cuda);
    shared.unused[stage].push_back(std::move(memory));
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory to keep it, so it is freed
  }
}

void Queries::room(size_t count) {
  size_t bytes = 4 * count * static_cast<size_t>(context_.manifest.model.heads * context_.manifest.model.head_dim);
  if (!buffer_ || buffer_->size() < bytes) {
    buffer_.reset();
    buffer_.emplace(context_.cuda, bytes, "the tokens' queries");
  }
  count_ = count;
}

uint8_t* Queries::address(size_t token) const {
  return buffer_->address() +
         4 * token * static_cast<size_t>(context_.manifest.model.heads * context_.manifest.model.head_dim);
}

Scores Queries::attention(uint8_t* key, const Ids& shape, int64_t length, bool last_only) {
  auto longest = static_cast<size_t>(context_.engines.longest(context_.score));
  Scores out{Floats(static_cast<size_t>(length)), Floats(static_cast<size_t>(length))};
  for (size_t start = last_only ? count_ - 1 : 0; start < count_; start += longest) {
    size_t end = std::min(start + longest, count_);
    Scores part = run(start, end, key, shape, length, length - static_cast<int64_t>(count_ - end));
    for (size_t slot = 0; slot < out.first.size(); ++slot) {
      out.first[slot] += part.first[slot];
      out.second[slot] = std::max(out.second[slot], part.second[slot]);
    }
  }
  return out;
}

// The scores of tokens `start` to `end`, the last of which fills slot `filled` - 1: none sees a later one.
Scores Queries::run(size_t start, size_t end, uint8_t* key, const Ids& shape, int64_t length, int64_t filled) {
  const ModelSpec& model = context_.manifest.model;
  LoadedEngines& engines = context_.engines;
  Cuda& cuda = context_.cuda;
  int64_t width = model.heads * model.head_dim;
  auto total = static_cast<int32_t>(filled);
  Addresses addresses{{names::kQuery, address(start)}, {names::kKey, key}};
  for (const char* name : {names::kTotalSlots, names::kAttentionSum, names::kAttentionMax})
    addresses[name] = engines.address(name);
  Shapes shapes{{names::kQuery, {static_cast<int64_t>(end - start), width}}, {names::kKey, shape}};
  Context& context = engines.context(context_.score, 0);
  cuda.copy_in(addresses[names::kTotalSlots], &total, sizeof total);
  context.bind(shapes, addresses);
  context.enqueue();
  Scores out{Floats(static_cast<size_t>(length)), Floats(static_cast<size_t>(length))};
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

void bind_stage(const TensorrtCacheContext& context, const StageSpec& spec, size_t count, bool own_rope, uint8_t* query,
                Shapes& shapes, Addresses& addresses) {
  auto tokens = static_cast<int64_t>(count);
  shapes[names::kHidden] = {tokens, context.manifest.model.hidden};
  shapes[names::kPositions] = {1, tokens};
  for (const char* name : {names::kHidden, names::kHiddenOut, names::kPositions})
    addresses[name] = context.engines.address(name);
  for (const TokenInput& each : context.manifest.token_inputs)
    if (std::string name = names::kTokenInput + each.name;
        std::count(spec.inputs.begin(), spec.inputs.end(), each.name) > 0) {
      shapes[name] = {tokens, each.width};
      addresses[name] = context.engines.address(name);
    }
  const Addresses& rope = own_rope ? context.own_rope : context.rope;
  addresses.insert(rope.begin(), rope.end());
  if (spec.query) addresses[names::kQuery] = query ? query : context.engines.address(names::kQuery);
}

void copy_tokens(const TensorrtCacheContext& context, const StageSpec& spec, const TokenStates& tokens, const RopeRows& rope,
                 size_t start, size_t count) {
  auto copy = [&](const std::string& name, const Rows& rows) {
    put(context.cuda, context.engines.address(name), rows, start, count);
  };
  copy(names::kHidden, tokens.hidden);
  for (const std::string& name : spec.inputs) copy(names::kTokenInput + name, tokens.inputs.at(name));
  auto width = static_cast<size_t>(context.manifest.model.head_dim / 2);
  for (const auto& [name, own] : rope.own)
    context.cuda.copy_in(context.own_rope.at(name), own.data() + start * width, count * width * sizeof(float));
  Ids rows(rope.rows.begin() + static_cast<std::ptrdiff_t>(rope.own.empty() ? start : 0), rope.rows.end());
  context.cuda.copy_in(context.engines.address(names::kPositions), rows.data(), count * sizeof(int64_t));
}

Rows read_keys(const TensorrtCacheContext& context, const uint8_t* key, size_t length) {
  auto heads = static_cast<size_t>(context.manifest.model.kv_heads);
  auto dim = static_cast<size_t>(context.manifest.model.head_dim);
  std::string raw(heads * length * context.slot_bytes(), '\0');
  if (!raw.empty()) context.cuda.copy_out(raw.data(), key, raw.size());
  context.cuda.wait();
  Rows out(length, heads * dim);
  for (size_t head = 0; head < heads; ++head)
    for (size_t slot = 0; slot < length; ++slot)
      widen(raw.data() + (slot * heads + head) * context.slot_bytes(), context.manifest.kv_type(context.dialect), dim,
            out.row(slot) + head * dim);
  return out;
}

}  // namespace vtxcore
