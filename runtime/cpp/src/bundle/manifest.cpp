#include "bundle/manifest.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <set>
#include <tuple>

#include "bundle/fields.hpp"
#include "bundle/graphs.hpp"

namespace vtxcore {
namespace {

const std::set<std::string> kPrecisions{"fp32", "fp16", "bf16", "int8", "int4"};
constexpr char kVideoLayouts[] = "frames, pairs, sliced_frames";
const std::map<std::string, int64_t> kKvBytes{{"float32", 4}, {"float16", 2}, {"int8", 1}};

LayoutSpec read_layout(const Json& value) {
  Fields fields(value, "vtx.json: layout");
  LayoutSpec layout{fields.text("name"), fields.whole("max_tokens"), fields.get("parameters"), std::nullopt};
  layout.min_tokens = fields.whole_or_null("min_tokens", 1, layout.max_tokens);
  if (layout.parameters.object() == nullptr) fields.wrong<int>("parameters", "an object");
  fields.done();
  return layout;
}

std::optional<TextTowerSpec> read_text_tower(const Json& value) {
  if (value.is_null()) return std::nullopt;
  Fields fields(value, "vtx.json: text_tower");
  TextTowerSpec t;
  t.tokenizer = fields.text("tokenizer");
  int64_t layers = fields.whole("layers"), hidden = fields.whole("hidden");
  fields.whole("intermediate");
  int64_t heads = fields.whole("heads");
  t.vocab = fields.whole("vocab"), t.max_tokens = fields.whole("max_tokens"), t.width = fields.whole("width");
  fields.text("activation");
  fields.positive("eps"), fields.positive("vision_eps");
  if (!fields.get("end_id").is_null()) t.end_id = fields.whole("end_id", 0);
  fields.done();
  if (t.max_tokens > names::kMaxSegment || layers > names::kMaxLayers || hidden % heads != 0)
    fail(Kind::bundle, "vtx.json: text_tower: ", layers, " layers, hidden size ", hidden, " with ", heads, " heads, ",
         t.max_tokens, " tokens: sizes are inconsistent; export again");
  return t;
}

Graphs read_graphs(const Json& value, const std::string& dialect) {
  Fields fields(value, "vtx.json: dialects." + dialect);
  Graphs g;
  g.vision = fields.text("vision"), g.embed = fields.text("embed"), g.head = fields.text("head");
  g.stages = fields.texts("stages"), g.gates = fields.texts("gates");
  g.score = fields.text_or_null("score");
  g.vision_merges = fields.flag("vision_merges"), g.vision_attention = fields.flag("vision_attention");
  g.vision_last_attention = fields.flag("vision_last_attention");
  g.text_tower = fields.text_or_null("text_tower");
  if (fields.has("video")) g.video = fields.text_or_null("video");
  if (fields.has("projector")) g.projector = fields.text_or_null("projector");
  if (fields.has("vision_received")) g.vision_received = fields.whole("vision_received");
  fields.done();
  return g;
}

[[noreturn]] void bad_image(Fields& fields, const char* key, const std::string& wanted) {
  fail(Kind::bundle, "image setting ", key, " is ", fields.get(key).dump().substr(0, 80), "; it must be ", wanted);
}

// Numbers of a list; the list must have `count` of them, from `low` to `high`.
std::vector<double> numbers(Fields& fields, const char* key, size_t count, double low, double high) {
  std::vector<double> out;
  for (const Json& item : fields.list(key)) out.push_back(fields.number_of(item, key));
  bool fits = out.size() == count && std::all_of(out.begin(), out.end(), [&](double v) { return v >= low && v <= high; });
  if (!fits) bad_image(fields, key, cat(count, " numbers from ", python_repr(low), " to ", python_repr(high)));
  return out;
}

std::optional<std::pair<int, int>> read_pair(Fields& fields, const char* key) {
  if (fields.get(key).is_null()) return std::nullopt;
  Ids found = fields.wholes(key, 1, names::kMaxInputSide);
  if (found.size() != 2) bad_image(fields, key, "[height, width]");
  return std::pair(static_cast<int>(found[0]), static_cast<int>(found[1]));
}

ImageSettings read_image(const Json& value) {
  static const std::set<std::string> kResampling{"nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"};
  Fields fields(value, "vtx.json: image");
  ImageSettings s;
  if (!fields.get("pad").is_null()) {
    Ids pad = fields.wholes("pad", 0, 255);
    if (pad.size() != 3) bad_image(fields, "pad", "3 bytes or null");
    s.pad = {static_cast<int>(pad[0]), static_cast<int>(pad[1]), static_cast<int>(pad[2])};
  }
  if (fields.get("resize").integer() != nullptr)
    s.shortest = static_cast<int>(fields.whole("resize", 1, names::kMaxInputSide));
  else
    s.resize = read_pair(fields, "resize");
  s.resample = fields.text("resample");
  if (kResampling.count(s.resample) == 0) bad_image(fields, "resample", "a filter of Pillow");
  s.crop = read_pair(fields, "crop");
  s.rescale = fields.number("rescale");
  if (!(s.rescale >= 1e-6 && s.rescale <= 1e6)) bad_image(fields, "rescale", "a number from 1e-6 to 1e6");
  std::vector<double> mean = numbers(fields, "mean", 3, -1e6, 1e6), std = numbers(fields, "std", 3, 1e-6, 1e6);
  std::copy(mean.begin(), mean.end(), s.mean.begin());
  std::copy(std.begin(), std.end(), s.std.begin());
  for (auto [key, flag] : {std::pair("within", &s.within), std::pair("centred", &s.centred), std::pair("ended", &s.ended),
                           std::pair("interpolated", &s.interpolated)})
    if (fields.has(key)) *flag = fields.flag(key);
  fields.done();
  if (s.within && (!s.resize || s.pad || s.crop)) bad_image(fields, "within", "false");
  if (!s.crop && !s.resize && !(s.pad && s.shortest) && !s.own_size())
    bad_image(fields, "crop", "set where resize does not fix the size");
  return s;
}

VideoSpec read_video(const Json& value) {
  Fields fields(value, "vtx.json: video");
  VideoSpec video{read_layout(fields.get("layout")), read_image(fields.get("image")), fields.flag("own_graph"), 0};
  fields.done();
  const Json* tokens = video.layout.parameters.find("tokens");
  bool frames = video.layout.name == "frames" && tokens != nullptr && tokens->integer() != nullptr;
  bool own = (video.layout.name == names::kPairs || video.layout.name == "sliced_frames") && !video.own_graph;
  if ((!frames && !own) || video.image.own_size() != own)
    fail(Kind::bundle, "vtx.json: the layout of videos '", video.layout.name.substr(0, 40),
         "' is unknown to this vtx, which has ", kVideoLayouts, "; ", kUpgrade);
  if (frames) video.tokens = *tokens->integer();
  return video;
}

}  // namespace

std::string check_inside(const std::string& name, const std::string& where) {
  bool leaves = name.empty() || name[0] == '/' || name.find_first_of(std::string("\\:\0", 3)) != std::string::npos;
  leaves = leaves || ("/" + name + "/").find("/../") != std::string::npos;
  if (leaves) fail(Kind::bundle, where, ": the path '", name.substr(0, 80), "' leaves the bundle; do not use this bundle");
  return name;
}

namespace {

// True for YYYY-MM-DD of a day that exists.
bool is_day(const std::string& text) {
  int year = 0, month = 0, day = 0, end = 0;
  if (text.size() != 10 || text.find_first_not_of("0123456789-") != std::string::npos ||
      std::sscanf(text.c_str(), "%4d-%2d-%2d%n", &year, &month, &day, &end) != 3 || end != 10)
    return false;
  bool leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
  int days = month == 2 ? (leap ? 29 : 28) : (month == 4 || month == 6 || month == 9 || month == 11) ? 30 : 31;
  return year >= 1 && month >= 1 && month <= 12 && day >= 1 && day <= days;
}

std::map<std::string, FileRecord> read_files(const Json& value) {
  std::map<std::string, FileRecord> files;
  const Fields object(value, "vtx.json: files");  // that it is one
  for (const auto& [name, record] : *value.object()) {
    check_inside(name, "vtx.json");
    Fields fields(record, "vtx.json: files." + name.substr(0, 80));
    files[name] = {fields.whole("bytes", 0, int64_t{1} << 62), fields.text("sha256")};
    fields.done();
  }
  return files;
}

bool rising(const Ids& values) {
  return std::adjacent_find(values.begin(), values.end(), [](int64_t a, int64_t b) { return a >= b; }) == values.end();
}

bool among(const Ids& values, int64_t wanted) { return std::find(values.begin(), values.end(), wanted) != values.end(); }

void check_stages(const Manifest& m) {
  bool sound = !m.stages.empty() && rising(m.variants);
  int64_t next = 1;
  Ids starts;
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (const StageSpec& stage : m.stages) {
    spans.emplace_back(stage.first, stage.last);
    sound = sound && stage.first == next && stage.last >= stage.first;
    if (stage.first > 1) starts.push_back(stage.first);
    next = stage.last + 1;
  }
  sound = sound && next == m.model.layers + 1 && !m.stages.back().query;
  for (int64_t k : m.variants) sound = sound && among(starts, k);
  if (!sound)
    fail(Kind::bundle, "vtx.json: stages ", spans, " do not cut ", m.model.layers, " layers at K = ", m.variants,
         "; export again");
  for (const StageSpec& stage : m.stages) {
    Ids convolved;
    for (int64_t layer : m.model.conv_layers)
      if (stage.first <= layer && layer <= stage.last) convolved.push_back(layer);
    if (stage.stateful != convolved)
      fail(Kind::bundle, "vtx.json: stage ", stage.first, "..", stage.last, " keeps states in layers ", stage.stateful,
           ", the model has such layers at ", m.model.conv_layers, "; export again");
  }
}

void check_gates(const Manifest& m) {
  bool sound = rising(m.gates);
  for (int64_t k : m.gates) sound = sound && among(m.variants, k);
  if (m.default_k == "auto")
    sound = sound && !m.gates.empty();
  else if (m.default_k != "none")
    sound = sound && among(m.variants, std::stoll(m.default_k));
  if (!sound)
    fail(Kind::bundle, "vtx.json: default_k ", m.default_k, " and gates at ", m.gates, " do not fit the variants ",
         m.variants, "; export again");
}

void check_dialects(const Manifest& m) {
  if (m.dialects.count("ort") == 0)
    fail(Kind::bundle, "vtx.json: the bundle holds no graphs of the 'ort' dialect; export again");
  bool scored = std::any_of(m.stages.begin(), m.stages.end(), [](const StageSpec& s) { return s.query; });
  for (const auto& [name, graphs] : m.dialects) {
    if (!in_place(name) && name != "plain" && !for_tensorrt(name))
      fail(Kind::bundle, "vtx.json: dialect '", name.substr(0, 40), "' is unknown to this vtx; ", kUpgrade);
    if (graphs.stages.size() != m.stages.size() || graphs.gates.size() != m.gates.size())
      fail(Kind::bundle, "vtx.json: dialect '", name, "' has ", graphs.stages.size(), " stages and ", graphs.gates.size(),
           " gates, the bundle ", m.stages.size(), " and ", m.gates.size(), "; export again");
    if (m.text_tower.has_value() != graphs.text_tower.has_value())
      fail(Kind::bundle, "vtx.json: dialect '", name, "': a text tower and its graph go together; export again");
    bool video = m.video && m.video->own_graph && !for_tensorrt(name);
    if (video != graphs.video.has_value() || m.video.has_value() != m.text.video_token_id.has_value())
      fail(Kind::bundle, "vtx.json: dialect '", name, "': videos, their token and their graph go together; export again");
    if (scored != graphs.score.has_value())
      fail(Kind::bundle, "vtx.json: dialect '", name,
           "': stages that give queries and a score graph go together; export again");
  }
}

void check_files(const Manifest& m, const std::string& golden) {
  std::vector<std::string> used{m.tokenizer, m.rope, golden, m.chat_template};
  if (m.text_tower) used.push_back(m.text_tower->tokenizer);
  if (m.kv_scales) used.push_back(*m.kv_scales);
  for (const auto& [name, g] : m.dialects) {
    used.insert(used.end(), {g.vision, g.embed, g.head});
    used.insert(used.end(), g.stages.begin(), g.stages.end());
    used.insert(used.end(), g.gates.begin(), g.gates.end());
    if (g.score) used.push_back(*g.score);
    if (g.text_tower) used.push_back(*g.text_tower);
    if (g.video) used.push_back(*g.video);
    if (g.projector) used.push_back(*g.projector);
  }
  for (const std::string& name : used)
    if (m.files.count(name) == 0)
      fail(Kind::bundle, "vtx.json: '", name.substr(0, 80), "' has no checksum in 'files'; export again");
  if (m.kv_scales.has_value() != (m.kv_dtype == "int8"))
    fail(Kind::bundle, "vtx.json: int8 K and V and a file of their scales go together; export again");
}

void read_token_inputs(Fields& fields, Manifest& m) {
  std::vector<std::string> names;
  for (const Json& item : fields.has("token_inputs") ? fields.list("token_inputs") : Json::Array()) {
    Fields input(item, "vtx.json: token_inputs");
    TokenInput each{input.text("name"), input.whole("width", INT32_MIN), input.flag("of_text"), input.flag("of_images")};
    input.done();
    if (each.width < 1 || each.width >= 1 << 24 || !(each.of_text || each.of_images))
      fail(Kind::bundle, "vtx.json: token_inputs: a width of ", each.width,
           " must be in 1..16777215 and come from the embedding, the tower or both; export again");
    names.push_back(each.name);
    m.token_inputs.push_back(std::move(each));
  }
  if (std::set<std::string>(names.begin(), names.end()).size() != names.size())
    fail(Kind::bundle, "vtx.json: token_inputs ", names, " hold a name twice; export again");
  for (const StageSpec& stage : m.stages) {
    std::set<std::string> reads(stage.inputs.begin(), stage.inputs.end());
    bool known = reads.size() == stage.inputs.size();
    for (const std::string& name : reads) known = known && std::count(names.begin(), names.end(), name) > 0;
    if (!known)
      fail(Kind::bundle, "vtx.json: stage ", stage.first, "..", stage.last, " reads token inputs ", stage.inputs,
           ", the bundle declares ", names, "; export again");
  }
}

std::string read_default(Fields& fields) {
  const Json& value = fields.get("default_k");
  if (value.is_null()) return "none";
  if (value.integer() != nullptr) return std::to_string(fields.whole("default_k"));
  if (fields.text("default_k") != "auto") fields.wrong<int>("default_k", "a number, \"auto\" or null");
  return "auto";
}

StageSpec read_stage(Fields& fields, const ModelSpec& model) {
  StageSpec stage{
      fields.whole("first", 1, model.layers), fields.whole("last", 1, model.layers), fields.flag("query"), {}, {}, {}};
  if (fields.has("inputs")) stage.inputs = fields.texts("inputs");
  const auto count = static_cast<size_t>(std::max<int64_t>(0, stage.layers()));
  std::vector<std::string> kinds = fields.has("caches") ? fields.texts("caches") : std::vector<std::string>();
  if (kinds.empty()) kinds.assign(count, names::kSlotted);
  const std::string known = listed(std::vector<std::string>{names::kSlotted, names::kUncached, names::kStateful});
  int64_t layer = stage.first;
  for (const std::string& kind : kinds) {
    if (kind != names::kSlotted && kind != names::kStateful && kind != names::kUncached)
      fail(Kind::bundle, "vtx.json: layers with a cache of the kind '", kind.substr(0, 40),
           "' are unknown to this vtx, which has ", known, "; ", kUpgrade);
    if (kind != names::kUncached) (kind == names::kSlotted ? stage.cached : stage.stateful).push_back(layer);
    ++layer;
  }
  const bool keyless = stage.first == model.shared && stage.last == model.layers;
  if (kinds.size() != count || stage.keeps() == keyless || (stage.query && !among(stage.cached, stage.last)))
    fail(Kind::bundle, "vtx.json: stage ", stage.first, "..", stage.last, " declares caches ", kinds,
         "; it needs one kind a layer, slots or a state in at least one, and slots in the last one if it gives queries; "
         "export again");
  return stage;
}

Manifest read_manifest(const Json& root) {
  Fields fields(root, "vtx.json");
  Manifest m;
  fields.whole("format");
  m.vtx = fields.text("vtx");
  m.model = read_model(fields.get("model"));
  m.layout = read_layout(fields.get("layout"));
  m.precision = fields.text("precision");
  m.vision_precision = fields.text("vision_precision");
  m.head_precision = fields.text("head_precision");
  m.kv_dtype = fields.text("kv_dtype");
  for (const std::string& precision : {m.precision, m.vision_precision, m.head_precision})
    if (kPrecisions.count(precision) == 0 || kKvBytes.count(m.kv_dtype) == 0)
      fail(Kind::bundle, "vtx.json: precision ", precision.substr(0, 20), " with KV type '", m.kv_dtype.substr(0, 20),
           "' is unknown to this vtx; ", kUpgrade);
  m.max_context = fields.whole("max_context", 1, (1 << 24) - 1);
  if (int64_t tokens = m.layout.min_tokens.value_or(m.layout.max_tokens); tokens >= m.max_context)
    fail(Kind::bundle, "vtx.json: an image of ", tokens, " tokens does not fit max_context ", m.max_context,
         "; export again");
  m.variants = fields.wholes("variants", 1, names::kMaxLayers);
  m.default_k = read_default(fields);
  m.reductions = fields.texts("reductions");
  if (fields.has("arithmetic")) m.arithmetic = fields.texts("arithmetic");
  if (fields.has("release") && !fields.get("release").is_null()) {
    Fields release(fields.get("release"), "vtx.json: release");
    m.release = {release.text("name"), release.whole("number", 1, (int64_t{1} << 53) - 1), ""};
    if (m.release->name.empty() || m.release->name.size() > 400)
      fail(Kind::bundle, "vtx.json: release ", m.release->number, " of '", m.release->name.substr(0, 40),
           "': a name and a number of at least 1 are needed; export again");
    if (release.has("until") && !release.get("until").is_null()) {
      m.release->until = release.text("until");
      if (!is_day(m.release->until))
        fail(Kind::bundle, "vtx.json: release: until is '", m.release->until.substr(0, 40),
             "'; it must be a day, e.g. 2027-06-30; export again");
    }
    release.done();
  }
  for (const Json& item : fields.list("stages")) {
    Fields stage(item, "vtx.json: stages");
    m.stages.push_back(read_stage(stage, m.model));
    stage.done();
  }
  m.gates = fields.wholes("gates", 1, names::kMaxLayers);
  const Json::Object* dialects = fields.get("dialects").object();
  if (dialects == nullptr) fields.wrong<int>("dialects", "an object");
  for (const auto& [name, graphs] : *dialects) m.dialects.emplace(name, read_graphs(graphs, name));
  m.tokenizer = fields.text("tokenizer"), m.chat_template = fields.text("chat_template"), m.rope = fields.text("rope");
  m.kv_scales = fields.text_or_null("kv_scales");
  m.text_tower = read_text_tower(fields.get("text_tower"));
  if (fields.has("video") && !fields.get("video").is_null()) m.video = read_video(fields.get("video"));
  if (fields.has("action") && !fields.get("action").is_null()) m.action = read_action(fields.get("action"));
  if (fields.has("bins") && !fields.get("bins").is_null()) m.bins = read_bins(fields.get("bins"));
  if (m.bins && (m.action || m.bins->vocab > m.model.vocab))
    fail(Kind::bundle,
         "vtx.json: bins: they go beyond the model's vocabulary, or the model has an expert, too; export again");
  m.image = read_image(fields.get("image"));
  static const std::set<std::string> kResizing{"native", "native_tiles", "budget", "slices", "longest"};
  bool own = m.image.own_size();
  if (own != (kResizing.count(m.layout.name) > 0))
    fail(Kind::bundle, "image setting ", "crop", " is ", own ? "null" : "not null", "; it must be ",
         own ? "set where resize does not fix the size" : "null, as pad and resize, where the layout resizes");
  m.text = read_text_settings(fields.get("text"));
  m.files = read_files(fields.get("files"));
  if (fields.get("record").object() == nullptr) fields.wrong<int>("record", "an object");
  read_token_inputs(fields, m);
  check_stages(m);
  check_gates(m);
  check_dialects(m);
  check_files(m, fields.text("golden"));
  check_interface(m, fields.get("interface"));
  fields.done();
  return m;
}

}  // namespace

std::pair<int, int> ImageSettings::output() const {
  if (crop) return *crop;
  return resize ? *resize : std::pair(shortest, shortest);
}

std::string Manifest::or_more_context() const {
  if (max_context >= model.max_positions) return "; the model itself has no more positions";
  return cat(", or export with a larger --max-context (up to ", model.max_positions, ")");
}

std::string Manifest::kv_type(const std::string& dialect) const {
  return kv_dtype == "int8" && dialect != "ort" ? "float16" : kv_dtype;
}

int64_t Manifest::kv_bytes(const std::string& dialect) const { return kKvBytes.at(kv_type(dialect)); }

int64_t Manifest::kv_slot_bytes(int64_t number_bytes, int64_t more) const {
  const double width = model.mean_head_dim() + static_cast<double>(more);
  return std::llrint(static_cast<double>(2 * model.kv_heads * number_bytes) * width);
}

Manifest parse_manifest(const std::string& text) {
  Json root = parse_json(text, "vtx.json", Kind::bundle);
  if (root.object() == nullptr) fail(Kind::bundle, "vtx.json is not a JSON object; the bundle is damaged, export again");
  const Json* format = root.find("format");
  if (format == nullptr || format->integer() == nullptr)
    fail(Kind::bundle, "vtx.json: format is ", format ? format->dump().substr(0, 40) : "missing",
         ", not a number; the bundle is damaged, export again");
  int64_t number = *format->integer();
  if (number != names::kFormat)
    fail(Kind::bundle, "the bundle has format ", number, ", ", number > names::kFormat ? "newer" : "older",
         " than this vtx reads (", names::kFormat, "); ",
         number > names::kFormat ? kUpgrade : "export it again with vtx-export");
  return read_manifest(root);
}

}  // namespace vtxcore
