// The TensorRT backend: engines that vtx-build made of the bundle's graphs, K and V in device memory.
//
// TensorRT and TensorRT-RTX are one API under two names. All work of a backend goes to one stream, one call after the
// other; device memory for inputs and outputs is owned once, by tensor name.
#include <algorithm>
#include <cstring>
#include <optional>

#include "backends/engines.hpp"
#include "backends/tables.hpp"
#include "backends/tensorrt/cache.hpp"
#include "backends/tensorrt/release.hpp"
#include "host/gpu.hpp"

namespace vtxcore {
namespace {

using Lock = Cuda::Use;

// The bundle's engines for this machine, and the library that runs them.
struct Found {
  EngineSet engines;
  Release release;
};

// Throws Error(bundle) if the bundle holds no engines, Error(device) where none of them fits.
Found find_engines(const Bundle& bundle, const std::string& library) {
  std::optional<Gpu> gpu = find_gpu();
  std::vector<EngineSet> known;
  for (const std::string& target : engine_targets(bundle)) known.push_back(read_engines(bundle, target));
  if (known.empty()) fail(Kind::bundle, bundle.folder(), " holds no engines; ", build_command(bundle, "this"));
  std::stable_sort(known.begin(), known.end(), [&](const EngineSet& a, const EngineSet& b) {
    auto other = [&](const EngineSet& engines) { return gpu && engines.capability != gpu->capability; };
    return other(a) < other(b);
  });
  std::optional<Error> refusal;
  for (EngineSet& engines : known) {
    try {
      check_machine(bundle, engines, "", gpu);
      if (bundle.manifest().dialects.count(engines.dialect) == 0)
        fail(Kind::device, "tensorrt reads graphs of the '", engines.dialect,
             "' dialect and this bundle holds none; export it ", "with --dialect ort,", engines.dialect);
      Release release(engines, library);
      check_machine(bundle, engines, release.version(engines.version), gpu);
      return {std::move(engines), std::move(release)};
    } catch (const Error& error) {
      if (!refusal) refusal = error;
    }
  }
  throw *refusal;
}

class TensorrtBackend : public Backend {
 public:
  TensorrtBackend(const Bundle& bundle, Found found)
      : bundle_(bundle), m_(bundle.manifest()), set_(std::move(found.engines)), release_(std::move(found.release)),
        runtime_(release_.runtime()), graphs_(m_.dialects.at(set_.dialect)) {
    device = "tensorrt", dialect = set_.dialect;
    grows_ = dialect == "plain";
    compute = grows_ || m_.kv_type(dialect) == "float32" ? "f32" : "f16";
    library = cat(flavour_name(set_.flavour), " ", release_.version(set_.version), " (", release_.where(), ")");
    kv_slot_bytes = 2 * m_.model.kv_heads * m_.model.head_dim * m_.kv_bytes(dialect);
    Lock held(cuda_);
    check_memory();
    engines_.emplace(bundle_, set_, *runtime_, cuda_);
    caches_.emplace(TensorrtCacheContext{*engines_, cuda_, m_, dialect, {}, graphs_.score.value_or("")});
    load_rope();
  }

  Rows embed(const Ids& ids) override {
    Input in{names::kIds, ids.data(), ids.size() * sizeof(int64_t), {static_cast<int64_t>(ids.size())}};
    return run(graphs_.embed, in, names::kHidden, ids.size(), m_.model.hidden);
  }

  Rows head(const Rows& rows) override {
    auto most = static_cast<size_t>(engines_->longest(graphs_.head));
    Rows out(0, static_cast<size_t>(m_.model.vocab));
    for (size_t start = 0; start < rows.count(); start += most) {
      size_t count = std::min(most, rows.count() - start);
      Input in{names::kHidden,
               rows.row(start),
               count * rows.width * sizeof(float),
               {static_cast<int64_t>(count), m_.model.hidden}};
      Rows part = run(graphs_.head, in, names::kLogits, count, m_.model.vocab);
      out.data.insert(out.data.end(), part.data.begin(), part.data.end());
    }
    return out;
  }

  Floats gate(int64_t k, const Rows& rows) override {
    auto at = static_cast<size_t>(std::find(m_.gates.begin(), m_.gates.end(), k) - m_.gates.begin());
    engines_->check_tokens(graphs_.gates.at(at), rows.count());
    Input in{names::kHidden,
             rows.data.data(),
             rows.data.size() * sizeof(float),
             {static_cast<int64_t>(rows.count()), m_.model.hidden}};
    return run(graphs_.gates.at(at), in, names::kOdds, 1, 2).data;
  }

  Floats text_tower(const Ids& ids) override {
    engines_->check_tokens(*graphs_.text_tower, ids.size());
    Input in{names::kIds, ids.data(), ids.size() * sizeof(int64_t), {static_cast<int64_t>(ids.size())}};
    return run(*graphs_.text_tower, in, names::kTextEmbedding, 1, m_.text_tower->width).data;
  }

  std::shared_ptr<const ImageTokens> vision(const Floats& pixels, const Extras& extras) override {
    auto [height, width] = m_.image.output();
    GraphIO io = vision_io(m_, dialect);
    float tau = names::kTauDefault;
    if (auto given = extras.find(names::kTau); given != extras.end()) tau = given->second;
    std::vector<Input> inputs{{names::kPixels, pixels.data(), pixels.size() * sizeof(float), {1, 3, height, width}}};
    if (io.inputs.size() > 1) inputs.push_back({names::kTau, &tau, sizeof tau, {1}});
    auto tokens = static_cast<size_t>(m_.model.tower.tokens);
    VisionOutputs found;
    std::vector<Output> outputs;
    for (const TensorSpec& spec : io.outputs) {
      if (spec.dtype == "int64") {
        Ids& values = found.whole[spec.name] = Ids(tokens);
        outputs.push_back({spec.name, values.data(), tokens * sizeof(int64_t)});
      } else if (Rows* rows = found.rows_of(spec.name)) {
        auto count = static_cast<size_t>(rows == &found.tower ? m_.model.tower.states : m_.model.tower.tokens);
        *rows = Rows(count, static_cast<size_t>(width_of(spec)));
        outputs.push_back({spec.name, rows->data.data(), rows->data.size() * sizeof(float)});
      } else {
        Floats& values = found.signals[spec.name] = Floats(tokens);
        outputs.push_back({spec.name, values.data(), tokens * sizeof(float)});
      }
    }
    Lock held(cuda_);
    engines_->run(graphs_.vision, inputs, outputs);
    return image_tokens(std::move(found), m_.model.tower.feature_width);
  }

  Rows project(const Rows& states) override {
    engines_->check_tokens(*graphs_.projector, states.count());
    Input in{names::kTowerStates,
             states.data.data(),
             states.data.size() * sizeof(float),
             {static_cast<int64_t>(states.count()), static_cast<int64_t>(states.width)}};
    return run(*graphs_.projector, in, names::kHidden, states.count(), m_.model.hidden);
  }

  std::unique_ptr<StageCache> stage(size_t index, int64_t capacity) override {
    Lock held(cuda_);
    auto make = grows_ ? make_growing_cache : make_tensorrt_cache;
    return make(*caches_, m_.stages[index], graphs_.stages[index], capacity);
  }

 private:
  // Runs a graph of one profile on a host array; its one output [count, width], float32.
  Rows run(const std::string& graph, const Input& input, const char* output, size_t count, int64_t width) {
    engines_->check_tokens(graph, static_cast<size_t>(input.shape.front()));
    Rows out(count, static_cast<size_t>(width));
    Lock held(cuda_);
    engines_->run(graph, {input}, {{output, out.data.data(), out.data.size() * sizeof(float)}});
    return out;
  }

  void load_rope() {
    std::map<std::string, Floats> tables = read_tables(bundle_);
    for (const char* name : {names::kCos, names::kSin}) {
      const Floats& table = tables.at(name);
      rope_.emplace_back(cuda_, table.size() * sizeof(float), "the rotary tables");
      cuda_.copy_in(rope_.back().address(), table.data(), rope_.back().size());
      cuda_.wait();
      caches_->rope[name] = rope_.back().address();
    }
  }

  // The engines and one cache a stage must fit what the device has free.
  void check_memory() {
    int64_t engines = 0, slot = m_.model.layers * kv_slot_bytes * (grows_ ? 2 : 1);
    for (const auto& [graph, record] : set_.engines) engines += record.bytes;
    auto [left, total] = cuda_.memory();
    if (engines + m_.max_context * slot <= left) return;
    int64_t fitting = std::max<int64_t>(0, left - engines) / slot;
    fail(Kind::device, "the engines take ", size_text(engines), " and a context of ", m_.max_context, " slots ",
         size_text(m_.max_context * slot), ", ", size_text(left), " of ", size_text(total), " of the device is free; ",
         fitting > m_.layout.max_tokens ? cat("--max-context ", fitting, " would fit") : "even the engines do not fit",
         "; export with it or with a smaller --precision, or end other programs on the GPU");
  }

  const Bundle& bundle_;
  const Manifest& m_;
  EngineSet set_;
  Release release_;
  std::unique_ptr<tensorrt::Runtime> runtime_;
  const Graphs& graphs_;
  bool grows_ = false;
  Cuda cuda_;
  std::vector<Buffer> rope_;
  std::optional<LoadedEngines> engines_;
  std::optional<TensorrtCacheContext> caches_;
};

int merit(const Bundle& bundle) { return engine_targets(bundle).empty() ? 0 : 3; }

std::string obstacle(const Bundle& bundle, const BackendOptions& options) {
  try {
    find_engines(bundle, options.library);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::unique_ptr<Backend> open(const Bundle& bundle, const BackendOptions& options) {
  return std::make_unique<TensorrtBackend>(bundle, find_engines(bundle, options.library));
}

}  // namespace

Engine tensorrt_engine() { return {"tensorrt", "trt", {"f16", "f32"}, merit, obstacle, open}; }

}  // namespace vtxcore
