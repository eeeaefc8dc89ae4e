// The OpenVINO backend: one compiled graph a stage, K and V in blocks that one infer request a cache fills.
#include <algorithm>

#include "backends/engines.hpp"
#include "backends/loading.hpp"
#include "backends/openvino/cache.hpp"
#include "backends/openvino/weights.hpp"
#include "backends/tables.hpp"

namespace vtxcore {
namespace {

using openvino::Type;

constexpr char kDialect[] = "plain";

constexpr char kIntegers[] = "int8";  // arithmetic: products of integers, all else in float32

// Values of a hidden state that share a scale in products of integers, where `block` weights share one (0: a row's).
int64_t quantised_rows(const std::string& precision, int64_t block) {
  if (precision == "int4") return block == 0 ? names::kQuantisedRowsInt4 : block;
  if (precision != "int8") return 0;
  return block == 0 ? names::kQuantisedRowsInt8 : std::min<int64_t>(block, names::kQuantisedRowsInt8);
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

class OpenvinoBackend : public HostBackend {
 public:
  OpenvinoBackend(const Bundle& bundle, const BackendOptions& options)
      : HostBackend(bundle, kDialect), openvino_(options.library),
        context_{m_,      kv_type(options.compute, m_.kv_dtype),       m_.kv_type(kDialect) == "float16", {},
                 nullptr, rows_of_a_run(m_.precision, options.compute)} {
    device = "openvino", compute = options.compute, library = openvino_.described();
    kv_slot_bytes = context_.slot_bytes();
    int threads = threads_of(options.threads);
    choose_settings(threads);
    std::map<std::string, Floats> tables = read_tables(bundle);
    std::vector<const char*> rotary{names::kCos, names::kSin};
    if (m_.model.sliding) rotary.insert(rotary.end(), {names::kSlidingCos, names::kSlidingSin});
    for (const char* name : rotary) context_.rope[name] = std::move(tables.at(name));
    for (const StageSpec& spec : m_.stages)
      for (int64_t layer : spec.cached)
        if (context_.kv == Type::u8)
          context_.key_scales[layer] = std::move(tables.at(names::kKeyScaleOf + std::to_string(layer)));
    stages_.resize(m_.stages.size());
    load_graphs(is_roomy(m_, compute) ? threads : 1);
    context_.score = score();
  }

  std::unique_ptr<StageCache> stage(size_t index, int64_t capacity) override {
    if (as_written(m_.stages[index]))
      return make_openvino_growing_cache(context_, stages_[index], m_.stages[index], capacity);
    return std::make_unique<OpenvinoStageCache>(context_, stages_[index], m_.stages[index], capacity);
  }

  std::unique_ptr<StageCache> reading(size_t index, const Sources& sources) override {
    return make_openvino_reading_cache(context_, stages_[index], m_.stages[index], sources);
  }

 private:
  using Settings = std::map<std::string, std::string>;

  // Whether a stage's graph runs without paged attention, which is causal, and keeps K and V of its own.
  bool as_written(const StageSpec& spec) const { return m_.model.two_way == TwoWay::prompt || !spec.keeps(); }

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
    // In bf16 the engine widens integers as it multiplies them, which for one token takes longer than to round it.
    const bool integers = m_.head_precision == "int8" || m_.head_precision == "int4";
    if (compute == "bf16" && integers && !m_.action) head_settings_["INFERENCE_PRECISION_HINT"] = "f32";
  }

  // With the engine's settings for products with weights stored in `precision`, and `further` ones.
  std::unique_ptr<openvino::Compiled> compile(const std::string& name, openvino::Model& model, const std::string& precision,
                                              const Settings& further = {}) const {
    return loading(name, [&] {
      Settings settings = further;
      settings.insert(settings_.begin(), settings_.end());
      if (compute == kIntegers) model.multiply_integers();
      settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = std::to_string(quantised_rows(precision, model.weight_block()));
      return model.compile(settings);
    });
  }

  std::unique_ptr<HostGraph> load(const std::string& name, const GraphIO& io) override {
    auto model = openvino_.read(bundle_, name, io, compute);
    bool vision = name == graphs_.vision, head = name == graphs_.head;
    const bool sized = vision && !m_.image.own_size();
    std::pair<int, int> size;  // clang captures no structured binding before its release 16
    if (sized) size = m_.image.output();
    // For one image, or several of cameras, which lets the engine choose its kernels for these very sizes.
    if (sized) loading(name, [&] { model->reshape(names::kPixels, {m_.action ? -1 : 1, 3, size.first, size.second}); });
    const std::string& precision = vision || name == graphs_.text_tower || name == graphs_.projector ? m_.vision_precision
                                   : head                                                            ? m_.head_precision
                                                                                                     : m_.precision;
    auto dropping = model->letting_go();
    auto compiled = compile(name, *model, precision, vision ? tower_settings_ : head ? head_settings_ : Settings());
    dropping.reset();
    auto graph = std::make_unique<OpenvinoGraph>(name, std::move(compiled), std::move(model), io);
    // The engine packs the weights of a graph of any size when it first runs.
    Floats zero(static_cast<size_t>(m_.model.hidden));
    if (head && !m_.action) graph->run({{names::kHidden, "float32", {1, m_.model.hidden}, zero.data()}});
    return graph;
  }

  std::unique_ptr<openvino::Model> read_stage(const std::string& file, const StageSpec& spec) const {
    auto model = openvino_.read(bundle_, file, stage_io(m_, kDialect, spec.query, &spec), compute);
    if (as_written(spec)) return model;
    const std::set<int64_t> sliding = m_.model.sliding ? m_.model.sliding->layers : std::set<int64_t>();
    loading(file, [&] {
      model->page_caches(spec.cached, m_.model.heads, sliding, !sliding.empty(), m_.model.sees_both_ways(),
                         context_.key_scales);
      model->choose_rows(spec.cached.empty() || spec.cached.back() != spec.last);
    });
    return model;
  }

  // A stage of int4 in int8, where products are of integers; else null.
  std::unique_ptr<openvino::Model> read_for_many(const std::string& file, const StageSpec& spec,
                                                 OpenvinoStage& stage) const {
    if (compute != kIntegers || m_.precision != "int4" || as_written(spec)) return nullptr;
    auto model = read_stage(file, spec);
    auto memory = std::make_unique<WeightsOnDisk>();
    loading(file, [&] { model->bring_to_int8(*memory); });
    memory->seal();
    stage.held = std::move(memory);
    return model;
  }

  void load_stage(size_t index) override {
    const std::string& file = graphs_.stages[index];
    const StageSpec& spec = m_.stages[index];
    OpenvinoStage& stage = stages_[index];
    auto model = read_stage(file, spec), many = read_for_many(file, spec, stage);
    stage.state_parts = loading(file, [&] { return model->split_states(); });
    if (many) loading(file, [&] { return many->split_states(); });
    auto dropping = model->letting_go(), dropping_many = many ? many->letting_go() : nullptr;
    stage.name = file;
    stage.compiled = compile(file, *model, m_.precision);
    if (many) stage.for_many = compile(file, *many, "int8");
    if (as_written(spec)) return;
    OpenvinoStageCache cache(context_, stage, spec, names::kFewTokens + 2);
    auto zeros = [this](size_t count) {
      TokenStates tokens{Rows(count, static_cast<size_t>(m_.model.hidden))};
      for (const TokenInput& each : m_.token_inputs) tokens.inputs[each.name] = Rows(count, static_cast<size_t>(each.width));
      return tokens;
    };
    for (size_t count : {1, static_cast<int>(names::kFewTokens + 1)})
      if (count == 1 || stage.for_many) cache.append(zeros(count), text_positions(0, count));
    if (m_.model.sees_both_ways()) cache.check_both_ways(zeros(2));
  }

  OpenvinoLibrary openvino_;
  OpenvinoCacheContext context_;
  Settings settings_, tower_settings_, head_settings_;
  std::vector<OpenvinoStage> stages_;
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
  return {"openvino",
          kDialect,
          {"f32", "bf16", kIntegers},
          false,
          [](const Bundle& bundle) { return bundle.manifest().model.hidden >= wide(bundle.manifest().precision) ? 2 : 0; },
          [](const Bundle&, const BackendOptions& options) { OpenvinoLibrary::find(options.library); },
          [](const Bundle& bundle, const BackendOptions& options) -> std::unique_ptr<Backend> {
            return std::make_unique<OpenvinoBackend>(bundle, options);
          }};
}

}  // namespace vtxcore
