// The ONNX Runtime backend: one session per graph, K/V updated in place.
#include <algorithm>

#include "backends/engines.hpp"
#include "backends/ort/cache.hpp"
#include "backends/tables.hpp"

namespace vtxcore {
namespace {

class OrtBackend : public HostBackend {
 public:
  OrtBackend(const Bundle& bundle, const BackendOptions& options)
      : HostBackend(bundle, "ort"), ort_(options.library), threads_(threads_of(options.threads)),
        context_{ort_, m_, {}, {}, nullptr} {
    ort_.check_release(m_.kv_dtype);
    device = "cpu", compute = options.compute;
    library = cat("onnxruntime ", ort_.version, " (", ort_.library().where(), ")");
    kv_slot_bytes = m_.kv_slot_bytes(m_.kv_bytes("ort"));
    stages_.resize(m_.stages.size());
    load_graphs(is_roomy(m_, compute) ? threads_ : 1);
    context_.score = score();
    context_.constants = read_tables(bundle);
    for (const auto& [name, values] : context_.constants)
      context_.tensors.emplace(name, tensor_over(ort_, values.data(), table_shape(m_, name), "float32"));
  }

  std::unique_ptr<StageCache> stage(size_t index, int64_t capacity) override {
    return std::make_unique<OrtStageCache>(context_, *stages_[index], m_.stages[index], capacity);
  }

  std::unique_ptr<StageCache> reading(size_t index, const Sources& sources) override {
    return std::make_unique<OrtStageCache>(context_, *stages_[index], m_.stages[index], 0, sources);
  }

 private:
  std::unique_ptr<HostGraph> load(const std::string& file, const GraphIO& io) override {
    // Embedding and gates are too little work to share among threads.
    bool light = file == graphs_.embed || std::count(graphs_.gates.begin(), graphs_.gates.end(), file) > 0;
    return std::make_unique<OrtGraph>(ort_, bundle_, file, io, light ? 1 : threads_);
  }

  void load_stage(size_t index) override {
    const StageSpec& spec = m_.stages[index];
    stages_[index] =
        std::make_unique<OrtGraph>(ort_, bundle_, graphs_.stages[index], stage_io(m_, "ort", spec.query, &spec), threads_);
  }

  OrtLibrary ort_;
  int threads_;
  std::vector<std::unique_ptr<OrtGraph>> stages_;
  OrtCacheContext context_;
};

}  // namespace

Engine ort_engine() {
  return {"cpu",
          "ort",
          {"f32"},
          false,
          [](const Bundle&) { return 1; },
          [](const Bundle&, const BackendOptions& options) { OrtLibrary::find(options.library); },
          [](const Bundle& bundle, const BackendOptions& options) -> std::unique_ptr<Backend> {
            return std::make_unique<OrtBackend>(bundle, options);
          }};
}

}  // namespace vtxcore
