// The OpenVINO backend: one compiled graph a stage, K and V in blocks that one infer request a cache fills.
#include <mutex>

#include "backends/engines.hpp"
#include "backends/loading.hpp"
#include "backends/openvino/cache.hpp"
#include "backends/openvino/weights.hpp"
#include "backends/tables.hpp"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace vtxcore {
namespace {

using openvino::Type;

constexpr char kDialect[] = "plain";

constexpr char kIntegers[] = "int8";  // arithmetic: products of integers, all else in float32

// Values of a hidden state that share a scale in products of integers; with int4 as many as weights that share one.
int64_t quantised_rows(const std::string& precision, int64_t int4_block) {
  return precision == "int8" ? names::kQuantisedRowsInt8 : precision == "int4" ? int4_block : 0;
}

// The most hidden states that a stage takes in one run where more were measured to be slower (docs/measurements/index.md),
// by the weights and the arithmetic; 0: any number.
size_t rows_of_a_run(const std::string& precision, const std::string& compute) {
  for (const names::RowsOfARun& known : names::kRowsOfARun)
    if (precision == known.weights && compute == known.compute) return static_cast<size_t>(known.rows);
  return 0;
}

Type kv_type(const std::string& compute, const std::string& kept) {
  if (kept == "int8") return Type::u8;
  return compute == "bf16" ? Type::bf16 : kept == "float32" ? Type::f32 : Type::f16;
}

class OpenvinoBackend : public Backend {
 public:
  OpenvinoBackend(const Bundle& bundle, const BackendOptions& options)
      : bundle_(bundle), m_(bundle.manifest()),
        openvino_(options.library), context_{m_,
                                             kv_type(options.compute, m_.kv_dtype),
                                             m_.kv_type(kDialect) == "float16",
                                             {},
                                             nullptr,
                                             rows_of_a_run(m_.precision, options.compute)},
        zero_(1, static_cast<size_t>(m_.model.hidden)), roomy_(is_roomy(m_, options.compute)) {
    device = "openvino", dialect = kDialect, compute = options.compute, library = openvino_.described();
    kv_slot_bytes = context_.slot_bytes();
    choose_settings(options.threads > 0 ? options.threads : cores());
    std::map<std::string, Floats> tables = read_tables(bundle);
    for (const char* name : {names::kCos, names::kSin}) context_.rope[name] = std::move(tables.at(name));
    load_graphs(options.threads > 0 ? options.threads : cores());
    context_.score = score_.get();
#ifdef __GLIBC__
    ::malloc_trim(0);  // what loading freed: weights before they were packed
#endif
  }

  Rows embed(const Ids& ids) override {
    OpenvinoInput in{names::kIds, Type::i64, {static_cast<int64_t>(ids.size())}, ids.data()};
    return embed_->rows(in, m_.model.hidden, ids.size());
  }

  Rows head(const Rows& rows) override { return head_->rows(over(rows), m_.model.vocab, rows.count()); }

  Floats gate(int64_t k, const Rows& rows) override { return gates_.at(k)->rows(over(rows), 2, 1).data; }

  std::shared_ptr<const ImageTokens> vision(const Floats& pixels, const Extras& extras) override {
    GraphIO io = vision_io(m_, kDialect);
    OpenvinoGraph& graph = once(vision_, [&] { return compile_vision(io); });
    auto [height, width] = m_.image.output();
    float tau = names::kTauDefault;
    if (auto given = extras.find(names::kTau); given != extras.end()) tau = given->second;
    std::vector<OpenvinoInput> inputs{{names::kPixels, Type::f32, {1, 3, height, width}, pixels.data()}};
    if (io.inputs.size() > 1) inputs.push_back({names::kTau, Type::f32, {1}, &tau});
    std::vector<OpenvinoGraph::Output> outputs = graph.run(inputs);
    VisionOutputs found;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const std::string& name = io.outputs[i].name;
      if (io.outputs[i].dtype == "int64") {
        found.whole[name] = std::move(outputs[i].whole);
      } else if (Rows* rows = found.rows_of(name)) {
        rows->width = static_cast<size_t>(width_of(io.outputs[i]));
        rows->data = std::move(outputs[i].floats);
      } else {
        found.signals[name] = std::move(outputs[i].floats);
      }
    }
    return image_tokens(std::move(found), m_.model.tower.feature_width);
  }

  Floats text_tower(const Ids& ids) override {
    OpenvinoGraph& graph = once(text_tower_, [&] {
      return load(m_.dialects.at(kDialect).text_tower.value(), text_tower_io(m_), m_.vision_precision);
    });
    OpenvinoInput in{names::kIds, Type::i64, {static_cast<int64_t>(ids.size())}, ids.data()};
    return graph.rows(in, m_.text_tower.value().width, 1).data;
  }

  Rows project(const Rows& states) override {
    OpenvinoGraph& graph = once(
        projector_, [&] { return load(m_.dialects.at(kDialect).projector.value(), projector_io(m_), m_.vision_precision); });
    auto [count, width] = std::pair(static_cast<int64_t>(states.count()), static_cast<int64_t>(states.width));
    OpenvinoInput in{names::kTowerStates, Type::f32, {count, width}, states.data.data()};
    return graph.rows(in, m_.model.hidden, states.count());
  }

  std::unique_ptr<StageCache> stage(size_t index, int64_t capacity) override {
    return std::make_unique<OpenvinoStageCache>(context_, stages_[index], m_.stages[index], capacity);
  }

 private:
  using GraphPtr = std::unique_ptr<OpenvinoGraph>;
  using Settings = std::map<std::string, std::string>;

  void choose_settings(int threads) {
    std::string able = openvino_.core().capabilities();
    if (compute == "bf16" && able.find("BF16") == std::string::npos)
      fail(Kind::device, "this processor computes ", able, ", not bf16; leave out --compute bf16");
    static const std::map<Type, const char*> kWords{
        {Type::f32, "f32"}, {Type::f16, "f16"}, {Type::bf16, "bf16"}, {Type::u8, "u8"}};
    settings_ = {{"KV_CACHE_PRECISION", kWords.at(context_.kv)},
                 {"INFERENCE_PRECISION_HINT", compute == kIntegers ? "f32" : compute},
                 {"INFERENCE_NUM_THREADS", std::to_string(threads)},
                 {"NUM_STREAMS", "1"},
                 {"ENABLE_CPU_PINNING", "NO"}};  // or the graphs of two processes fight over the same cores
    if (context_.kv == Type::u8) settings_["KEY_CACHE_QUANT_MODE"] = "BY_TOKEN";
    if (compute == kIntegers && able.find("BF16") != std::string::npos) tower_settings_["INFERENCE_PRECISION_HINT"] = "bf16";
  }

  // All but those that only images and texts need, side by side where memory is to spare.
  void load_graphs(int threads) {
    const Graphs& graphs = m_.dialects.at(kDialect);
    stages_.resize(m_.stages.size());
    for (int64_t k : m_.gates) gates_[k];
    Loads loads;
    // The head may be as large as many layers.
    loads.add(m_.model.layers, [&] { head_ = load(graphs.head, head_io(m_), m_.head_precision, true); });
    for (size_t i = 0; i < m_.stages.size(); ++i)
      loads.add(m_.stages[i].layers(), [&, i] { compile_stage(graphs.stages[i], m_.stages[i], stages_[i]); });
    loads.add(1, [&] { embed_ = load(graphs.embed, embed_io(m_)); });
    for (size_t i = 0; i < m_.gates.size(); ++i)
      loads.add(0, [&, i] { gates_.at(m_.gates[i]) = load(graphs.gates[i], gate_io(m_)); });
    if (graphs.score) loads.add(0, [&] { score_ = load(*graphs.score, score_io(m_, kDialect)); });
    loads.run(roomy_ ? threads : 1);
  }

  OpenvinoInput over(const Rows& rows) const {
    return {names::kHidden, Type::f32, {static_cast<int64_t>(rows.count()), m_.model.hidden}, rows.data.data()};
  }

  // With the engine's settings for products with weights stored in `precision`, and `further` ones.
  std::unique_ptr<openvino::Compiled> compile(const std::string& name, openvino::Model& model, const std::string& precision,
                                              const Settings& further = {}) const {
    return loading(name, [&] {
      Settings settings = further;
      settings.insert(settings_.begin(), settings_.end());
      if (compute == kIntegers) model.multiply_integers();
      settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = std::to_string(quantised_rows(precision, model.int4_block()));
      return model.compile(settings);
    });
  }

  GraphPtr load(const std::string& name, const GraphIO& io) { return load(name, io, m_.precision); }

  // With `first` the graph runs once, since the engine packs the weights of a graph of any size when it first runs.
  GraphPtr load(const std::string& name, const GraphIO& io, const std::string& precision, bool first = false) {
    auto model = openvino_.read(bundle_, name, io, compute);
    auto dropping = model->letting_go(!roomy_);
    auto graph = std::make_unique<OpenvinoGraph>(name, compile(name, *model, precision), io);
    if (first) graph->run({over(zero_)});
    return graph;
  }

  // Compiled for one image, which lets the engine choose its kernels for these very sizes.
  GraphPtr compile_vision(const GraphIO& io) {
    const std::string& name = m_.dialects.at(kDialect).vision;
    auto model = openvino_.read(bundle_, name, io, compute);
    std::pair<int, int> size = m_.image.output();  // clang captures no structured binding before its release 16
    loading(name, [&] { model->reshape(names::kPixels, {1, 3, size.first, size.second}); });
    auto dropping = model->letting_go(!roomy_);
    return std::make_unique<OpenvinoGraph>(name, compile(name, *model, m_.vision_precision, tower_settings_), io);
  }

  std::unique_ptr<openvino::Model> read_stage(const std::string& file, const StageSpec& spec) const {
    auto model = openvino_.read(bundle_, file, stage_io(m_, kDialect, spec.query, &spec), compute);
    loading(file, [&] {
      model->page_caches(spec.first, spec.last, m_.model.heads);
      model->choose_rows();
    });
    return model;
  }

  // A stage of int4 in int8, where products are of integers; else null.
  std::unique_ptr<openvino::Model> read_for_many(const std::string& file, const StageSpec& spec,
                                                 OpenvinoStage& stage) const {
    if (compute != kIntegers || m_.precision != "int4") return nullptr;
    auto model = read_stage(file, spec);
    auto memory = std::make_unique<WeightsOnDisk>();
    loading(file, [&] { model->bring_to_int8(*memory); });
    memory->seal();
    stage.held = std::move(memory);
    return model;
  }

  void compile_stage(const std::string& file, const StageSpec& spec, OpenvinoStage& stage) {
    auto model = read_stage(file, spec), many = read_for_many(file, spec, stage);
    auto dropping = model->letting_go(!roomy_), dropping_many = many ? many->letting_go(true) : nullptr;
    stage.name = file;
    stage.compiled = compile(file, *model, m_.precision);
    if (many) stage.for_many = compile(file, *many, "int8");
    OpenvinoStageCache cache(context_, stage, spec, names::kFewTokens + 2);
    cache.append(zero_, {0}, false);
    if (stage.for_many) {
      Rows rows(static_cast<size_t>(names::kFewTokens + 1), zero_.width);
      cache.append(rows, count_up(0, rows.count()), false);
    }
  }

  template <typename Make>
  OpenvinoGraph& once(GraphPtr& graph, Make&& make) {
    std::lock_guard<std::mutex> lock(late_lock_);
    if (!graph) graph = make();
    return *graph;
  }

  const Bundle& bundle_;
  const Manifest& m_;
  OpenvinoLibrary openvino_;
  OpenvinoCacheContext context_;
  Rows zero_;
  const bool roomy_;
  Settings settings_, tower_settings_;
  GraphPtr embed_, head_, score_, vision_, text_tower_, projector_;
  std::map<int64_t, GraphPtr> gates_;
  std::vector<OpenvinoStage> stages_;
  std::mutex late_lock_;
};

// The least hidden size at which OpenVINO was measured to be ahead of onnxruntime.
int64_t wide(const std::string& precision) {
  static const std::map<std::string, int64_t> kWide{{"fp32", names::kWideFp32},
                                                    {"fp16", names::kWideFp16},
                                                    {"bf16", names::kWideBf16},
                                                    {"int8", names::kWideInt8},
                                                    {"int4", names::kWideInt4}};
  return kWide.at(precision);
}

}  // namespace

Engine openvino_engine() {
  Engine engine;
  engine.device = "openvino", engine.dialect = kDialect, engine.compute = {"f32", "bf16", kIntegers};
  engine.merit = [](const Bundle& bundle) {
    return bundle.manifest().model.hidden >= wide(bundle.manifest().precision) ? 2 : 0;
  };
  engine.obstacle = [](const Bundle&, const BackendOptions& options) { return OpenvinoLibrary::obstacle(options.library); };
  engine.open = [](const Bundle& bundle, const BackendOptions& options) -> std::unique_ptr<Backend> {
    return std::make_unique<OpenvinoBackend>(bundle, options);
  };
  return engine;
}

}  // namespace vtxcore
