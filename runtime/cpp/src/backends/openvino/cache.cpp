#include "backends/openvino/cache.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/contract.hpp"
#include "base/halves.hpp"

namespace vtxcore {
namespace {

using openvino::Type;

// An output of states: its part of the room, or, where that is in several places, memory of its own.
struct StateOutput {
  std::string name;
  Ids shape;
  float* to;
  Floats apart;
};

size_t blocks_of(int64_t slots) { return static_cast<size_t>((slots + names::kPagedBlock - 1) / names::kPagedBlock); }

size_t planes_of(const StageSpec& spec) { return 2 * spec.cached.size(); }

// A slot's row of one head as numbers.
void read_row(const uint8_t* from, Type type, size_t count, float* to) {
  if (type != Type::u8)
    return widen(from, type == Type::f32 ? "float32" : type == Type::f16 ? "float16" : "bfloat16", count, to);
  float scale, zero;
  std::memcpy(&scale, from, 4);
  std::memcpy(&zero, from + 4, 4);
  for (size_t i = 0; i < count; ++i) to[i] = (static_cast<float>(from[names::kRowScaleBytes + i]) - zero) * scale;
}

}  // namespace

size_t OpenvinoCacheContext::element_bytes() const { return kv == Type::f32 ? 4 : kv == Type::u8 ? 1 : 2; }

size_t OpenvinoCacheContext::slot_width(int64_t layer) const {
  return static_cast<size_t>(manifest.model.heads_of(layer) + (kv == Type::u8 ? names::kRowScaleBytes : 0));
}

int64_t OpenvinoCacheContext::slot_bytes() const {
  return manifest.kv_slot_bytes(static_cast<int64_t>(element_bytes()), kv == Type::u8 ? names::kRowScaleBytes : 0);
}

// Where each plane begins in the memory, and where the last one ends.
std::vector<size_t> OpenvinoStageCache::plane_bytes(const OpenvinoCacheContext& context, const StageSpec& spec,
                                                    int64_t slots) {
  std::vector<size_t> out{0};
  for (int64_t layer : spec.cached)
    for (int part = 0; part < 2; ++part) {
      int64_t width = static_cast<int64_t>(context.slot_width(layer) * context.element_bytes()), total = 0;
      int64_t bytes =
          product({static_cast<int64_t>(blocks_of(slots)), context.manifest.model.kv_heads, names::kPagedBlock, width});
      if (__builtin_add_overflow(static_cast<int64_t>(out.back()), bytes, &total)) cache_failure(static_cast<size_t>(slots));
      out.push_back(static_cast<size_t>(total));
    }
  return out;
}

OpenvinoStageCache::OpenvinoStageCache(const OpenvinoCacheContext& context, const OpenvinoStage& stage,
                                       const StageSpec& spec, int64_t slots)
    : StageCache(slots, spec, context.manifest.model), context_(context), stage_(stage), spec_(spec),
      heads_(static_cast<size_t>(context.manifest.model.kv_heads)), blocks_(blocks_of(slots)),
      begins_(plane_bytes(context, spec, slots)), memory_(begins_.back(), static_cast<size_t>(slots)),
      block_numbers_(blocks_), token_{Rows(1, static_cast<size_t>(context.manifest.model.hidden))},
      token_out_(token_.hidden), token_rope_{Ids(1), {}} {
  request_ = running(stage.name, [&] { return stage.compiled->request(); });
  if (stage.for_many) for_many_ = running(stage.name, [&] { return stage.for_many->request(); });
  ran_ = request_.get();
  for (size_t i = 0; i < blocks_; ++i) block_numbers_[i] = static_cast<int32_t>(i);
  const Manifest& m = context.manifest;
  for (const TokenInput& each : m.token_inputs) token_.inputs[each.name] = Rows(1, static_cast<size_t>(each.width));
  running(stage.name, [&] {
    for (size_t index = 0; index < spec.cached.size(); ++index) {
      const std::string layer = std::to_string(spec.cached[index]);
      const Ids shape{static_cast<int64_t>(blocks_), m.model.kv_heads, names::kPagedBlock,
                      static_cast<int64_t>(context.slot_width(spec.cached[index]))};
      set(names::kPastKey + layer, context.kv, shape, row(2 * index, 0, 0));
      set(names::kPastValue + layer, context.kv, shape, row(2 * index + 1, 0, 0));
    }
    set(names::kPagedBegins, Type::i32, {2}, run_begins_);
    set_slots(slots_);
    if (slides()) set(names::kPagedWindow, Type::i32, {}, &window_), set_slots(slots_of_sliding_);
  });
}

void OpenvinoStageCache::set(const std::string& name, Type type, const Ids& shape, const void* data) {
  request_->set(name, type, shape, const_cast<void*>(data));
  if (for_many_) for_many_->set(name, type, shape, const_cast<void*>(data));
}

void OpenvinoStageCache::run_request(int64_t before, size_t count) {
  ran_ = for_many_ && count > static_cast<size_t>(names::kFewTokens) ? for_many_.get() : request_.get();
  if (!states_) return ran_->run();
  HostStates& states = host_states();
  const Ids ends = states.ends(before, static_cast<int64_t>(count));
  const auto count_of_ends = static_cast<int64_t>(ends.size());
  set(names::kState, Type::f32, {states.layers(), 1, states.numbers()}, states.at(before).data());
  set(names::kStateEnds, Type::i64, {static_cast<int64_t>(ends.size())}, ends.data());
  float* room = states.room(ends.size());
  std::vector<StateOutput> outputs;
  if (stage_.state_parts.empty())
    outputs.push_back({names::kStateOut, {states.layers(), 1, count_of_ends, states.numbers()}, room, {}});
  int64_t first = 0;  // of a part, among the numbers of all layers
  for (int64_t width : stage_.state_parts) {
    const std::string name = cat(names::kStateOut, ".", outputs.size());
    outputs.push_back({name, {1, count_of_ends, width}, room + first, {}});
    // Of several ends the room has all numbers of the first one, then those of the next.
    if (count_of_ends > 1) outputs.back().apart = Floats(ends.size() * static_cast<size_t>(width));
    first += width;
  }
  for (StateOutput& output : outputs)
    set(output.name, Type::f32, output.shape, output.apart.empty() ? output.to : output.apart.data());
  ran_->run();
  first = 0;
  for (const StateOutput& output : outputs) {
    const Ids made = ran_->get(output.name).shape;
    if (made != output.shape)
      fail(Kind::bundle, stage_.name, " gives ", made.size() > 2 ? made[made.size() - 2] : 0, " outputs for ", ends.size(),
           " tokens; export the bundle again");
    if (output.apart.empty()) continue;
    const int64_t width = output.shape.back(), layer = first / states.numbers(), number = first % states.numbers();
    for (int64_t end = 0; end < count_of_ends; ++end)
      std::copy_n(output.apart.data() + end * width, width,
                  room + (layer * count_of_ends + end) * states.numbers() + number);
    first += width;
  }
  states.put(before, ends);
}

uint8_t* OpenvinoStageCache::row(size_t plane, int64_t slot, size_t head) {
  auto at = static_cast<size_t>(slot), block = static_cast<size_t>(names::kPagedBlock);
  size_t index = ((at / block) * heads_ + head) * block + at % block;
  return memory_.data() + begins_[plane] + index * head_bytes(plane);
}

void OpenvinoStageCache::bind(size_t first, size_t count, const TokenStates& tokens, const RopeRows& rope,
                              const std::vector<int32_t>& asked, float* out) {
  auto rows = static_cast<int64_t>(count), found = static_cast<int64_t>(asked.size());
  auto set_rows = [&](const std::string& name, const Rows& all) {
    set(name, Type::f32, {rows, static_cast<int64_t>(all.width)}, all.row(first));
  };
  token_bound_ = false;  // until all are set
  set_rows(names::kHidden, tokens.hidden);
  for (const std::string& name : spec_.inputs) set_rows(names::kTokenInput + name, tokens.inputs.at(name));
  const bool own = !rope.own.empty();  // tables of these tokens, whose part here begins at row 0
  set(names::kPositions, Type::i64, {1, rows}, rope.rows.data() + (own ? 0 : first));
  for (const auto& [name, table] : own ? rope.own : context_.rope) {
    const Ids whole = table_shape(context_.manifest, name);
    set(name, Type::f32, {own ? rows : whole[0], whole[1]},
        table.data() + (own ? first * static_cast<size_t>(whole[1]) : 0));
  }
  if (context_.manifest.model.sees_both_ways()) {
    images_.assign(count, 0);
    if (auto groups = tokens.inputs.find(names::kGroup); groups != tokens.inputs.end())  // not of a single token
      for (size_t i = 0; i < count; ++i) images_[i] = groups->second.data[first + i] >= 0;
    set(names::kPagedImages, Type::i32, {rows}, images_.data());
  }
  set(names::kPagedRows, Type::i32, {found}, asked.data());
  set(names::kHiddenOut, Type::f32, {found, static_cast<int64_t>(tokens.hidden.width)}, out);
}

void OpenvinoStageCache::set_slots(RunSlots& slots) {
  set(slots.prefix + names::kPagedPast, Type::i32, {1}, slots.past);
  set(slots.prefix + names::kPagedFilled, Type::i32, {}, &slots.filled);
  set(slots.prefix + names::kPagedBlockBegins, Type::i32, {2}, slots.block_begins);
}

// The attention's buffers fit the blocks in use: more would overflow them.
void OpenvinoStageCache::place_slots(RunSlots& slots, int64_t before, int64_t count, int64_t first_block) {
  slots.past[0] = static_cast<int32_t>(before);
  slots.filled = static_cast<int32_t>(before + count);
  auto blocks = static_cast<int32_t>(blocks_of(slots.filled));
  if (blocks == slots.block_begins[1] && first_block == slots.first) return;
  slots.block_begins[1] = 0;  // until it is set
  set(slots.prefix + names::kPagedBlocks, Type::i32, {blocks}, block_numbers_.data() + first_block);
  slots.block_begins[1] = blocks;
  slots.first = first_block;
}

void OpenvinoStageCache::copy_sliding(int64_t first, int64_t end, int64_t distance) {
  for (size_t plane = 0; plane < planes_of(spec_); ++plane) {
    if (!context_.manifest.model.slides(spec_.cached[plane / 2])) continue;
    for (int64_t slot = first; slot < end; ++slot)
      for (size_t head = 0; head < heads_; ++head)
        std::memcpy(row(plane, slot + distance, head), row(plane, slot, head), head_bytes(plane));
  }
}

void OpenvinoStageCache::run_at(const Run& run, int64_t before, size_t count) {
  const auto tokens = static_cast<int64_t>(count);
  const int64_t filled = before + tokens, block = run.from > 0 ? static_cast<int64_t>(blocks_of(filled)) : 0;
  const int64_t distance = block * names::kPagedBlock - run.from;
  run_begins_[1] = static_cast<int32_t>(count);
  place_slots(slots_, before, tokens, 0);
  if (slides()) {
    window_ = run.window;
    place_slots(slots_of_sliding_, before - run.from, tokens, block);
  }
  if (run.from > 0) copy_sliding(run.from, before, distance);
  run_request(before, count);
  if (run.from > 0) copy_sliding(before + distance, filled + distance, -distance);
}

std::vector<OpenvinoStageCache::Run> OpenvinoStageCache::windows(const TokenStates& tokens,
                                                                 const Positions& positions) const {
  const size_t count = tokens.count();
  if (!slides()) return {{count, 0}};
  const Ids firsts = first_slots(positions, length + static_cast<int64_t>(count));
  Ids seen;
  for (size_t i = 0; i < count; ++i) seen.push_back(firsts[i] > 0 ? length + static_cast<int64_t>(i) - firsts[i] + 1 : 0);
  auto end_of_equal = [count](const Ids& values, size_t first) {
    size_t end = first;
    while (end < count && values[end] == values[first]) ++end;
    return end;
  };
  std::vector<Run> out;
  for (size_t first = 0; first < count; first = out.back().end) {
    size_t end = end_of_equal(seen, first);
    const int64_t last = length + static_cast<int64_t>(end) - 1;
    if (seen[first] == 0 && end < count && last < seen[end]) end = end_of_equal(seen, end);  // these see fewer than the next
    const size_t end_from = firsts[first] > 0 ? end_of_equal(firsts, first) : 0;
    const int64_t filled = length + static_cast<int64_t>(end_from);
    if (end_from > end && blocks_of(filled) + blocks_of(filled - firsts[first]) <= blocks_)
      out.push_back({end_from, 0, firsts[first]});
    else
      out.push_back({end, static_cast<int32_t>(seen[end - 1])});
  }
  if (out.empty()) out.push_back({count});
  for (const Run& run : out)
    if (begin_of_group(tokens, run.end) != run.end)
      fail(Kind::request, "OpenVINO runs an image at once, and its tokens see different numbers of slots in layers that ",
           "slide, since a reduction left some out within the window; use --reduce none or --device cpu");
  return out;
}

// Many hidden states in runs of nearly the same size, which gives the same ones.
std::vector<OpenvinoStageCache::Run> OpenvinoStageCache::runs(const TokenStates& tokens, const Positions& positions) const {
  std::vector<Run> out;
  size_t first = 0;
  for (const Run& run : windows(tokens, positions)) {
    for (size_t end : run_ends(tokens, first, run.end, context_.most_rows)) out.push_back({end, run.window, run.from});
    first = run.end;
  }
  return out;
}

void OpenvinoStageCache::run_parts(const TokenStates& tokens, const RopeRows& rope, const Ids& outputs,
                                   const std::vector<Run>& runs, Rows& out, Rows* queries) {
  Rows unread(1, out.width);  // where nothing of a part is asked for: engines differ in empty products
  size_t first = 0, found = 0;
  for (const Run& run : runs) {
    size_t count = run.end - first, next = found;
    std::vector<int32_t> mine;
    for (; next < outputs.size() && static_cast<size_t>(outputs[next]) < run.end; ++next)
      mine.push_back(static_cast<int32_t>(outputs[next] - static_cast<int64_t>(first)));
    if (mine.empty()) mine.push_back(0);
    bind(first, count, tokens, rope, mine, next == found ? unread.row(0) : out.row(found));
    run_at(run, length + static_cast<int64_t>(first), count);
    if (queries) take_queries(first, count, *queries);
    first = run.end, found = next;
  }
}

void OpenvinoStageCache::take_queries(size_t first, size_t count, Rows& queries) {
  openvino::TensorView view = ran_->get(names::kQuery);
  check_width(stage_.name, view.shape, static_cast<int64_t>(queries.width));
  check_rows(stage_.name, static_cast<size_t>(view.shape.front()), count);
  std::memcpy(queries.row(first), view.data, sizeof(float) * count * queries.width);
}

Rows OpenvinoStageCache::run(const TokenStates& tokens, const Positions& positions, bool query, const Ids* outputs) {
  size_t count = tokens.count();
  Ids wanted = outputs ? *outputs : count_up(0, count);
  RopeRows rope = rope_rows(context_.rope, context_.manifest, positions);
  Rows out(wanted.size(), tokens.hidden.width);
  const std::vector<Run> parts = runs(tokens, positions);
  if (query) {
    const ModelSpec& model = context_.manifest.model;
    query_ = Rows(count, static_cast<size_t>(model.heads * model.heads_of(spec_.last)));
  }
  running(stage_.name, [&] {
    if (count == 1 && wanted.size() == 1 && rope.own.empty() && !query) {
      token_.hidden.data = tokens.hidden.data;  // equally long: the memory that is bound stays
      for (const std::string& name : spec_.inputs) token_.inputs[name].data = tokens.inputs.at(name).data;
      token_rope_.rows[0] = rope.rows[0];
      if (!token_bound_) bind(0, 1, token_, token_rope_, token_asked_, token_out_.row(0));
      token_bound_ = true;
      run_at(parts.front(), length, 1);
      out.data = token_out_.data;
    } else {
      run_parts(tokens, rope, wanted, parts, out, query ? &query_ : nullptr);
    }
  });
  return out;
}

void OpenvinoStageCache::check_both_ways(TokenStates tokens) {
  std::vector<Floats> found;
  for (size_t i = 0; i < tokens.hidden.data.size(); ++i)  // any numbers that differ
    tokens.hidden.data[i] = std::sin(static_cast<float>(i + 1));
  for (float group : {-1.0f, 0.0f}) {
    keep(0);
    Rows& groups = tokens.inputs[names::kGroup] = Rows(tokens.count(), 1);
    std::fill(groups.data.begin(), groups.data.end(), group);
    const Rows out = append(tokens, text_positions(0, tokens.count()));
    found.emplace_back(out.row(0), out.row(0) + out.width);
  }
  if (found[0] == found[1])
    fail(Kind::device, "this release of OpenVINO cannot let the tokens of an image see each other both ways; ",
         "pip install -U openvino, or use --device cpu");
}

Scores OpenvinoStageCache::attention(bool last_only) {
  size_t count = query_.count(), first = last_only ? count - 1 : 0;
  const auto dim = static_cast<size_t>(context_.manifest.model.heads_of(spec_.cached.back()));
  Rows found = keys();
  Floats keys(found.data.size());  // [kv_heads, length, head_dim]
  for (size_t head = 0; head < heads_; ++head)
    for (size_t slot = 0; slot < found.count(); ++slot)
      std::copy_n(found.row(slot) + head * dim, dim,
                  keys.begin() + static_cast<std::ptrdiff_t>((head * found.count() + slot) * dim));
  std::vector<uint16_t> halves;
  if (context_.half_keys) {
    halves.reserve(keys.size());
    for (float value : keys) halves.push_back(float_to_half(value));
  }
  const void* data = context_.half_keys ? static_cast<const void*>(halves.data()) : keys.data();
  auto total = static_cast<int32_t>(length);
  Ids rows{static_cast<int64_t>(count - first), static_cast<int64_t>(query_.width)};
  Ids all{1, static_cast<int64_t>(heads_), length, static_cast<int64_t>(dim)};
  GraphOutputs found_scores = context_.score->run({{names::kQuery, "float32", rows, query_.row(first)},
                                                   {names::kKey, context_.half_keys ? "float16" : "float32", all, data},
                                                   {names::kTotalSlots, "int32", {1}, &total}});
  const std::string& file = *context_.manifest.dialects.at("plain").score;
  for (const auto& [name, output] : found_scores) check_rows(file, output.floats.size(), static_cast<size_t>(length));
  return {found_scores.at(names::kAttentionSum).floats, found_scores.at(names::kAttentionMax).floats};
}

Rows OpenvinoStageCache::keys() { return numbers(spec_.cached.back(), false); }

Rows OpenvinoStageCache::numbers(int64_t layer, bool values) {
  auto dim = static_cast<size_t>(context_.manifest.model.heads_of(layer));
  Rows out(static_cast<size_t>(length), heads_ * dim);
  auto index = static_cast<size_t>(std::find(spec_.cached.begin(), spec_.cached.end(), layer) - spec_.cached.begin());
  size_t plane = 2 * index + (values ? 1 : 0);
  for (int64_t slot = 0; slot < length; ++slot)
    for (size_t head = 0; head < heads_; ++head)
      read_row(row(plane, slot, head), context_.kv, dim, out.row(static_cast<size_t>(slot)) + head * dim);
  auto scales = context_.key_scales.find(layer);
  if (values || scales == context_.key_scales.end()) return out;
  for (size_t i = 0; i < out.data.size(); ++i) out.data[i] *= scales->second[i % scales->second.size()];
  return out;
}

SavedSlots OpenvinoStageCache::read_kv(const Ids& slots) {
  size_t bytes = 0;
  for (size_t plane = 0; plane < planes_of(spec_); ++plane) bytes += slots.size() * heads_ * head_bytes(plane);
  SavedSlots out(bytes);
  uint8_t* to = out.data();
  each_row(slots, [&](const uint8_t* from, size_t size) { std::memcpy(std::exchange(to, to + size), from, size); });
  return out;
}

std::optional<LayerForm> OpenvinoStageCache::layer_form(int64_t slots, size_t index) const {
  const char* dtype = context_.kv == Type::f32   ? "F32"
                      : context_.kv == Type::f16 ? "F16"
                      : context_.kv == Type::u8  ? "U8"
                                                 : "U16";  // bfloat16 by its bits
  const auto width = static_cast<int64_t>(context_.slot_width(spec_.cached.at(index)));
  return LayerForm{dtype, {slots, 2, context_.manifest.model.kv_heads, width}};
}

void OpenvinoStageCache::put_kv(const Ids& slots, const SavedSlots& kv, int64_t) {
  const uint8_t* from = kv.data();
  each_row(slots, [&](uint8_t* to, size_t size) { std::memcpy(to, std::exchange(from, from + size), size); });
}

}  // namespace vtxcore
