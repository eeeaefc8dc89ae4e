// The ONNX Runtime backend: one session per graph, K/V updated in place.
#include <cmath>
#include <mutex>

#include "backends/engines.hpp"
#include "backends/loading.hpp"
#include "backends/ort/cache.hpp"
#include "backends/tables.hpp"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace vtxcore {
namespace {

class OrtBackend : public Backend {
 public:
  OrtBackend(const Bundle& bundle, const BackendOptions& options)
      : bundle_(bundle), m_(bundle.manifest()), ort_(options.library),
        threads_(options.threads > 0 ? options.threads : cores()), context_{ort_, m_, {}, {}, nullptr} {
    ort_.check_release(m_.kv_dtype);
    device = "cpu", dialect = "ort", compute = options.compute;
    library = cat("onnxruntime ", ort_.version, " (", ort_.library().where(), ")");
    kv_slot_bytes = 2 * m_.model.kv_heads * m_.model.head_dim * m_.kv_bytes("ort");
    load_graphs();
    context_.score = score_.get();
    context_.constants = read_tables(bundle);
    for (const auto& [name, values] : context_.constants)
      context_.tensors.emplace(name, tensor_over(ort_, values.data(), table_shape(m_, name), "float32"));
#ifdef __GLIBC__
    ::malloc_trim(0);  // what loading freed: weights before they were packed
#endif
  }

  Rows embed(const Ids& ids) override {
    OrtTensor in = tensor_over(ort_, ids.data(), {static_cast<int64_t>(ids.size())}, "int64");
    return rows_of_each(*embed_, in, m_.model.hidden, ids.size());
  }

  Rows head(const Rows& rows) override {
    OrtTensor in = over(rows);
    return rows_of_each(*head_, in, m_.model.vocab, rows.count());
  }

  Floats gate(int64_t k, const Rows& rows) override {
    OrtTensor in = over(rows);
    const OrtGraph& graph = *gates_.at(k);
    return rows_of_each(graph, in, 2, 1).data;
  }

  std::shared_ptr<const ImageTokens> vision(const Floats& pixels, const Extras& extras) override {
    GraphIO io = vision_io(m_, "ort");
    {
      std::lock_guard<std::mutex> lock(vision_lock_);
      if (!vision_) vision_ = load(m_.dialects.at("ort").vision, io);
    }
    auto [height, width] = m_.image.output();
    OrtTensor in = tensor_over(ort_, pixels.data(), {1, 3, height, width}, "float32");
    float tau = names::kTauDefault;
    if (auto given = extras.find(names::kTau); given != extras.end()) tau = given->second;
    OrtTensor tau_tensor = tensor_over(ort_, &tau, {1}, "float32");
    std::vector<const OrtTensor*> inputs{&in};
    if (io.inputs.size() > 1) inputs.push_back(&tau_tensor);
    std::vector<OrtTensor> outputs = vision_->run(inputs);
    VisionOutputs found;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const std::string& name = io.outputs[i].name;
      if (io.outputs[i].dtype == "int64")
        found.whole[name] = values<int64_t>(outputs[i]);
      else if (Rows* rows = found.rows_of(name))
        *rows = rows_of(outputs[i], width_of(io.outputs[i]), vision_->name);
      else
        found.signals[name] = values<float>(outputs[i]);
    }
    return image_tokens(std::move(found), m_.model.tower.feature_width);
  }

  Floats text_tower(const Ids& ids) override {
    {
      std::lock_guard<std::mutex> lock(vision_lock_);
      if (!text_tower_) text_tower_ = load(m_.dialects.at("ort").text_tower.value(), text_tower_io(m_));
    }
    OrtTensor in = tensor_over(ort_, ids.data(), {static_cast<int64_t>(ids.size())}, "int64");
    return rows_of_each(*text_tower_, in, m_.text_tower.value().width, 1).data;
  }

  Rows project(const Rows& states) override {
    {
      std::lock_guard<std::mutex> lock(vision_lock_);
      if (!projector_) projector_ = load(m_.dialects.at("ort").projector.value(), projector_io(m_));
    }
    return rows_of_each(*projector_, over(states), m_.model.hidden, states.count());
  }

  std::unique_ptr<StageCache> stage(size_t index, int64_t capacity) override {
    return std::make_unique<OrtStageCache>(context_, *stages_[index], m_.stages[index], capacity);
  }

 private:
  using GraphPtr = std::unique_ptr<OrtGraph>;

  GraphPtr load(const std::string& name, const GraphIO& io, int threads) {
    return std::make_unique<OrtGraph>(ort_, bundle_, name, io, threads);
  }
  GraphPtr load(const std::string& name, const GraphIO& io) { return load(name, io, threads_); }

  // All but those that only images and texts need, side by side where memory is to spare. Embedding and gates are too little
  // work to share among threads.
  void load_graphs() {
    const Graphs& graphs = m_.dialects.at("ort");
    stages_.resize(m_.stages.size());
    for (int64_t k : m_.gates) gates_[k];
    Loads loads;
    // The head may be as large as many layers.
    loads.add(m_.model.layers, [&] { head_ = load(graphs.head, head_io(m_)); });
    for (size_t i = 0; i < m_.stages.size(); ++i)
      loads.add(m_.stages[i].layers(),
                [&, i] { stages_[i] = load(graphs.stages[i], stage_io(m_, "ort", m_.stages[i].query, &m_.stages[i])); });
    loads.add(1, [&] { embed_ = load(graphs.embed, embed_io(m_), 1); });
    for (size_t i = 0; i < m_.gates.size(); ++i)
      loads.add(0, [&, i] { gates_.at(m_.gates[i]) = load(graphs.gates[i], gate_io(m_), 1); });
    if (graphs.score) loads.add(0, [&] { score_ = load(*graphs.score, score_io(m_, "ort")); });
    loads.run(is_roomy(m_, compute) ? threads_ : 1);
  }

  OrtTensor over(const Rows& rows) {
    return tensor_over(ort_, rows.data.data(), {static_cast<int64_t>(rows.count()), static_cast<int64_t>(rows.width)},
                       "float32");
  }

  template <typename Value>
  static std::vector<Value> values(const OrtTensor& tensor) {
    size_t count = 1;
    for (int64_t side : tensor.shape()) count *= static_cast<size_t>(side);
    auto data = static_cast<const Value*>(tensor.data());
    return std::vector<Value>(data, data + count);
  }

  static Rows rows_of(const OrtTensor& tensor, int64_t width, const std::string& graph) {
    Ids shape = tensor.shape();
    check_width(graph, shape, width);
    Rows out;
    out.width = static_cast<size_t>(width);
    out.data = values<float>(tensor);
    return out;
  }

  // The one output of a graph, a row for each of so many tokens.
  static Rows rows_of_each(const OrtGraph& graph, const OrtTensor& in, int64_t width, size_t count) {
    Rows out = rows_of(graph.run({&in})[0], width, graph.name);
    check_rows(graph.name, out.count(), count);
    return out;
  }

  const Bundle& bundle_;
  const Manifest& m_;
  OrtLibrary ort_;
  int threads_;
  GraphPtr embed_, head_, score_, vision_, text_tower_, projector_;
  std::vector<GraphPtr> stages_;
  std::map<int64_t, GraphPtr> gates_;
  std::mutex vision_lock_;
  OrtCacheContext context_;
};

}  // namespace

Engine ort_engine() {
  Engine engine;
  engine.device = "cpu", engine.dialect = "ort", engine.compute = {"f32"};
  engine.merit = [](const Bundle&) { return 1; };
  engine.obstacle = [](const Bundle&, const BackendOptions& options) -> std::string {
    return OrtLibrary::obstacle(options.library);
  };
  engine.open = [](const Bundle& bundle, const BackendOptions& options) -> std::unique_ptr<Backend> {
    return std::make_unique<OrtBackend>(bundle, options);
  };
  return engine;
}

}  // namespace vtxcore
