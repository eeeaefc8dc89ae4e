#include "backends/tensorrt/loaded.hpp"

#include <sys/mman.h>

#include <algorithm>

#include "backends/contract.hpp"

namespace vtxcore {
namespace {

std::string shown(const Ids& shape) {
  std::string out;
  for (int64_t size : shape) out += (out.empty() ? "" : ", ") + std::to_string(size);
  return "[" + out + "]";
}

// An engine's file, mapped while it is read, so that no copy of it stays in memory.
class Mapped {
 public:
  explicit Mapped(const File& file) : bytes_(static_cast<size_t>(file.size())) {
    if (bytes_ == 0) return;
    data_ = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  ~Mapped() {
    if (data_) ::munmap(data_, bytes_);
  }
  const void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// TensorRT's last error, in one line, after ": "; "" if there was none.
std::string reason_of(tensorrt::Runtime& runtime) {
  std::string reason = runtime.reason();
  std::replace(reason.begin(), reason.end(), '\n', ' ');
  return reason.empty() ? "" : ": " + reason.substr(0, 300);
}

void check_engine(const std::string& graph, tensorrt::Deserialized& engine, const GraphIO& io) {
  std::vector<Port> inputs, outputs;
  for (int i = 0; i < engine.tensors(); ++i) {
    tensorrt::EngineTensor tensor = engine.tensor(i);
    (tensor.input ? inputs : outputs).push_back({tensor.name, tensor.dtype, Ids(tensor.shape, tensor.shape + tensor.dims)});
  }
  check_ports(graph, inputs, outputs, io);
}

}  // namespace

void Context::bind(const Shapes& shapes, const Addresses& addresses) {
  for (const auto& [name, shape] : shapes) {
    if (auto known = shapes_.find(name); known != shapes_.end() && known->second == shape) continue;
    if (!execution_->set_shape(name.c_str(), shape.data(), static_cast<int>(shape.size())))
      fail(Kind::device, "the engine of ", graph_, " takes no ", name, " of shape ", shown(shape), reason_of(runtime_),
           "; build the engines again");
    shapes_[name] = shape;
  }
  for (const auto& [name, address] : addresses) {
    if (auto known = addresses_.find(name); known != addresses_.end() && known->second == address) continue;
    if (!execution_->set_address(name.c_str(), address)) run_failure("TensorRT", graph_, "it has no tensor " + name);
    addresses_[name] = address;
  }
}

void Context::enqueue() {
  if (!execution_->enqueue(cuda_.stream())) run_failure("TensorRT", graph_, "it does not start the graph" + reason_of(runtime_));
}

LoadedEngines::LoadedEngines(const Bundle& bundle, const EngineSet& engines, tensorrt::Runtime& runtime, Cuda& cuda)
    : bundle_(bundle), set_(engines), runtime_(runtime), cuda_(cuda) {
  int64_t scratch = 1;
  for (const auto& [graph, io] : contracts()) {
    load(graph, io);
    scratch = std::max(scratch, engines_.at(graph).scratch);
  }
  scratch_ = std::make_unique<Buffer>(cuda, static_cast<size_t>(scratch), "the engines' working memory");
  for (const auto& [name, bytes] : io_bytes())
    buffers_.emplace(name, Buffer(cuda, static_cast<size_t>(bytes), "the tensor " + name));
}

void LoadedEngines::load(const std::string& graph, const GraphIO& io) {
  const EngineRecord& record = check_sources(bundle_, set_, graph);
  File file = open_engine(bundle_, set_, record);
  Mapped content(file);
  std::unique_ptr<tensorrt::Deserialized> engine(runtime_.deserialize(content.data(), content.bytes()));
  if (!engine)
    fail(Kind::bundle, "TensorRT does not take ", record.file, reason_of(runtime_), "; ",
         build_command(bundle_, set_.target));
  check_engine(record.file, *engine, io);
  int64_t scratch = 0;
  for (int profile = 0; profile < engine->profiles(); ++profile) scratch = std::max(scratch, engine->scratch(profile));
  engines_.emplace(graph, Loaded{std::move(engine), scratch});
}

std::map<std::string, GraphIO> LoadedEngines::contracts() const {
  const Manifest& m = bundle_.manifest();
  const std::string& dialect = set_.dialect;
  const Graphs& graphs = m.dialects.at(dialect);
  std::map<std::string, GraphIO> out{
      {graphs.vision, vision_io(m, dialect)}, {graphs.embed, embed_io(m)}, {graphs.head, head_io(m)}};
  for (size_t i = 0; i < m.stages.size(); ++i)
    out.emplace(graphs.stages[i], stage_io(m, dialect, m.stages[i].query, &m.stages[i]));
  for (const std::string& gate : graphs.gates) out.emplace(gate, gate_io(m));
  if (graphs.score) out.emplace(*graphs.score, score_io(m, dialect));
  if (graphs.text_tower) out.emplace(*graphs.text_tower, text_tower_io(m));
  if (graphs.projector) out.emplace(*graphs.projector, projector_io(m));
  return out;
}

// The largest size of every input and output but the caches, over all graphs.
std::map<std::string, int64_t> LoadedEngines::io_bytes() const {
  const Manifest& m = bundle_.manifest();
  const Graphs& graphs = m.dialects.at(set_.dialect);
  int64_t most = 0, widest = 0, hidden = m.model.hidden;
  for (const std::string& stage : graphs.stages) most = std::max(most, longest(stage));
  for (const auto& [graph, engine] : engines_)
    if (graph != graphs.vision) widest = std::max(widest, longest(graph));
  int64_t ids = std::max(longest(graphs.embed), graphs.text_tower ? longest(*graphs.text_tower) : 0);
  std::map<std::string, int64_t> out{{names::kIds, 8 * ids},
                                     {names::kHidden, 4 * hidden * widest},
                                     {names::kHiddenOut, 4 * hidden * most},
                                     {names::kPositions, 8 * most},
                                     {names::kTotalSlots, 4},
                                     {names::kLogits, 4 * m.model.vocab * longest(graphs.head)},
                                     {names::kOdds, 8}};
  GraphIO vision = vision_io(m, set_.dialect);
  for (const std::vector<TensorSpec>& side : {vision.inputs, vision.outputs})
    for (const TensorSpec& spec : side) {
      int64_t bytes = spec.dtype == "int64" ? 8 : 4;
      for (const auto& size : spec.shape) {
        const int64_t* fixed = std::get_if<int64_t>(&size);
        const std::string& free = fixed ? "" : std::get<std::string>(size);
        bytes *= fixed ? *fixed : free == "images" ? 1 : free == "states" ? m.model.tower.states : m.model.tower.tokens;
      }
      out[spec.name] = bytes;
    }
  if (graphs.score) {
    out[names::kQuery] = 4 * m.model.heads * m.model.head_dim * most;
    for (const char* name : {names::kAttentionSum, names::kAttentionMax}) out[name] = 4 * m.max_context;
  }
  if (graphs.projector) out[names::kTowerStates] = 4 * m.model.tower.feature_width * longest(*graphs.projector);
  if (m.text_tower) out[names::kTextEmbedding] = 4 * m.text_tower->width;
  return out;
}

std::unique_ptr<Context> LoadedEngines::new_context(const std::string& graph, int profile) {
  tensorrt::Deserialized& engine = *engines_.at(graph).engine;
  std::unique_ptr<tensorrt::Execution> made(engine.context());
  if (!made || !made->set_profile(profile < 0 ? engine.profiles() + profile : profile, cuda_.stream()))
    fail(Kind::device, "TensorRT makes no context for ", graph, reason_of(runtime_), "; end other programs on the GPU");
  cuda_.wait();
  made->set_memory(scratch_->address(), static_cast<int64_t>(scratch_->size()));
  return std::make_unique<Context>(graph, std::move(made), runtime_, cuda_);
}

Context& LoadedEngines::context(const std::string& graph, int profile) {
  std::unique_ptr<Context>& found = contexts_[{graph, profile}];
  if (!found) found = new_context(graph, profile);
  return *found;
}

void LoadedEngines::check_tokens(const std::string& graph, size_t tokens) const {
  if (static_cast<int64_t>(tokens) > longest(graph))
    fail(Kind::context, "the prompt takes ", tokens, " tokens at once, the engine of ", graph, " was built for at most ",
         longest(graph), "; ask for less, or ", build_command(bundle_, "this"));
}

void LoadedEngines::run(const std::string& graph, const std::vector<Input>& inputs, const std::vector<Output>& outputs) {
  Context& used = context(graph, 0);
  Addresses addresses;
  Shapes shapes;
  for (const Input& input : inputs) {
    addresses[input.name] = address(input.name);
    shapes[input.name] = input.shape;
    cuda_.copy_in(addresses[input.name], input.data, input.bytes);
  }
  for (const Output& output : outputs) addresses[output.name] = address(output.name);
  used.bind(shapes, addresses);
  used.enqueue();
  for (const Output& output : outputs) cuda_.copy_out(output.data, addresses[output.name], output.bytes);
  cuda_.wait();
}

}  // namespace vtxcore
