#include "backends/tensorrt/cache.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "backends/slots.hpp"
#include "backends/tensorrt/device_rows.hpp"
#include "backends/tensorrt/states.hpp"
#include "backends/tensorrt/step.hpp"
#include "base/halves.hpp"

namespace vtxcore {
namespace {

#ifdef VTX_SLOT_GROWTH  // for tests: the answers of tiny models outgrow it
constexpr int64_t kGrowth = VTX_SLOT_GROWTH;
#else
constexpr int64_t kGrowth = names::kGrowth;
#endif

using Lock = Cuda::Use;

const Ids kOne{1};  // the numbers of a run's tokens whose states are given out, if it is of one token

// Where the state before a run is, those that it gives out, and the `count` numbers of their tokens.
struct BoundStates {
  uint8_t *given, *made, *ends;
  size_t count;
};

// A stage's K and V with what is bound to them. `readers` are bound to them and to the memory of other stages: of each
// reading stage, by its first layer, and then by the ids of all that memory. `state`, if its layers keep one, is the last
// state, of `version`, and behind it the number of the one token.
struct DeviceSlots : StageMemory, BoundStage {
  DeviceSlots(TensorrtCacheContext& context, const StageSpec& stage, const std::string& graph, int64_t count)
      : StageMemory(count), BoundStage(context, stage, graph, {names::kTotalSlots}), layout(context.layout(stage)),
        kv(cuda, std::max<size_t>(1, layout.bytes(static_cast<size_t>(count))),
           cat("the KV cache of layers ", stage.first, " to ", stage.last)),
        regions(layout.regions(kv.address(), static_cast<size_t>(count))), queries(context) {
    std::optional<BoundStates> states;
    if (!spec.stateful.empty()) {
      state_bytes = spec.stateful.size() * static_cast<size_t>(context.manifest.model.state_numbers) * sizeof(float);
      state.emplace(cuda, aligned(state_bytes) + kOne.size() * sizeof(int64_t),
                    cat("the state of layers ", stage.first, " to ", stage.last));
      uint8_t* ends = state->address() + aligned(state_bytes);
      cuda.copy_in(ends, kOne.data(), kOne.size() * sizeof(int64_t));
      states = {state->address(), context.engines.address(names::kStateOut), ends, kOne.size()};
    }
    bind(*decode, 1, capacity, new_slots(1), false, nullptr, states);
    DeviceSlots::clear();
  }
  void clear() override {
    version = 0;
    for (auto it = recordings.begin(); it != recordings.end();)  // what could not be recorded once is tried again
      it = it->second && !*it->second ? recordings.erase(it) : std::next(it);
    cuda.zero(kv.address(), kv.size());  // what is masked must still be a number
    cuda.wait();
  }
  // Begins with the first `length` slots of shorter memory.
  void take_over(const DeviceSlots& other, int64_t length) {
    copy_slots(cuda, regions, other.regions, static_cast<size_t>(length));
    cuda.wait();
  }
  // Has the state after so many tokens for the next one.
  void load(DeviceStates& states, int64_t length) {
    const StateMemory& from = states.before(length);
    if (version != from.version) copy_state(state->address(), from.buffer.address());
    version = 0;  // until the token has run
  }
  void turn() override {
    if (state) copy_state(state->address(), shared.engines.address(names::kStateOut));
  }
  // Queues a copy of the state after the token that ran behind so many others to the history.
  void save(DeviceStates& states, int64_t length) {
    copy_state(states.room(1), state->address());
    states.put(length, kOne, length);
    version = states.before(length + 1).version;
  }
  void copy_state(uint8_t* to, const uint8_t* from) { cuda.copy_rows(to, state_bytes, from, state_bytes, state_bytes, 1); }
  uint8_t* last_key() const { return part_of(regions, spec.cached.back(), false); }
  // The buffer for new K and V that the engine cannot write where they belong; none if no layer has any.
  Regions new_slots(size_t tokens) const {
    if (spec.cached.empty()) return {};
    return layout.regions(shared.engines.address(new_slots_of(spec)), tokens);
  }
  // Copies new K and V from their buffer to the slots from `start` on.
  void put(int64_t start, size_t tokens) { copy_slots(cuda, from_slot(regions, start), new_slots(tokens), tokens); }

  // Binds a context for `tokens` tokens after `filled` slots, whose K and V go to `fresh`.
  void bind(Context& context, size_t tokens, int64_t filled, const Regions& fresh, bool own_rope, uint8_t* query,
            const std::optional<BoundStates>& states) {
    Shapes shapes;
    Addresses addresses;
    bind_stage(shared, spec, tokens, own_rope, query, shapes, addresses);
    addresses[names::kTotalSlots] = shared.engines.address(names::kTotalSlots);
    shapes[names::kTotalSlots] = {1};
    const ModelSpec& model = shared.manifest.model;
    for (int64_t layer : spec.cached)
      for (bool values : {false, true}) {
        const std::string number = std::to_string(layer), in = (values ? names::kPastValue : names::kPastKey) + number;
        shapes[in] = {1, filled, model.kv_heads, model.heads_of(layer)};
        addresses[in] = part_of(regions, layer, values);
        addresses[(values ? names::kPresentValue : names::kPresentKey) + number] = part_of(fresh, layer, values);
      }
    if (states) {
      addresses[names::kState] = states->given;
      addresses[names::kStateOut] = states->made;
      addresses[names::kStateEnds] = states->ends;
      shapes[names::kState] = {static_cast<int64_t>(spec.stateful.size()), 1, model.state_numbers};
      shapes[names::kStateEnds] = {static_cast<int64_t>(states->count)};
    }
    context.bind(shapes, addresses);
  }

  const KVLayout layout;
  Buffer kv;
  const Regions regions;
  Queries queries;
  std::optional<Buffer> state;
  size_t state_bytes = 0;
  int64_t version = 0;
  std::map<int64_t, std::map<Ids, std::unique_ptr<BoundStage>>> readers;
};

class TensorrtStageCache : public StageCache, public DecodingCache {
 public:
  TensorrtStageCache(TensorrtCacheContext& context, const StageSpec& spec, const std::string& graph, int64_t asked)
      : StageCache(asked, spec, context.manifest.model,
                   spec.stateful.empty() ? nullptr : std::make_unique<DeviceStates>(context, spec)),
        context_(context), spec_(spec), graph_(graph), cuda_(context.cuda), layout_(context.layout(spec)),
        history_(static_cast<DeviceStates*>(states_.get())) {}

  ~TensorrtStageCache() override { give_back(context_, {MemoryKind::slots, spec_.first}, std::move(memory_)); }

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
    if (history_) memory_->load(*history_, length);
  }

  void end_token() override {
    memory_->put(length, 1);
    if (history_) memory_->save(*history_, length);
  }

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
      many(tokens, rope, sight, start, end, query ? memory_->queries.address(start) : nullptr, out->row(start));
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

  // Has memory for so many slots. If there is not enough, the cache stays as it is.
  void room(int64_t slots) {
    if (memory_ && memory_->capacity >= slots) return;
    int64_t count = std::min(capacity, (slots + kGrowth - 1) / kGrowth * kGrowth);
    auto longer = borrow<DeviceSlots>(context_, {MemoryKind::slots, spec_.first}, count,
                                      [&] { return std::make_unique<DeviceSlots>(context_, spec_, graph_, count); });
    if (memory_ && length > 0) longer->take_over(*memory_, length);
    memory_ = std::move(longer);
  }

  // Copies slots between the cache and a packed buffer, run by run.
  void move(const Ids& slots, uint8_t* packed, bool out) {
    const Regions all = layout_.regions(packed, slots.size(), true);
    for (const SlotRun& run : slot_runs(slots)) {
      Regions in_cache = from_slot(memory_->regions, static_cast<int64_t>(run.first));
      Regions in_packed = from_slot(all, static_cast<int64_t>(run.start));
      copy_slots(cuda_, out ? in_packed : in_cache, out ? in_cache : in_packed, run.count);
    }
  }

  // Queues the run of the tokens from `start` to before `end`; their hidden states go to `out`.
  void many(const TokenStates& tokens, const RopeRows& rope, const Sight& sight, size_t start, size_t end, uint8_t* queries,
            uint8_t* out) {
    DeviceSlots& m = *memory_;
    LoadedEngines& engines = context_.engines;
    const size_t count = end - start;
    Context& used = engines.context(graph_, count == 1 ? kDecode : kPrefill);
    int64_t filled = length + static_cast<int64_t>(start);
    bool in_place = layout_.written_in_place();
    std::optional<BoundStates> states;
    Ids ends;
    if (history_) {
      ends = history_->ends(filled, static_cast<int64_t>(count), end < tokens.count());
      uint8_t* made = history_->room(ends.size());
      states = {history_->before(filled).buffer.address(), made, engines.address(names::kStateEnds), ends.size()};
      cuda_.copy_in(states->ends, ends.data(), ends.size() * sizeof(int64_t));
    }
    m.bind(used, count, filled, in_place ? from_slot(m.regions, filled) : m.new_slots(count), !rope.own.empty(), queries,
           states);
    auto total = static_cast<int32_t>(filled + static_cast<int64_t>(count));
    copy_tokens(context_, spec_, tokens, rope, start, count);
    cuda_.copy_in(engines.address(names::kTotalSlots), &total, sizeof total);
    for (auto [name, of_each] : {std::pair(names::kFirstSlot, &sight.first), {names::kSeenSlots, &sight.seen}})
      if (!of_each->empty()) cuda_.copy_in(engines.address(name), of_each->data() + start, count * sizeof(int64_t));
    used.enqueue();
    if (!in_place) m.put(filled, count);
    if (history_) history_->put(filled, ends, length);
    size_t bytes = count * static_cast<size_t>(context_.manifest.model.hidden) * sizeof(float);
    cuda_.copy_rows(out, bytes, engines.address(names::kHiddenOut), bytes, bytes, 1);
  }

  TensorrtCacheContext& context_;
  const StageSpec spec_;
  const std::string graph_;
  Cuda& cuda_;
  const KVLayout layout_;
  DeviceStates* const history_;  // null: its layers keep no state
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
    for (const auto& [name, value] : slots) {
      addresses[name] = shared.engines.address(name);
      shapes[name] = {1};
    }
    context.bind(shapes, addresses);
  }

  Ids layers;
  Addresses past;
};

// The cache of a stage whose layers keep nothing. The tokens of a run are in the sources' last slots already.
class TensorrtReadingCache : public StageCache, public DecodingCache {
 public:
  TensorrtReadingCache(TensorrtCacheContext& context, const StageSpec& spec, const std::string& graph,
                       const Sources& sources)
      : StageCache(0), context_(context), spec_(spec), graph_(graph), cuda_(context.cuda) {
    for (const auto& [layer, cache] : sources) {
      sources_[layer] = static_cast<TensorrtStageCache*>(cache);
      slots_.push_back(names::kSourceSlot + std::to_string(layer));
      // none may slide: then it is not used
      if (!placed_ || context.manifest.model.slides(layer)) placed_ = sources_[layer];
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
    ReadingStage& bound = reader();
    Ids filled;
    for (const auto& [layer, cache] : sources_) {
      filled.push_back(cache->length);
      auto last = static_cast<int32_t>(cache->length - 1);
      cuda_.copy_in(engines.address(names::kSourceSlot + std::to_string(layer)), &last, sizeof last);
    }
    bound.bind(used, count, filled);
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
    Ids key;
    for (const auto& [layer, cache] : sources_) key.push_back(cache->memory().id);
    auto& readers = sources_.rbegin()->second->memory().readers[spec_.first];
    auto found = readers.find(key);
    if (found == readers.end()) {
      if (readers.size() == kRecordings) {
        cuda_.wait();  // queued work may still read it
        readers.clear();
      }
      found = readers.emplace(key, std::make_unique<ReadingStage>(context_, spec_, graph_, slots_, sources_)).first;
    }
    reader_ = static_cast<ReadingStage*>(found->second.get());
    return *reader_;
  }

  TensorrtCacheContext& context_;
  const StageSpec spec_;
  const std::string graph_;
  Cuda& cuda_;
  TensorrtSources sources_;
  std::vector<std::string> slots_;
  ReadingStage* reader_ = nullptr;  // that is bound to the sources' memory as it was last
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

void give_back(TensorrtCacheContext& shared, const MemoryKey& key, std::unique_ptr<StageMemory> memory) noexcept {
  if (!memory) return;
  try {
    Cuda::Use held(shared.cuda);
    shared.unused[key].push_back(std::move(memory));
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
  for (auto [name, given] :
       {std::pair(names::kFirstSlot, model.sliding.has_value()), {names::kSeenSlots, model.sees_both_ways()}})
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
