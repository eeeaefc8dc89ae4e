#include "backends/openvino/cache.hpp"

#include <cstring>

#include "backends/contract.hpp"
#include "base/halves.hpp"

namespace vtxcore {
namespace {

using openvino::Type;

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

size_t OpenvinoCacheContext::slot_width() const {
  return static_cast<size_t>(manifest.model.head_dim + (kv == Type::u8 ? names::kRowScaleBytes : 0));
}

int64_t OpenvinoCacheContext::slot_bytes() const {
  return 2 * manifest.model.kv_heads * static_cast<int64_t>(slot_width() * element_bytes());
}

OpenvinoStageCache::OpenvinoStageCache(const OpenvinoCacheContext& context, const OpenvinoStage& stage,
                                       const StageSpec& spec, int64_t slots)
    : StageCache(slots, spec, context.manifest.model), context_(context), stage_(stage), spec_(spec),
      heads_(static_cast<size_t>(context.manifest.model.kv_heads)), blocks_(blocks_of(slots)),
      memory_(static_cast<size_t>(product({static_cast<int64_t>(planes_of(spec) * blocks_), context.manifest.model.kv_heads,
                                           names::kPagedBlock, static_cast<int64_t>(head_bytes())})),
              static_cast<size_t>(slots)),
      block_numbers_(blocks_), token_{Rows(1, static_cast<size_t>(context.manifest.model.hidden))},
      token_out_(token_.hidden), token_rope_{Ids(1), {}} {
  request_ = running(stage.name, [&] { return stage.compiled->request(); });
  if (stage.for_many) for_many_ = running(stage.name, [&] { return stage.for_many->request(); });
  ran_ = request_.get();
  for (size_t i = 0; i < blocks_; ++i) block_numbers_[i] = static_cast<int32_t>(i);
  const Manifest& m = context.manifest;
  for (const TokenInput& each : m.token_inputs) token_.inputs[each.name] = Rows(1, static_cast<size_t>(each.width));
  Ids shape{static_cast<int64_t>(blocks_), m.model.kv_heads, names::kPagedBlock, static_cast<int64_t>(context.slot_width())};
  running(stage.name, [&] {
    for (size_t index = 0; index < spec.cached.size(); ++index) {
      const std::string layer = std::to_string(spec.cached[index]);
      set(names::kPastKey + layer, context.kv, shape, row(2 * index, 0, 0));
      set(names::kPastValue + layer, context.kv, shape, row(2 * index + 1, 0, 0));
    }
    set(names::kPagedPast, Type::i32, {1}, past_);
    set(names::kPagedBegins, Type::i32, {2}, begins_);
    set(names::kPagedFilled, Type::i32, {}, &filled_);
    set(names::kPagedBlockBegins, Type::i32, {2}, block_begins_);
  });
}

void OpenvinoStageCache::set(const std::string& name, Type type, const Ids& shape, const void* data) {
  request_->set(name, type, shape, const_cast<void*>(data));
  if (for_many_) for_many_->set(name, type, shape, const_cast<void*>(data));
}

void OpenvinoStageCache::run_request(int64_t before, size_t count) {
  ran_ = for_many_ && count > static_cast<size_t>(names::kFewTokens) ? for_many_.get() : request_.get();
  if (!states_) return ran_->run();
  const Ids ends = states_->ends(before, static_cast<int64_t>(count));
  const Ids shape{states_->layers(), 1, static_cast<int64_t>(ends.size()), states_->numbers()};
  set(names::kState, Type::f32, {states_->layers(), 1, states_->numbers()}, states_->at(before).data());
  set(names::kStateEnds, Type::i64, {static_cast<int64_t>(ends.size())}, ends.data());
  set(names::kStateOut, Type::f32, shape, states_->room(ends.size()));
  ran_->run();
  openvino::TensorView made = ran_->get(names::kStateOut);
  if (made.shape != shape)
    fail(Kind::bundle, stage_.name, " gives ", made.shape.size() > 2 ? made.shape[2] : 0, " outputs for ", ends.size(),
         " tokens; export the bundle again");
  states_->put(before, ends);
}

uint8_t* OpenvinoStageCache::row(size_t plane, int64_t slot, size_t head) {
  auto at = static_cast<size_t>(slot), block = static_cast<size_t>(names::kPagedBlock);
  size_t index = ((plane * blocks_ + at / block) * heads_ + head) * block + at % block;
  return memory_.data() + index * head_bytes();
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
  const int64_t half = context_.manifest.model.head_dim / 2;
  set(names::kPositions, Type::i64, {1, rows}, rope.rows.data() + (own ? 0 : first));
  for (const auto& [name, table] : own ? rope.own : context_.rope)
    set(name, Type::f32, {own ? rows : context_.manifest.max_context, half},
        table.data() + (own ? first * static_cast<size_t>(half) : 0));
  set(names::kPagedRows, Type::i32, {found}, asked.data());
  set(names::kHiddenOut, Type::f32, {found, static_cast<int64_t>(tokens.hidden.width)}, out);
}

// Tells the attention that `count` tokens go behind the `before` filled slots. Its buffers fit the blocks in use: more
// would overflow them.
void OpenvinoStageCache::place(int64_t before, int64_t count) {
  past_[0] = static_cast<int32_t>(before);
  begins_[1] = static_cast<int32_t>(count);
  filled_ = static_cast<int32_t>(before + count);
  auto blocks = static_cast<int32_t>(blocks_of(filled_));
  if (blocks != block_begins_[1]) {
    block_begins_[1] = 0;  // until it is set
    set(names::kPagedBlocks, Type::i32, {blocks}, block_numbers_.data());
    block_begins_[1] = blocks;
  }
}

void OpenvinoStageCache::run_parts(const TokenStates& tokens, const RopeRows& rope, const Ids& outputs, size_t runs,
                                   Rows& out) {
  Rows unread(1, out.width);  // where nothing of a part is asked for: engines differ in empty products
  size_t first = 0, found = 0;
  for (size_t left = runs; left > 0; --left) {
    size_t count = (tokens.count() - first + left - 1) / left, end = first + count, next = found;
    std::vector<int32_t> mine;
    for (; next < outputs.size() && static_cast<size_t>(outputs[next]) < end; ++next)
      mine.push_back(static_cast<int32_t>(outputs[next] - static_cast<int64_t>(first)));
    if (mine.empty()) mine.push_back(0);
    bind(first, count, tokens, rope, mine, next == found ? unread.row(0) : out.row(found));
    const int64_t before = length + static_cast<int64_t>(first);
    place(before, static_cast<int64_t>(count));
    run_request(before, count);
    first = end, found = next;
  }
}

Rows OpenvinoStageCache::run(const TokenStates& tokens, const Positions& positions, bool query, const Ids* outputs) {
  size_t count = tokens.count(), most = context_.most_rows;
  Ids wanted = outputs ? *outputs : count_up(0, count);
  RopeRows rope = rope_rows(context_.rope, context_.manifest, positions);
  Rows out(wanted.size(), tokens.hidden.width);
  running(stage_.name, [&] {
    if (count == 1 && wanted.size() == 1 && rope.own.empty()) {
      token_.hidden.data = tokens.hidden.data;  // equally long: the memory that is bound stays
      for (const std::string& name : spec_.inputs) token_.inputs[name].data = tokens.inputs.at(name).data;
      token_rope_.rows[0] = rope.rows[0];
      if (!token_bound_) bind(0, 1, token_, token_rope_, token_asked_, token_out_.row(0));
      token_bound_ = true;
      place(length, 1);
      run_request(length, 1);
      out.data = token_out_.data;
    } else {
      run_parts(tokens, rope, wanted, query || most == 0 || count == 0 ? 1 : (count + most - 1) / most, out);
    }
    if (query) {
      openvino::TensorView view = ran_->get(names::kQuery);
      const ModelSpec& model = context_.manifest.model;
      query_ = Rows(count, static_cast<size_t>(model.heads * model.head_dim));
      check_width(stage_.name, view.shape, static_cast<int64_t>(query_.width));
      check_rows(stage_.name, static_cast<size_t>(view.shape.front()), count);
      std::memcpy(query_.data.data(), view.data, 4 * query_.data.size());
    }
  });
  return out;
}

Scores OpenvinoStageCache::attention(bool last_only) {
  size_t count = query_.count(), first = last_only ? count - 1 : 0, dim = context_.slot_width();
  if (context_.kv == Type::u8) dim -= static_cast<size_t>(names::kRowScaleBytes);
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

Rows OpenvinoStageCache::keys() {
  auto dim = static_cast<size_t>(context_.manifest.model.head_dim);
  Rows out(static_cast<size_t>(length), heads_ * dim);
  size_t plane = planes_of(spec_) - 2;  // the last layer's keys
  for (int64_t slot = 0; slot < length; ++slot)
    for (size_t head = 0; head < heads_; ++head)
      read_row(row(plane, slot, head), context_.kv, dim, out.row(static_cast<size_t>(slot)) + head * dim);
  return out;
}

SavedSlots OpenvinoStageCache::read(const Ids& slots) {
  SavedSlots out(planes_of(spec_) * slots.size() * heads_ * head_bytes());
  uint8_t* to = out.data();
  each_row(slots, [&](const uint8_t* from) { std::memcpy(std::exchange(to, to + head_bytes()), from, head_bytes()); });
  return out;
}

std::optional<LayerForm> OpenvinoStageCache::layer_form(int64_t slots) const {
  const char* dtype = context_.kv == Type::f32   ? "F32"
                      : context_.kv == Type::f16 ? "F16"
                      : context_.kv == Type::u8  ? "U8"
                                                 : "U16";  // bfloat16 by its bits
  return LayerForm{dtype, {slots, 2, context_.manifest.model.kv_heads, static_cast<int64_t>(context_.slot_width())}};
}

void OpenvinoStageCache::write(const Ids& slots, const SavedSlots& kv, int64_t filled) {
  const uint8_t* from = kv.data();
  each_row(slots, [&](uint8_t* to) { std::memcpy(to, std::exchange(from, from + head_bytes()), head_bytes()); });
  length = filled;
}

}  // namespace vtxcore
