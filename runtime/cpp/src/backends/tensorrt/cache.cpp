#include "backends/tensorrt/cache.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "backends/slots.hpp"
#include "backends/tensorrt/device_rows.hpp"
#include "base/halves.hpp"

namespace vtxcore {
namespace {

using Lock = Cuda::Use;

constexpr size_t kRecordings = 4;  // that a stage's memory keeps, each with other memory of the stages before it

}  // namespace

// A stage's context for one token, and the numbers that the host tells it of that token, by the input's name. `id` is never
// that of another one; `recordings` are of steps that end with this stage, by the ids of all stages of theirs; null once one
// has run.
struct BoundStage {
  BoundStage(TensorrtCacheContext& context, const StageSpec& stage, const std::string& graph, const std::vector<std::string>& in)
      : shared(context), spec(stage), cuda(context.cuda), id(context.made++),
        decode(context.engines.new_context(graph, kDecode, true)) {
    const ModelSpec& model = context.manifest.model;
    auto place = [&](const char* name) { places.emplace(name, std::make_unique<Pinned<int64_t>>(cuda, 1)); };
    place(names::kPositions);
    if (model.sliding) place(names::kFirstSlot);
    if (model.sees_both_ways()) place(names::kSeenSlots);
    for (const std::string& name : in) slots.emplace(name, std::make_unique<Pinned<int32_t>>(cuda, 1));
  }
  virtual ~BoundStage() { forget(); }
  void forget() {
    for (const auto& [key, recorded] : recordings)
      if (recorded) cuda.forget(recorded);
    recordings.clear();
  }
  void tell(const std::map<std::string, int64_t>& told) {
    for (const auto& [name, value] : told)
      if (auto found = places.find(name); found != places.end())
        *found->second->data() = value;
      else
        *slots.at(name)->data() = static_cast<int32_t>(value);
  }
  // Queues copies of what was told to where the stage reads it.
  void copy_told() {
    for (const auto& [name, value] : places) cuda.copy_in(shared.engines.address(name), value->data(), value->bytes());
    for (const auto& [name, value] : slots) cuda.copy_in(shared.engines.address(name), value->data(), value->bytes());
  }

  TensorrtCacheContext& shared;
  const StageSpec spec;
  Cuda& cuda;
  const int64_t id;
  std::map<std::string, std::unique_ptr<Pinned<int64_t>>> places;
  std::map<std::string, std::unique_ptr<Pinned<int32_t>>> slots;
  std::unique_ptr<Context> decode;
  std::map<Ids, void*> recordings;
};

namespace {

// A stage's K and V with what is bound to them. `readers` are bound to them and to the memory of other stages, by the reading
// stage's first layer and the ids of all.
struct DeviceSlots : StageMemory, BoundStage {
  DeviceSlots(TensorrtCacheContext& context, const StageSpec& stage, const std::string& graph, int64_t count)
      : StageMemory(count), BoundStage(context, stage, graph, {names::kTotalSlots}), layout(context.layout(stage)),
        kv(cuda, layout.bytes(static_cast<size_t>(count)), cat("the KV cache of layers ", stage.first, " to ", stage.last)),
        regions(layout.regions(kv.address(), static_cast<size_t>(count))), queries(context) {
    bind(*decode, 1, capacity, new_slots(1), false, nullptr);
    DeviceSlots::clear();
  }
  void clear() override {
    cuda.zero(kv.address(), kv.size());  // what is masked must still be a number
    cuda.wait();
  }
  void take_over(const StageMemory& other, int64_t length) override {
    copy_slots(cuda, regions, static_cast<const DeviceSlots&>(other).regions, static_cast<size_t>(length));
    cuda.wait();
  }
  uint8_t* last_key() const { return part_of(regions, spec.cached.back(), false); }
  // The buffer for new K and V that the engine cannot write where they belong.
  Regions new_slots(size_t tokens) const { return layout.regions(shared.engines.address(new_slots_of(spec)), tokens); }
  // Copies new K and V from their buffer to the slots from `start` on.
  void put(int64_t start, size_t tokens) { copy_slots(cuda, from_slot(regions, start), new_slots(tokens), tokens); }

  // Binds a context for `tokens` tokens after `filled` slots, whose K and V go to `fresh`.
  void bind(Context& context, size_t tokens, int64_t filled, const Regions& fresh, bool own_rope, uint8_t* query) {
    Shapes shapes;
    Addresses addresses;
    bind_stage(shared, spec, tokens, own_rope, query, shapes, addresses);
    addresses[names::kTotalSlots] = shared.engines.address(names::kTotalSlots);
    const ModelSpec& model = shared.manifest.model;
    for (int64_t layer : spec.cached)
      for (bool values : {false, true}) {
        const std::string number = std::to_string(layer), in = (values ? names::kPastValue : names::kPastKey) + number;
        shapes[in] = {1, filled, model.kv_heads, model.heads_of(layer)};
        addresses[in] = part_of(regions, layer, values);
        addresses[(values ? names::kPresentValue : names::kPresentKey) + number] = part_of(fresh, layer, values);
      }
    context.bind(shapes, addresses);
  }

  const KVLayout layout;
  Buffer kv;
  const Regions regions;
  Queries queries;
  std::map<Ids, std::shared_ptr<BoundStage>> readers;
};

// A stage's cache as a step needs it.
class DecodingCache {
 public:
  virtual ~DecodingCache() = default;
  // What is bound to its memory, which has room for one more token.
  virtual BoundStage& for_one_more() = 0;
  // Readies that memory for a token at that position, which is to fill the next slot.
  virtual void begin_token(int64_t position) = 0;
  // Queues copies of what the token's run gave to where it is held; the slot is counted later.
  virtual void end_token() {}
};

class TensorrtStageCache : public StageCache, public DecodingCache {
 public:
  TensorrtStageCache(TensorrtCacheContext& context, const StageSpec& spec, const std::string& graph, int64_t asked)
      : StageCache(asked, spec, context.manifest.model), context_(context), spec_(spec), graph_(graph), cuda_(context.cuda),
        layout_(context.layout(spec)) {}

  ~TensorrtStageCache() override { give_back(context_, spec_.first, std::move(memory_)); }

  BoundStage& for_one_more() override {
    room(length + 1);
    return *memory_;
  }

  void begin_token(int64_t position) override {
    std::map<std::string, int64_t> told{{names::kPositions, position}, {names::kTotalSlots, length + 1}};
    if (slides()) {
      place(text_positions(position, 1));
      told[names::kFirstSlot] = first_slots(text_positions(position, 1), length + 1).front();
    }
    if (context_.manifest.model.sees_both_ways()) told[names::kSeenSlots] = length + 1;
    memory_->tell(told);
  }

  void end_token() override { memory_->put(length, 1); }

  DeviceSlots& memory() const { return *memory_; }

  Scores attention(bool last_only) override {
    Lock held(cuda_);
    const ModelSpec& model = context_.manifest.model;
    const Ids shape{1, length, model.kv_heads, model.heads_of(spec_.cached.back())};
    return memory_->queries.attention(memory_->last_key(), shape, length, last_only);
  }

  Rows keys() override {
    Lock held(cuda_);
    return read_keys(context_, spec_.cached.back(), memory_->last_key(), static_cast<size_t>(length));
  }

  SavedSlots read_kv(const Ids& slots) override {
    Lock held(cuda_);
    size_t bytes = layout_.bytes(slots.size(), true);
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
    const size_t all = tokens.count();
    const int64_t filled = length + static_cast<int64_t>(all);
    const std::vector<size_t> ends = part_ends(tokens, static_cast<size_t>(context_.engines.longest(graph_)));
    size_t start = 0, most = 0;
    for (size_t end : ends) most = std::max(most, end - start), start = end;
    context_.engines.check_tokens(graph_, most);
    Lock held(cuda_);
    room(filled);
    RopeRows rope = rope_rows(context_.tables, context_.manifest, positions);
    Sight sight;
    if (slides()) sight.first = first_slots(positions, filled);
    if (context_.manifest.model.sees_both_ways()) sight.seen = seen_slots(tokens, length);
    if (query) memory_->queries.room(all);
    auto out = std::make_shared<TensorrtRows>(context_, all);
    start = 0;
    for (size_t end : ends) {
      many(tokens, rope, sight, start, end - start, query ? memory_->queries.address(start) : nullptr, out->row(start));
      start = end;
    }
    cuda_.wait();
    return {std::move(out), static_cast<size_t>(context_.manifest.model.hidden)};
  }

 private:
  // The first slot that each token sees in layers that slide, and the number of first slots where tokens see both ways.
  struct Sight {
    Ids first, seen;
  };

  void room(int64_t slots) { make_room(context_, spec_, graph_, slots, capacity, length, memory_); }

  // Copies slots between the cache and a packed buffer, run by run.
  void move(const Ids& slots, uint8_t* packed, bool out) {
    const Regions all = layout_.regions(packed, slots.size(), true);
    for (const SlotRun& run : slot_runs(slots)) {
      Regions in_cache = from_slot(memory_->regions, static_cast<int64_t>(run.first));
      Regions in_packed = from_slot(all, static_cast<int64_t>(run.start));
      copy_slots(cuda_, out ? in_packed : in_cache, out ? in_cache : in_packed, run.count);
    }
  }

  // Queues the run of some tokens; their hidden states go to `out`.
  void many(const TokenStates& tokens, const RopeRows& rope, const Sight& sight, size_t start, size_t count, uint8_t* queries,
            uint8_t* out) {
    DeviceSlots& m = *memory_;
    LoadedEngines& engines = context_.engines;
    Context& used = engines.context(graph_, count == 1 ? kDecode : kPrefill);
    int64_t filled = length + static_cast<int64_t>(start);
    bool in_place = layout_.written_in_place();
    m.bind(used, count, filled, in_place ? from_slot(m.regions, filled) : m.new_slots(count), !rope.own.empty(), queries);
    auto total = static_cast<int32_t>(filled + static_cast<int64_t>(count));
    copy_tokens(context_, spec_, tokens, rope, start, count);
    cuda_.copy_in(engines.address(names::kTotalSlots), &total, sizeof total);
    for (auto [name, of_each] : {std::pair(names::kFirstSlot, &sight.first), {names::kSeenSlots, &sight.seen}})
      if (!of_each->empty()) cuda_.copy_in(engines.address(name), of_each->data() + start, count * sizeof(int64_t));
    used.enqueue();
    if (!in_place) m.put(filled, count);
    size_t bytes = count * static_cast<size_t>(context_.manifest.model.hidden) * sizeof(float);
    cuda_.copy_rows(out, bytes, engines.address(names::kHiddenOut), bytes, bytes, 1);
  }

  TensorrtCacheContext& context_;
  const StageSpec spec_;
  const std::string graph_;
  Cuda& cuda_;
  const KVLayout layout_;
  std::unique_ptr<DeviceSlots> memory_;
};

using TensorrtSources = std::map<int64_t, TensorrtStageCache*>;

// What is bound to the memory of a stage's sources. It keeps their addresses, not the memory itself.
struct ReadingStage : BoundStage {
  ReadingStage(TensorrtCacheContext& context, const StageSpec& stage, const std::string& graph,
               const std::vector<std::string>& in, const TensorrtSources& sources)
      : BoundStage(context, stage, graph, in) {
    Ids filled;
    for (const auto& [layer, cache] : sources) {
      const DeviceSlots& memory = cache->memory();
      layers.push_back(layer);
      filled.push_back(memory.capacity);
      past[names::kPastKey + std::to_string(layer)] = part_of(memory.regions, layer, false);
      past[names::kPastValue + std::to_string(layer)] = part_of(memory.regions, layer, true);
    }
    bind(*decode, 1, filled);
  }

  // Binds a context for `tokens` tokens over so many slots of each source, the last ones of which are theirs.
  void bind(Context& context, size_t tokens, const Ids& filled) {
    const ModelSpec& model = shared.manifest.model;
    Shapes shapes;
    Addresses addresses = past;
    bind_stage(shared, spec, tokens, false, nullptr, shapes, addresses);
    for (size_t i = 0; i < layers.size(); ++i)
      for (const char* name : {names::kPastKey, names::kPastValue})
        shapes[name + std::to_string(layers[i])] = {1, filled[i], model.kv_heads, model.heads_of(layers[i])};
    for (const auto& [name, value] : slots) addresses[name] = shared.engines.address(name);
    context.bind(shapes, addresses);
  }

  Ids layers;
  Addresses past;
};

// The cache of a stage whose layers keep nothing. The tokens of a run are in the sources' last slots already.
class TensorrtReadingCache : public StageCache, public DecodingCache {
 public:
  TensorrtReadingCache(TensorrtCacheContext& context, const StageSpec& spec, const std::string& graph, const Sources& sources)
      : StageCache(0), context_(context), spec_(spec), graph_(graph), cuda_(context.cuda) {
    for (const auto& [layer, cache] : sources) {
      sources_[layer] = static_cast<TensorrtStageCache*>(cache);
      slots_.push_back(names::kSourceSlot + std::to_string(layer));
      if (!placed_ || context.manifest.model.slides(layer)) placed_ = sources_[layer];  // none may slide: then it is not used
    }
  }

  bool reads_only() const override { return true; }
  Scores attention(bool) override { nothing_is_held(); }
  Rows keys() override { nothing_is_held(); }
  SavedSlots read_kv(const Ids&) override { nothing_is_held(); }
  BoundStage& for_one_more() override { return reader(); }

  void begin_token(int64_t position) override {
    std::map<std::string, int64_t> told{{names::kPositions, position}};
    if (context_.manifest.model.sliding)
      told[names::kFirstSlot] = placed_->first_slots(text_positions(position, 1), placed_->length + 1).front();
    for (const auto& [layer, cache] : sources_) told[names::kSourceSlot + std::to_string(layer)] = cache->length;
    reader_->tell(told);
  }

 protected:
  void put_kv(const Ids&, const SavedSlots&, int64_t) override { nothing_is_held(); }

  Rows run(const TokenStates& tokens, const Positions& positions, bool, const Ids*) override {
    Lock held(cuda_);
    LoadedEngines& engines = context_.engines;
    const size_t count = tokens.count();
    engines.check_tokens(graph_, count);
    auto out = std::make_shared<TensorrtRows>(context_, count);
    Context& used = engines.context(graph_, count == 1 ? kDecode : kPrefill);
    Ids filled;
    for (const auto& [layer, cache] : sources_) {
      filled.push_back(cache->length);
      auto last = static_cast<int32_t>(cache->length - 1);
      cuda_.copy_in(engines.address(names::kSourceSlot + std::to_string(layer)), &last, sizeof last);
    }
    reader().bind(used, count, filled);
    copy_tokens(context_, spec_, tokens, rope_rows(context_.tables, context_.manifest, positions), 0, count);
    if (context_.manifest.model.sliding) {
      const Ids first = placed_->first_slots(positions, placed_->length);
      cuda_.copy_in(engines.address(names::kFirstSlot), first.data(), count * sizeof(int64_t));
    }
    used.enqueue();
    size_t bytes = count * static_cast<size_t>(context_.manifest.model.hidden) * sizeof(float);
    cuda_.copy_rows(out->row(0), bytes, engines.address(names::kHiddenOut), bytes, bytes, 1);
    cuda_.wait();
    return {std::move(out), static_cast<size_t>(context_.manifest.model.hidden)};
  }

 private:
  [[noreturn]] static void nothing_is_held() { throw std::logic_error("a stage that reads other caches holds nothing"); }

  // What is bound to the sources' memory, which the last of them holds for the next conversation over it.
  ReadingStage& reader() {
    Ids key{spec_.first};
    for (const auto& [layer, cache] : sources_) key.push_back(cache->memory().id);
    auto& readers = sources_.rbegin()->second->memory().readers;
    auto found = readers.find(key);
    if (found == readers.end()) {
      if (readers.size() == kRecordings) readers.clear();
      found = readers.emplace(key, std::make_shared<ReadingStage>(context_, spec_, graph_, slots_, sources_)).first;
    }
    reader_ = std::static_pointer_cast<ReadingStage>(found->second);
    return *reader_;
  }

  TensorrtCacheContext& context_;
  const StageSpec spec_;
  const std::string graph_;
  Cuda& cuda_;
  TensorrtSources sources_;
  std::vector<std::string> slots_;
  std::shared_ptr<ReadingStage> reader_;  // that was bound last
  TensorrtStageCache* placed_ = nullptr;
};

}  // namespace

std::unique_ptr<StageCache> make_tensorrt_cache(TensorrtCacheContext& context, const StageSpec& spec,
                                                const std::string& graph, int64_t capacity) {
  return std::make_unique<TensorrtStageCache>(context, spec, graph, capacity);
}

std::unique_ptr<StageCache> make_tensorrt_reading_cache(TensorrtCacheContext& context, const StageSpec& spec,
                                                        const std::string& graph, const Sources& sources) {
  return std::make_unique<TensorrtReadingCache>(context, spec, graph, sources);
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
  std::vector<DecodingCache*> decoding;
  std::vector<BoundStage*> stages;
  size_t keeping = 0;  // the first stages, whose K and V the others read
  for (StageCache* cache : caches) {
    decoding.push_back(&dynamic_cast<DecodingCache&>(*cache));
    stages.push_back(&decoding.back()->for_one_more());
    if (!cache->reads_only()) ++keeping;
  }
  *ids_.data() = token;
  for (size_t i = 0; i < caches.size(); ++i) decoding[i]->begin_token(positions[i]);
  for (auto [first, end] : {std::pair(size_t{0}, keeping), {keeping, caches.size()}}) {
    if (first == end) continue;
    const auto begin = stages.begin();
    const std::vector<BoundStage*> some(begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(end));
    launch(some, first == 0, end == caches.size());
    for (size_t i = first; i < end; ++i) decoding[i]->end_token();
  }
  if (logits) cuda_.copy_out(logits_.data(), context_.engines.address(names::kLogits), logits_.bytes());
  cuda_.wait();
  for (StageCache* cache : caches)
    if (!cache->reads_only()) ++cache->length;
  auto copy = [](const Pinned<float>& from) { return Floats(from.data(), from.data() + from.bytes() / sizeof(float)); };
  return {*best_.data(), copy(state_), logits ? copy(logits_) : Floats()};
}

void TokenSteps::launch(const std::vector<BoundStage*>& stages, bool begins, bool ends) {
  BoundStage& last = *stages.back();
  Ids key;
  for (const BoundStage* stage : stages) key.push_back(stage->id);
  auto known = last.recordings.find(key);
  void* recorded = nullptr;
  if (known == last.recordings.end()) {
    if (last.recordings.size() == kRecordings) last.forget();
  } else if (recorded = known->second; !recorded && recordable_) {
    recorded = cuda_.record([&] { queue(stages, begins, ends); });
    recordable_ = recorded != nullptr;
  }
  last.recordings[key] = recorded;
  if (recorded)
    cuda_.launch(recorded);
  else
    queue(stages, begins, ends);
}

void TokenSteps::queue(const std::vector<BoundStage*>& stages, bool begins, bool ends) {
  const LoadedEngines& engines = context_.engines;
  uint8_t *hidden = engines.address(names::kHidden), *hidden_out = engines.address(names::kHiddenOut);
  if (begins) {
    cuda_.copy_in(engines.address(names::kIds), ids_.data(), ids_.bytes());
    for (const auto& [name, zeros] : zeros_) cuda_.copy_in(engines.address(name), zeros->data(), zeros->bytes());
    embed_->enqueue();
  }
  for (BoundStage* stage : stages) {
    stage->copy_told();
    stage->decode->enqueue();
    cuda_.copy_rows(hidden, state_.bytes(), hidden_out, state_.bytes(), state_.bytes(), 1);
  }
  if (!ends) return;
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
  const ModelSpec& model = context.manifest.model;
  for (auto [name, given] : {std::pair(names::kFirstSlot, model.sliding.has_value()), {names::kSeenSlots, model.sees_both_ways()}})
    if (given) shapes[name] = {1, tokens}, addresses[name] = context.engines.address(name);
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

Rows read_keys(const TensorrtCacheContext& context, int64_t layer, const uint8_t* key, size_t length) {
  auto heads = static_cast<size_t>(context.manifest.model.kv_heads);
  auto dim = static_cast<size_t>(context.manifest.model.heads_of(layer));
  const size_t bytes = dim * static_cast<size_t>(context.manifest.kv_bytes(context.dialect));  // of one slot of one head
  std::string raw(heads * length * bytes, '\0');
  if (!raw.empty()) context.cuda.copy_out(raw.data(), key, raw.size());
  context.cuda.wait();
  Rows out(length, heads * dim);
  for (size_t head = 0; head < heads; ++head)
    for (size_t slot = 0; slot < length; ++slot)
      widen(raw.data() + (slot * heads + head) * bytes, context.manifest.kv_type(context.dialect), dim,
            out.row(slot) + head * dim);
  return out;
}

}  // namespace vtxcore
