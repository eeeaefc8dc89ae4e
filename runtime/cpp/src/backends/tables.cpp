#include "backends/tables.hpp"

#include <algorithm>
#include <cmath>

namespace vtxcore {
namespace {

Floats floats(const Tensors& tensors, const std::string& name, const Ids& shape, const std::string& file) {
  auto found = tensors.find(name);
  if (found == tensors.end() || found->second.dtype != "F32" || found->second.shape != shape)
    fail(Kind::bundle, file, ": ", name, " is not a float32 tensor ", shape, "; export again");
  return found->second.values<float>();
}

}  // namespace

Ids table_shape(const Manifest& m, const std::string& name) {
  if (name == names::kCos || name == names::kSin) return {m.max_context, m.model.head_dim / 2};
  if (name == names::kSlidingCos || name == names::kSlidingSin) return {m.max_context, m.model.sliding->head_dim / 2};
  return {1, m.model.kv_heads, 1, m.model.heads_of(std::stoll(name.substr(name.rfind('.') + 1)))};
}

std::map<std::string, Floats> read_tables(const Bundle& bundle) {
  const Manifest& m = bundle.manifest();
  std::map<std::string, Floats> out;
  const int64_t widest = std::max(m.model.head_dim, m.model.sliding ? m.model.sliding->head_dim : 0);
  Tensors rope = bundle.tensors(m.rope, (1 << 16) + 8 * m.max_context * widest);
  std::vector<const char*> wanted{names::kCos, names::kSin};
  if (m.model.sliding) wanted.insert(wanted.end(), {names::kSlidingCos, names::kSlidingSin});
  for (const char* name : wanted) out[name] = floats(rope, name, table_shape(m, name), m.rope);
  if (m.kv_dtype != "int8") return out;
  int64_t limit = (1 << 18) + product({8, m.model.layers, m.model.kv_heads, widest});
  Tensors scales = bundle.tensors(*m.kv_scales, limit);
  Ids cached;
  for (const StageSpec& stage : m.stages) cached.insert(cached.end(), stage.cached.begin(), stage.cached.end());
  for (int64_t layer : cached)
    for (const char* prefix : {names::kKeyScaleOf, names::kValueScaleOf}) {
      std::string name = prefix + std::to_string(layer);
      Floats values = floats(scales, name, table_shape(m, name), *m.kv_scales);
      for (float value : values)
        if (!(std::isfinite(value) && value > 0))
          fail(Kind::bundle, *m.kv_scales, ": ", name, " has a scale that is not a positive number; export again");
      out[name] = std::move(values);
    }
  return out;
}

RopeRows rope_rows(const std::map<std::string, Floats>& tables, const Manifest& m, const Positions& positions) {
  RopeRows out;
  auto even = [](const Position& parts) { return parts[0] == parts[1] && parts[0] == parts[2]; };
  if (m.model.rope_parts.empty() || std::all_of(positions.begin(), positions.end(), even)) {
    for (const Position& parts : positions) out.rows.push_back(parts.front());
    return out;
  }
  const Ids& part_of = m.model.rope_parts;
  for (const char* name : {names::kCos, names::kSin}) {
    const Floats& table = tables.at(name);
    Floats& own = out.own[name];
    own.reserve(positions.size() * part_of.size());
    for (const Position& parts : positions)
      for (size_t column = 0; column < part_of.size(); ++column) {
        auto row = static_cast<size_t>(parts[static_cast<size_t>(part_of[column])]);
        own.push_back(table.at(row * part_of.size() + column));
      }
  }
  out.rows = count_up(0, positions.size());
  return out;
}

Rows read_newline(const Bundle& bundle) {
  int64_t hidden = bundle.manifest().model.hidden;
  if (bundle.manifest().files.count(names::kFileNewline) == 0)
    fail(Kind::bundle, "the bundle's image layout needs ", names::kFileNewline, ", which is not there; export again");
  Tensors tensors = bundle.tensors(names::kFileNewline, (1 << 16) + 4 * hidden);
  Rows out(1, static_cast<size_t>(hidden));
  out.data = floats(tensors, names::kNewlineTensor, {hidden}, names::kFileNewline);
  return out;
}

std::pair<Floats, Floats> read_state_projection(const Bundle& bundle) {
  int64_t hidden = bundle.manifest().model.hidden, state = bundle.manifest().action->state;
  Tensors tensors = bundle.tensors(names::kFileState, (1 << 16) + 4 * hidden * (state + 1));
  return {floats(tensors, names::kWeight, {hidden, state}, names::kFileState),
          floats(tensors, names::kBias, {hidden}, names::kFileState)};
}

Floats read_final_norm(const Bundle& bundle) {
  int64_t hidden = bundle.manifest().model.hidden;
  Tensors tensors = bundle.tensors(names::kFileFinalNorm, (1 << 16) + 4 * hidden);
  return floats(tensors, names::kWeight, {hidden}, names::kFileFinalNorm);
}

}  // namespace vtxcore
