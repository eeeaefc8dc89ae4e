// The TensorRT backend: engines that vtx-build made of the bundle's graphs, K and V in device memory.
//
// TensorRT and TensorRT-RTX are one API under two names. All work of a backend goes to one stream, one call after the
// other; device memory for inputs and outputs is owned once, by tensor name.
#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "backends/engines.hpp"
#include "backends/graph_backend.hpp"
#include "backends/tables.hpp"
#include "backends/tensorrt/cache.hpp"
#include "backends/tensorrt/device_rows.hpp"
#include "backends/tensorrt/release.hpp"
#include "backends/tensorrt/step.hpp"
#include "host/gpu.hpp"

namespace vtxcore {
namespace {

using Lock = Cuda::Use;

constexpr int64_t kQuestionSlots = 256;  // of text in a forecast

// The bundle's engines for this machine, and the library that runs them.
struct Found {
  EngineSet engines;
  Release release;
};

// Throws Error(bundle) if the bundle holds no engines, Error(device) where none of them fits.
Found find_engines(const Bundle& bundle, const BackendOptions& options) {
  std::optional<Gpu> gpu = find_gpu(options.gpu);
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
      if (engines.flavour == kFlavourRtx)
        fail(Kind::device, "libvtx does not run engines of TensorRT-RTX; run them with vtx in Python, or ",
             "build engines of TensorRT on this machine");
      check_machine(bundle, engines, "", gpu);
      if (bundle.manifest().dialects.count(engines.dialect) == 0)
        fail(Kind::device, "tensorrt reads graphs of the '", engines.dialect,
             "' dialect and this bundle holds none; export it ", "with --dialect ort,", engines.dialect);
      if (!for_tensorrt(engines.dialect))
        fail(Kind::device, "the engines in engines/", engines.target, " are of the '", engines.dialect,
             "' dialect, TensorRT runs those of trt and trt10; ", build_command(bundle, "this"));
      Release release(engines, options.library);
      check_machine(bundle, engines, release.version(engines.version), gpu);
      return {std::move(engines), std::move(release)};
    } catch (const Error& error) {
      if (!refusal) refusal = error;
    }
  }
  throw *refusal;
}

class TensorrtBackend : public GraphBackend {
 public:
  TensorrtBackend(const Bundle& bundle, Found found, int gpu)
      : GraphBackend(bundle, found.engines.dialect), set_(std::move(found.engines)), release_(std::move(found.release)),
        runtime_(release_.runtime()), cuda_(gpu) {
    device = "tensorrt";
    compute = m_.kv_type(dialect) == "float32" ? "f32" : "f16";
    library = cat(flavour_name(set_.flavour), " ", release_.version(set_.version), " (", release_.where(), ")");
    kv_slot_bytes = m_.kv_slot_bytes(m_.kv_bytes(dialect));
    Lock held(cuda_);
    check_memory();
    engines_.emplace(bundle_, set_, *runtime_, cuda_);
    caches_.emplace(TensorrtCacheContext{*engines_, cuda_, m_, dialect, graphs_.score.value_or("")});
    load_rope();
  }

  ~TensorrtBackend() override {
    try {
      Lock held(cuda_);
      cuda_.wait();           // an error may have left work behind that runs in the engines
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the device is gone
    }
  }

  Rows head(const Rows& rows) override {
    auto most = static_cast<size_t>(engines_->longest(graphs_.head));
    Rows out(0, static_cast<size_t>(m_.model.vocab));
    Lock held(cuda_);
    for (size_t start = 0; start < rows.count(); start += most) {
      size_t count = std::min(most, rows.count() - start);
      put(cuda_, engines_->address(names::kHidden), rows, start, count);
      append(out, run_hidden(graphs_.head, names::kLogits, nullptr, count, count, m_.model.vocab));
    }
    return out;
  }

  std::unique_ptr<StageCache> stage(size_t index, int64_t capacity) override {
    Lock held(cuda_);
    return make_tensorrt_cache(*caches_, m_.stages[index], graphs_.stages[index], capacity);
  }

  std::unique_ptr<StageCache> reading(size_t index, const Sources& sources) override {
    return make_tensorrt_reading_cache(*caches_, m_.stages[index], graphs_.stages[index], sources);
  }

  bool steps() const override { return true; }

  Step step(const std::vector<StageCache*>& caches, int64_t token, const Ids& positions, bool logits) override {
    Lock held(cuda_);
    if (!steps_) steps_.emplace(*caches_, graphs_);
    return steps_->run(caches, token, positions, logits);
  }

 private:
  GraphOutputs run(const std::string& file, const std::vector<GraphInput>& inputs, size_t tokens) override {
    if (file == graphs_.vision)
      check_size(inputs.front().shape);
    else
      engines_->check_tokens(file, tokens);
    Lock held(cuda_);
    return engines_->run(file, inputs, static_cast<int64_t>(tokens));
  }

  // Pixels [1, 3, height, width] of an image of its own size must be within what the engine was built for.
  void check_size(const Ids& shape) const {
    int64_t height = shape[2], width = shape[3], longest = engines_->longest_side();
    const char* smaller = m_.layout.name == "native" ? "a smaller --max-pixels, " : "an image less long, ";
    if (std::max(height, width) > longest)
      fail(Kind::device, "the image is ", width, " x ", height, " pixels as the tower sees it, and this engine takes ",
           longest, " a side; use ", smaller, "--device cpu or openvino");
  }

  void load_rope() {
    caches_->tables = read_tables(bundle_);
    std::vector<const char*> wanted{names::kCos, names::kSin};
    if (m_.model.sliding) wanted.insert(wanted.end(), {names::kSlidingCos, names::kSlidingSin});
    for (const char* name : wanted) {
      const Floats& table = caches_->tables.at(name);
      auto make = [&](const char* purpose) {
        rope_.emplace_back(cuda_, table.size() * sizeof(float), purpose);
        return rope_.back().address();
      };
      uint8_t* whole = caches_->rope[name] = make("the rotary tables");
      if (m_.model.position_parts() > 1) caches_->own_rope[name] = make("the tokens' rotary tables");
      cuda_.copy_in(whole, table.data(), table.size() * sizeof(float));
    }
    cuda_.wait();
  }

  // The engines and the caches of a short question must fit what the device has free.
  void check_memory() {
    int64_t engines = 0, slots = std::min(m_.max_context, m_.layout.max_tokens + kQuestionSlots);
    int64_t cached = 0;
    for (const StageSpec& stage : m_.stages) cached += static_cast<int64_t>(stage.cached.size());
    int64_t caches = slots * cached * kv_slot_bytes;
    if (const ModelSpec& model = m_.model; !model.conv_layers.empty())
      caches += 4 * model.state_numbers * static_cast<int64_t>(model.conv_layers.size()) * HeldStates(model).ends;
    for (const auto& [graph, record] : set_.engines) engines += record.bytes;
    auto [left, total] = cuda_.memory();
    if (engines + caches <= left) return;
    fail(Kind::device, "the engines take ", size_text(engines), " and K/V of one image and a question, ", slots, " slots, ",
         size_text(caches), "; ", size_text(left), " of ", size_text(total),
         " of the device is free; export with a smaller --precision, or end other programs on the GPU");
  }

  EngineSet set_;
  Release release_;
  std::unique_ptr<tensorrt::Runtime> runtime_;
  Cuda cuda_;
  std::vector<Buffer> rope_;
  std::optional<LoadedEngines> engines_;
  std::optional<TensorrtCacheContext> caches_;
  std::optional<TokenSteps> steps_;  // once a token was decoded
};

int merit(const Bundle& bundle) { return engine_targets(bundle).empty() ? 0 : 3; }

void check(const Bundle& bundle, const BackendOptions& options) {
  const Manifest& m = bundle.manifest();
  if (m.action) fail(Kind::device, names::kNoActions, "; run the bundle with --device cpu or openvino");
  // whose images have any size
  static const std::set<std::string> kBuilt{"native", "budget", "native_tiles", "slices", "longest"};
  if (m.image.own_size() && kBuilt.count(m.layout.name) == 0)
    fail(Kind::device, names::kNotBuilt, "; use --device cpu or openvino");
  find_engines(bundle, options);
}

std::unique_ptr<Backend> open(const Bundle& bundle, const BackendOptions& options) {
  return std::make_unique<TensorrtBackend>(bundle, find_engines(bundle, options), options.gpu);
}

}  // namespace

Engine tensorrt_engine() { return {"tensorrt", "trt", {"f16", "f32"}, true, merit, check, open}; }

}  // namespace vtxcore
