#include "backends/ort/cache.hpp"

#include <cstring>

#include "base/halves.hpp"

namespace vtxcore {

OrtStageCache::OrtStageCache(const OrtCacheContext& context, const OrtGraph& stage, const StageSpec& spec, int64_t slots)
    : StageCache(slots, spec, context.manifest.model), context_(context), stage_(stage), spec_(spec),
      memory_(2 * spec.cached.size() * static_cast<size_t>(context.manifest.model.kv_heads), static_cast<size_t>(slots),
              static_cast<size_t>(context.manifest.model.head_dim * context.manifest.kv_bytes("ort"))),
      last_tensor_(tensor_over(context.ort, &last_, {1}, "int32")),
      total_tensor_(tensor_over(context.ort, &total_, {1}, "int32")),
      token_{Rows(1, static_cast<size_t>(context.manifest.model.hidden))}, token_out_(token_.hidden),
      token_rope_{Ids(1), {}}, token_seen_(1), token_binding_(stage) {
  const ModelSpec& model = context.manifest.model;
  Ids shape{1, model.kv_heads, slots, model.head_dim};
  for (size_t plane = 0; plane < 2 * spec.cached.size(); ++plane)
    buffers_.push_back(tensor_over(context.ort, memory_.plane(plane * static_cast<size_t>(model.kv_heads)), shape,
                                   context.manifest.kv_dtype));
  for (const TokenInput& each : context.manifest.token_inputs)
    token_.inputs[each.name] = Rows(1, static_cast<size_t>(each.width));
  bind(token_binding_, token_, token_rope_, token_seen_, token_out_);
}

void OrtStageCache::bind(OrtBinding& binding, const TokenStates& tokens, const RopeRows& rope, const Ids& seen,
                         const Rows& out) {
  auto count = static_cast<int64_t>(tokens.count());
  auto over = [&](const Rows& rows) {
    return tensor_over(context_.ort, rows.data.data(), {count, static_cast<int64_t>(rows.width)}, "float32");
  };
  binding.input(names::kHidden, over(tokens.hidden));
  for (const std::string& name : spec_.inputs) binding.input(names::kTokenInput + name, over(tokens.inputs.at(name)));
  binding.input(names::kPositions, tensor_over(context_.ort, rope.rows.data(), {1, count}, "int64"));
  if (context_.manifest.model.two_way)
    binding.input(names::kSeenSlots, tensor_over(context_.ort, seen.data(), {1, count}, "int64"));
  binding.input(names::kLastSlot, last_tensor_);
  binding.input(names::kTotalSlots, total_tensor_);
  for (const char* name : {names::kCos, names::kSin}) {
    auto own = rope.own.find(name);
    if (own == rope.own.end())
      binding.input(name, context_.tensors.at(name));
    else
      binding.input(name,
                    tensor_over(context_.ort, own->second.data(), {count, context_.manifest.model.head_dim / 2}, "float32"));
  }
  binding.output(names::kHiddenOut, over(out));
  bool scaled = context_.manifest.kv_dtype == "int8";
  for (size_t index = 0; index < spec_.cached.size(); ++index) {
    std::string number = std::to_string(spec_.cached[index]);
    const size_t first = 2 * index;
    binding.input(names::kPastKey + number, buffers_[first]);
    binding.output(names::kPresentKey + number, buffers_[first]);
    binding.input(names::kPastValue + number, buffers_[first + 1]);
    binding.output(names::kPresentValue + number, buffers_[first + 1]);
    for (const char* scale : {names::kKeyScaleOf, names::kValueScaleOf})
      if (scaled) binding.input(scale + number, context_.tensors.at(scale + number));
  }
}

void OrtStageCache::run_bound(OrtBinding& binding, int64_t count) {
  if (!states_) return binding.run();
  const Ids ends = states_->ends(length, count);
  const int64_t layers = states_->layers(), numbers = states_->numbers(), made = static_cast<int64_t>(ends.size());
  binding.input(names::kState, tensor_over(context_.ort, states_->at(length).data(), {layers, 1, numbers}, "float32"));
  binding.input(names::kStateEnds, tensor_over(context_.ort, ends.data(), {made}, "int64"));
  float* room = states_->room(ends.size());
  binding.output(names::kStateOut, tensor_over(context_.ort, room, {layers, 1, made, numbers}, "float32"));
  binding.run();
  states_->put(length, ends);
}

Rows OrtStageCache::run(const TokenStates& tokens, const Positions& positions, bool query, const Ids*) {
  auto count = static_cast<int64_t>(tokens.count());
  last_ = static_cast<int32_t>(length + count - 1);
  total_ = static_cast<int32_t>(length + count);
  RopeRows rope = rope_rows(context_.constants, context_.manifest, positions);
  if (count == 1 && !query && rope.own.empty()) {
    token_.hidden.data = tokens.hidden.data;  // equally long: the memory that is bound stays
    for (const std::string& name : spec_.inputs) token_.inputs.at(name).data = tokens.inputs.at(name).data;
    token_rope_.rows[0] = rope.rows[0];
    token_seen_[0] = length + 1;
    run_bound(token_binding_, count);
    return token_out_;
  }
  Rows out(tokens.count(), tokens.hidden.width);
  Ids seen = seen_slots(tokens, length);
  OrtBinding binding(stage_);
  bind(binding, tokens, rope, seen, out);
  if (query) {
    const ModelSpec& model = context_.manifest.model;
    query_ = Rows(tokens.count(), static_cast<size_t>(model.heads * model.head_dim));
    binding.output(names::kQuery,
                   tensor_over(context_.ort, query_.data.data(), {count, model.heads * model.head_dim}, "float32"));
  }
  run_bound(binding, count);
  return out;
}

Scores OrtStageCache::attention(bool last_only) {
  size_t count = query_.count(), first = last_only ? count - 1 : 0;
  const Manifest& m = context_.manifest;
  auto rows = static_cast<int64_t>(count - first), across = static_cast<int64_t>(query_.width);
  size_t plane = 2 * (spec_.cached.size() - 1) * static_cast<size_t>(m.model.kv_heads);  // the last layer's keys
  std::vector<GraphInput> inputs{
      {names::kQuery, "float32", {rows, across}, query_.row(first)},
      {names::kKey, m.kv_dtype, {1, m.model.kv_heads, capacity, m.model.head_dim}, memory_.plane(plane)},
      {names::kTotalSlots, "int32", {1}, &total_}};
  if (std::string scale = names::kKeyScaleOf + std::to_string(spec_.last); m.kv_dtype == "int8")
    inputs.push_back({names::kKeyScale, "float32", table_shape(m, scale), context_.constants.at(scale).data()});
  GraphOutputs found = context_.score->run(inputs);
  auto values = [&](const char* name) {
    Floats& scores = found.at(name).floats;
    auto filled = static_cast<size_t>(length);
    if (scores.size() < filled) check_rows(*m.dialects.at("ort").score, scores.size(), filled);
    scores.resize(filled);
    return std::move(scores);
  };
  return {values(names::kAttentionSum), values(names::kAttentionMax)};
}

Rows OrtStageCache::keys() {
  const ModelSpec& model = context_.manifest.model;
  auto heads = static_cast<size_t>(model.kv_heads), dim = static_cast<size_t>(model.head_dim);
  const std::string& dtype = context_.manifest.kv_dtype;
  const Floats* scale = nullptr;
  if (dtype == "int8") scale = &context_.constants.at(names::kKeyScaleOf + std::to_string(spec_.last));
  Rows out(static_cast<size_t>(length), heads * dim);
  size_t plane = 2 * (spec_.cached.size() - 1) * heads;
  for (size_t head = 0; head < heads; ++head)
    for (size_t slot = 0; slot < out.count(); ++slot) {
      const uint8_t* from =
          memory_.plane(plane + head) + slot * dim * static_cast<size_t>(context_.manifest.kv_bytes("ort"));
      float* to = out.row(slot) + head * dim;
      for (size_t d = 0; scale && d < dim; ++d)
        to[d] = static_cast<float>(static_cast<int8_t>(from[d])) * (*scale)[head * dim + d];
      if (!scale) widen(from, dtype, dim, to);
    }
  return out;
}

std::optional<LayerForm> OrtStageCache::layer_form(int64_t slots) const {
  const Manifest& m = context_.manifest;
  return LayerForm{m.kv_dtype == "float32"   ? "F32"
                   : m.kv_dtype == "float16" ? "F16"
                                             : "I8",
                   {2, 1, m.model.kv_heads, slots, m.model.head_dim}};
}

void OrtStageCache::write(const Ids& slots, const SavedSlots& kv, int64_t filled) {
  memory_.write(slots, kv);
  length = filled;
}

}  // namespace vtxcore
