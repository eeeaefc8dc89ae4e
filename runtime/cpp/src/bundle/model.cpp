// The section model of the manifest: sizes of the decoder and of the vision tower, as far as the runtime needs them.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <tuple>

#include "bundle/fields.hpp"
#include "bundle/manifest.hpp"

namespace vtxcore {
namespace {

// The part of a position that each frequency turns by. Interleaved parts take turns, as long as row or column has
// frequencies left; time has the rest.
Ids read_rope(const Json& value, int64_t head_dim, const std::string& of = "") {
  Fields fields(value, "vtx.json: model." + (of.empty() ? "" : of + ".") + "rope");
  fields.text("kind");
  fields.positive("theta");
  if (fields.has("scale")) fields.positive("scale");  // the tables hold it
  const Json::Array& frequencies = fields.list("frequencies");
  for (const Json& item : frequencies)
    if (!std::isfinite(fields.number_of(item, "frequencies")))
      fail(Kind::bundle, "vtx.json: a frequency of model.rope is not a number; export again");
  Ids sections = fields.has("sections") ? fields.wholes("sections", 1, names::kMaxSize) : Ids(), parts;
  if (2 * static_cast<int64_t>(frequencies.size()) != head_dim || (!of.empty() && !sections.empty()))
    fail(Kind::bundle, "vtx.json: ", of.empty() ? "" : "model." + of + ": ", frequencies.size(),
         " rotary frequencies do not fit heads of ", head_dim, "; export again");
  bool interleaved = fields.has("interleaved") && fields.flag("interleaved");
  fields.done();
  if (sections.empty()) return parts;
  auto count = static_cast<int64_t>(frequencies.size());
  if (sections.size() != std::tuple_size_v<Position> ||
      std::accumulate(sections.begin(), sections.end(), int64_t{0}) != count)
    fail(Kind::bundle, "vtx.json: model.rope.sections ", sections, " do not divide ", count, " frequencies in ",
         std::tuple_size_v<Position>, "; export again");
  for (int64_t number = 0; interleaved && number < count; ++number) {
    auto part = static_cast<size_t>(number % 3);
    parts.push_back(part > 0 && number < 3 * sections[part] ? number % 3 : 0);
  }
  for (size_t part = 0; !interleaved && part < sections.size(); ++part)
    parts.insert(parts.end(), static_cast<size_t>(sections[part]), static_cast<int64_t>(part));
  return parts;
}

TowerSpec read_tower(const Json& value) {
  Fields fields(value, "vtx.json: model.tower");
  fields.whole("layers");
  TowerSpec t;
  t.image = fields.whole("image"), t.patch = fields.whole("patch");
  t.square = fields.whole("square"), t.pool = fields.whole("pool");
  t.tokens = fields.whole("tokens"), t.states = fields.whole("states");
  t.state_width = fields.whole("state_width"), t.key_width = fields.whole("key_width");
  t.class_token = fields.flag("class_token"), t.several = fields.flag("several");
  t.positions = fields.text("positions");
  fields.done();
  const auto& known = names::kTowerPositions;
  if (std::find(std::begin(known), std::end(known), t.positions) == std::end(known))
    fail(Kind::bundle, "vtx.json: model.tower has unknown positions, '", t.positions.substr(0, 40), "'; export again");
  if (t.patch > t.image)
    fail(Kind::bundle, "vtx.json: model.tower: images of ", t.image, " pixels are smaller than patches of ", t.patch,
         "; export again");
  t.grid = t.image / t.patch;
  return t;
}

// The layers with a convolution, and the numbers of one's state: its last columns, then the delta rule's matrices.
void read_convolutions(Fields& fields, ModelSpec& m) {
  if (fields.has("conv_layers")) m.conv_layers = fields.wholes("conv_layers", 1, m.layers);
  const int64_t taps = fields.has("conv_taps") ? fields.whole("conv_taps") : 1;
  bool rising = std::is_sorted(m.conv_layers.begin(), m.conv_layers.end(), std::less_equal<int64_t>());
  if (!rising || (!m.conv_layers.empty() && (taps < 2 || taps > names::kMaxTaps)))
    fail(Kind::bundle, "vtx.json: convolutions of ", taps, " taps in the layers ", m.conv_layers, " do not fit ", m.layers,
         " layers; they have 2 to ", names::kMaxTaps, " taps; export again");
  int64_t channels = m.hidden, memory = 0;
  if (fields.has("delta") && !fields.get("delta").is_null()) {
    Fields delta(fields.get("delta"), "vtx.json: model.delta");
    int64_t key_heads = delta.whole("key_heads"), value_heads = delta.whole("value_heads");
    int64_t key_dim = delta.whole("key_dim"), value_dim = delta.whole("value_dim");
    delta.done();
    if (value_heads % key_heads != 0)
      fail(Kind::bundle, "vtx.json: model.delta: ", value_heads, " value heads cannot share ", key_heads,
           " key heads evenly; export again");
    if (m.conv_layers.empty())
      fail(Kind::bundle, "vtx.json: model.delta is for layers with a convolution, and none has one; export again");
    channels = std::min(product({2, key_heads, key_dim}), names::kMaxSize + 1) +
               std::min(product({value_heads, value_dim}), names::kMaxSize + 1);
    memory = std::min(product({value_heads, key_dim, value_dim}), names::kMaxSize + 1);
  }
  if (m.conv_layers.empty()) return;
  m.state_numbers = product({taps - 1, channels}) + memory;
  if (m.state_numbers > names::kMaxSize)
    fail(Kind::bundle, "vtx.json: a layer's state has more than ", names::kMaxSize, " numbers; export again");
}

// The layers whose tokens see the last `window` positions alone, with heads and rotary embedding of their own.
std::optional<SlidingLayers> read_sliding(Fields& model, int64_t layers) {
  if (!model.has("sliding") || model.get("sliding").is_null()) return std::nullopt;
  Fields fields(model.get("sliding"), "vtx.json: model.sliding");
  Ids sliding = fields.wholes("layers", INT32_MIN, names::kMaxSize);
  SlidingLayers out{{sliding.begin(), sliding.end()}, fields.whole("window"), fields.whole("head_dim")};
  read_rope(fields.get("rope"), out.head_dim, "sliding");
  fields.done();
  if (out.layers.empty() || *out.layers.begin() < 1 || *out.layers.rbegin() > layers)
    fail(Kind::bundle, "vtx.json: model.sliding names layers ", Ids(out.layers.begin(), out.layers.end()), " of ", layers,
         "; export again");
  return out;
}

// The first of the last layers, which read the keys and values of earlier ones: each of one like it before.
std::optional<int64_t> read_shared(Fields& fields, const ModelSpec& m) {
  std::optional<int64_t> shared = fields.whole_or_null("shared", 1);
  std::set<bool> before, all;
  for (int64_t layer = 1; layer <= m.layers; ++layer) {
    all.insert(m.slides(layer));
    if (shared && layer < *shared) before.insert(m.slides(layer));
  }
  if (shared && (*shared < 2 || *shared > m.layers || before != all))
    fail(Kind::bundle, "vtx.json: model.shared is ", *shared, ", and each layer from it to the last, ", m.layers,
         ", needs one like it before; export again");
  return shared;
}

// Which tokens see each other both ways.
TwoWay read_two_way(Fields& fields) {
  if (!fields.has("two_way") || fields.get("two_way").is_null()) return TwoWay::none;
  std::string kind = fields.text("two_way");
  if (kind == "prompt") return TwoWay::prompt;
  if (kind == "images") return TwoWay::images;
  fail(Kind::bundle, "vtx.json: tokens that see each other both ways are '", kind.substr(0, 40),
       "', unknown to this vtx, which has prompt, images; ", kUpgrade);
}

}  // namespace

int64_t ModelSpec::source(int64_t layer) const {
  if (!shared || layer < *shared) return layer;
  int64_t found = *shared - 1;
  while (found > 1 && slides(found) != slides(layer)) --found;
  return found;
}

Ids ModelSpec::sources(int64_t first, int64_t last) const {
  std::set<int64_t> found;
  for (int64_t layer = first; layer <= last; ++layer)
    if (int64_t from = source(layer); from < first) found.insert(from);
  return {found.begin(), found.end()};
}

double ModelSpec::mean_head_dim() const {
  int64_t last = shared ? *shared - 1 : layers, total = 0;
  for (int64_t layer = 1; layer <= last; ++layer) total += heads_of(layer);
  return static_cast<double>(total) / static_cast<double>(last);
}

ModelSpec read_model(const Json& value) {
  Fields fields(value, "vtx.json: model");
  ModelSpec m;
  m.name = fields.text("name"), m.family = fields.text("family");
  m.layers = fields.whole("layers", 1, names::kMaxLayers);
  m.hidden = fields.whole("hidden");
  m.heads = fields.whole("heads"), m.kv_heads = fields.whole("kv_heads"), m.head_dim = fields.whole("head_dim");
  m.vocab = fields.whole("vocab");
  m.max_positions = fields.whole("max_positions");
  m.eps = fields.positive("eps");
  if (m.heads % m.kv_heads != 0)
    fail(Kind::bundle, "vtx.json: ", m.heads, " heads cannot share ", m.kv_heads, " key/value heads evenly; export again");
  m.rope_parts = read_rope(fields.get("rope"), m.head_dim);
  m.sliding = read_sliding(fields, m.layers);
  m.shared = read_shared(fields, m);
  m.two_way = read_two_way(fields);
  read_convolutions(fields, m);
  m.tower = read_tower(fields.get("tower"));
  fields.get("parts");  // by which tools estimate and the exporter computes
  fields.done();
  return m;
}

}  // namespace vtxcore
