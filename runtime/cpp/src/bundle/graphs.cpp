#include "bundle/graphs.hpp"

#include <algorithm>

#include "bundle/fields.hpp"

namespace vtxcore {
namespace {

using Size = std::variant<int64_t, std::string>;

TensorSpec hidden(const Manifest& m, const char* name = names::kHidden) {
  return {name, "float32", {"tokens", m.model.hidden}};
}

TensorSpec query(const Manifest& m) { return {names::kQuery, "float32", {"tokens", m.model.heads * m.model.head_dim}}; }

// The size of a layer's heads; of any layer, 0, it is free where they differ.
Size head_size(const ModelSpec& model, int64_t layer) {
  if (layer > 0) return model.heads_of(layer);
  return model.sliding && model.sliding->head_dim != model.head_dim ? Size("head_dim") : Size(model.head_dim);
}

TensorSpec cache(const Manifest& m, const std::string& dialect, const std::string& name, const Size& slots,
                 int64_t layer = 0) {
  const Size heads = head_size(m.model, layer);
  if (for_tensorrt(dialect)) return {name, m.kv_type(dialect), {int64_t{1}, slots, m.model.kv_heads, heads}};
  return {name, m.kv_type(dialect), {int64_t{1}, m.model.kv_heads, slots, heads}};
}

TensorSpec scale(const Manifest& m, const std::string& name, int64_t layer = 0) {
  return {name, "float32", {int64_t{1}, m.model.kv_heads, int64_t{1}, head_size(m.model, layer)}};
}

template <typename Choice>
void add_token_inputs(const Manifest& m, std::vector<TensorSpec>& to, Choice chosen) {
  for (const TokenInput& each : m.token_inputs)
    if (chosen(each)) to.push_back({names::kTokenInput + each.name, "float32", {"tokens", each.width}});
}

void add_states(const Manifest& m, GraphIO& to, const Size& layers) {
  to.inputs.push_back({names::kState, "float32", {layers, "conversations", m.model.state_numbers}});
  to.inputs.push_back({names::kStateEnds, "int64", {"ends"}});
  to.outputs.push_back({names::kStateOut, "float32", {layers, "conversations", "ends", m.model.state_numbers}});
}

TensorSpec one(const char* name) { return {name, "int32", {int64_t{1}}}; }

Json tensors(const std::vector<TensorSpec>& specs) {
  Json::Object out;
  for (const TensorSpec& spec : specs) {
    Json::Array shape;
    for (const Size& size : spec.shape) shape.push_back(std::visit([](const auto& value) { return Json(value); }, size));
    out.emplace_back(spec.name, Json::Object{{"dtype", spec.dtype}, {"shape", shape}});
  }
  return out;
}

Json io(const GraphIO& graph) {
  return Json::Object{{"inputs", tensors(graph.inputs)}, {"outputs", tensors(graph.outputs)}};
}

Json dialect_json(const Manifest& m, const std::string& dialect) {
  Json::Object out{{"cache", in_place(dialect)       ? "in place"
                             : for_tensorrt(dialect) ? "appended"
                                                     : "grows"},
                   {"kv_dtype", m.kv_type(dialect)},
                   {"vision", io(vision_io(m, dialect))},
                   {"embed", io(embed_io(m))},
                   {"stage", io(stage_io(m, dialect, false))},
                   {"head", io(head_io(m, dialect))}};
  if (!m.gates.empty()) out.emplace_back("gate", io(gate_io(m)));
  if (m.text_tower) out.emplace_back("text_tower", io(text_tower_io(m)));
  if (m.dialects.at(dialect).video) out.emplace_back("video", io(video_io(m)));
  if (m.dialects.at(dialect).projector) out.emplace_back("projector", io(projector_io(m)));
  if (m.dialects.at(dialect).score) {
    out.emplace_back("score", io(score_io(m, dialect)));
    out.emplace_back("stage_query", tensors({query(m)}));
  }
  if (!m.token_inputs.empty()) {
    std::vector<TensorSpec> all;
    add_token_inputs(m, all, [](const TokenInput&) { return true; });
    out.emplace_back("token_inputs", tensors(all));
  }
  if (!m.model.conv_layers.empty()) {
    GraphIO states;
    add_states(m, states, "layers");
    out.emplace_back("state_inputs", tensors(states.inputs));
    out.emplace_back("state_outputs", tensors(states.outputs));
  }
  return out;
}

}  // namespace

GraphIO embed_io(const Manifest& m) {
  GraphIO out{{{names::kIds, "int64", {"tokens"}}}, {hidden(m)}};
  add_token_inputs(m, out.outputs, [](const TokenInput& each) { return each.of_text; });
  return out;
}

GraphIO head_io(const Manifest& m, const std::string& dialect) {
  if (!m.action) {
    GraphIO head{{hidden(m)}, {{names::kLogits, "float32", {"tokens", m.model.vocab}}}};
    if (on_gpu(dialect)) head.outputs.push_back({names::kBest, "int32", {"tokens"}});
    return head;
  }
  const ActionSpec& a = *m.action;
  int64_t half = m.model.head_dim / 2;
  GraphIO out{{{names::kActions, "float32", {a.horizon, a.width}},
               {names::kTime, "float32", {int64_t{1}, int64_t{1}}},
               {names::kPositions, "int64", {a.rows()}},
               {names::kCos, "float32", {"max_context", half}},
               {names::kSin, "float32", {"max_context", half}}},
              {{names::kChange, "float32", {a.horizon, a.width}}}};
  if (a.state_in == "expert") out.inputs.push_back({names::kRobotState, "float32", {int64_t{1}, a.state}});
  for (int64_t layer = 1; layer <= m.model.layers; ++layer)
    for (const char* name : {names::kPastKey, names::kPastValue})
      out.inputs.push_back({cat(name, layer), "float32", {m.model.kv_heads, cat("slots.", layer), m.model.head_dim}});
  return out;
}

GraphIO gate_io(const Manifest& m) { return {{hidden(m)}, {{names::kOdds, "float32", {int64_t{2}}}}}; }

GraphIO text_tower_io(const Manifest& m) {
  return {{{names::kIds, "int64", {"tokens"}}}, {{names::kTextEmbedding, "float32", {int64_t{1}, m.text_tower->width}}}};
}

GraphIO video_io(const Manifest& m) {
  auto [height, width] = m.video->image.output();
  return {{{names::kPixels, "float32", {"images", int64_t{3}, int64_t{height}, int64_t{width}}}},
          {{names::kFeatures, "float32", {"images", m.video->tokens, m.model.hidden}}}};
}

GraphIO projector_io(const Manifest& m) {
  return {{{names::kTowerStates, "float32", {"tokens", m.model.tower.state_width}}}, {hidden(m)}};
}

int64_t width_of(const TensorSpec& spec) { return std::get<int64_t>(spec.shape.back()); }

GraphIO vision_io(const Manifest& m, const std::string& dialect) {
  const Graphs& graphs = m.dialects.at(dialect);
  bool merges = graphs.vision_merges;
  const bool own = m.image.own_size(), one = merges || own;
  auto [high, wide] = own ? std::pair(0, 0) : m.image.output();
  Size height = own ? Size("height") : Size(int64_t{high}), width = own ? Size("width") : Size(int64_t{wide});
  Size images = one ? Size(int64_t{1}) : Size("images"), count = one ? Size("tokens") : Size(m.model.tower.tokens);
  Size pictures = m.video && m.video->layout.name == names::kPairs ? Size("images") : images;
  GraphIO out{{{names::kPixels, "float32", {pictures, int64_t{3}, height, width}}},
              {{names::kFeatures, "float32", {images, count, m.model.hidden}}}};
  if (merges) {
    out.inputs.push_back({names::kTau, "float32", {int64_t{1}}});
    for (const char* name : {names::kPatchIndex, names::kMerged}) out.outputs.push_back({name, "int64", {"tokens"}});
    out.outputs.push_back({names::kSimilarity, "float32", {"tokens"}});
  }
  if (graphs.vision_attention) out.outputs.push_back({names::kClsAttention, "float32", {"tokens"}});
  if (graphs.vision_last_attention) out.outputs.push_back({names::kClsAttentionLast, "float32", {"tokens"}});
  if (m.text_tower) out.outputs.push_back({names::kClipPatches, "float32", {"tokens", m.text_tower->width}});
  if (graphs.vision_received) out.outputs.push_back({names::kReceived, "float32", {"tokens", int64_t{2}}});
  int64_t own_width = m.model.tower.state_width + m.model.tower.key_width + 1;
  if (graphs.projector) out.outputs.push_back({names::kTowerTokens, "float32", {images, "states", own_width}});
  add_token_inputs(m, out.outputs, [](const TokenInput& each) { return each.of_images; });
  return out;
}

GraphIO stage_io(const Manifest& m, const std::string& dialect, bool with_query, const StageSpec* stage) {
  Size past = "capacity", present = "capacity", rows = "max_context";
  if (dialect == "plain") past = "past", present = "past + tokens";
  if (for_tensorrt(dialect)) past = "slots", present = "tokens", rows = m.max_context;
  GraphIO out{{hidden(m),
               {names::kPositions, "int64", {int64_t{1}, "tokens"}},
               {names::kCos, "float32", {rows, m.model.head_dim / 2}},
               {names::kSin, "float32", {rows, m.model.head_dim / 2}}},
              {hidden(m, names::kHiddenOut)}};
  if (m.model.sees_both_ways()) out.inputs.push_back({names::kSeenSlots, "int64", {int64_t{1}, "tokens"}});
  if (m.model.sliding) {
    for (const char* name : {names::kSlidingCos, names::kSlidingSin})
      out.inputs.push_back({name, "float32", {rows, m.model.sliding->head_dim / 2}});
    out.inputs.push_back({names::kFirstSlot, "int64", {int64_t{1}, "tokens"}});
  }
  auto reads = [&](const TokenInput& each) {
    return stage && std::count(stage->inputs.begin(), stage->inputs.end(), each.name) > 0;
  };
  add_token_inputs(m, out.inputs, reads);
  bool scaled = m.kv_type(dialect) == "int8", keeps = stage == nullptr || stage->keeps();
  if (keeps && in_place(dialect)) out.inputs.push_back(one(names::kLastSlot));
  if (keeps && dialect != "plain") out.inputs.push_back(one(names::kTotalSlots));
  const Ids own = !stage ? Ids{0} : keeps ? stage->cached : m.model.sources(stage->first, stage->last);
  for (int64_t number : own) {
    const std::string layer = number > 0 ? std::to_string(number) : "{layer}";
    if (!keeps && !in_place(dialect)) past = "slots." + layer;
    out.inputs.push_back(cache(m, dialect, names::kPastKey + layer, past, number));
    out.inputs.push_back(cache(m, dialect, names::kPastValue + layer, past, number));
    if (scaled) out.inputs.push_back(scale(m, names::kKeyScaleOf + layer, number));
    if (scaled) out.inputs.push_back(scale(m, names::kValueScaleOf + layer, number));
    if (!keeps && dialect != "plain") out.inputs.push_back({names::kSourceSlot + layer, "int32", {int64_t{1}}});
    if (!keeps) continue;
    out.outputs.push_back(cache(m, dialect, names::kPresentKey + layer, present, number));
    out.outputs.push_back(cache(m, dialect, names::kPresentValue + layer, present, number));
  }
  if (stage && !stage->stateful.empty()) add_states(m, out, static_cast<int64_t>(stage->stateful.size()));
  if (with_query) out.outputs.push_back(query(m));
  return out;
}

GraphIO score_io(const Manifest& m, const std::string& dialect) {
  GraphIO out{{query(m), cache(m, dialect, names::kKey, "capacity"), one(names::kTotalSlots)}, {}};
  if (m.kv_type(dialect) == "int8") out.inputs.push_back(scale(m, names::kKeyScale));
  for (const char* name : {names::kAttentionSum, names::kAttentionMax}) out.outputs.push_back({name, "float32", {"slots"}});
  return out;
}

void check_interface(const Manifest& m, const Json& declared) {
  Json::Object dialects;
  for (const auto& [name, graphs] : m.dialects) dialects.emplace_back(name, dialect_json(m, name));
  Json::Object merged{{"gone", names::kGone}, {"patch", names::kPatch}, {"window", names::kWindow}};
  Json::Object constants{{"class_token", names::kClassToken},
                         {"merged", merged},
                         {"vision_defaults", Json::Object{{names::kTau, double{names::kTauDefault}}}},
                         {"odds", Json::Array{"stay", "withdraw"}}};
  Json::Array axes{"layer", "key or value", "kv_head", "slot", "head_dim"};
  Json wanted = Json::Object{{"layers_from", 1},
                             {"kv_cache", Json::Object{{"axes", axes}, {"dtype", m.kv_dtype}}},
                             {"constants", constants},
                             {"dialects", dialects}};
  if (wanted != declared)
    fail(Kind::bundle, "vtx.json: interface is '", declared.dump().substr(0, 60), "', not what this libvtx knows; ",
         kDamaged);
}

}  // namespace vtxcore
