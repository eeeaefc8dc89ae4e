#include "backends/tensorrt/loaded.hpp"

#include <sys/mman.h>

#include <algorithm>

#include "backends/contract.hpp"
#include "backends/states.hpp"
#include "backends/tensorrt/regions.hpp"

namespace vtxcore {
namespace {

int64_t bytes_of(const std::string& dtype) { return dtype == "int64" ? 8 : 4; }

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

// The names of an engine's inputs and outputs, which are those of its graph but for inputs that nothing reads.
std::set<std::string> checked_tensors(const std::string& graph, tensorrt::Deserialized& engine, GraphIO io) {
  std::vector<Port> inputs, outputs;
  std::set<std::string> out;
  for (int i = 0; i < engine.tensors(); ++i) {
    tensorrt::EngineTensor tensor = engine.tensor(i);
    (tensor.input ? inputs : outputs).push_back({tensor.name, tensor.dtype, Ids(tensor.shape, tensor.shape + tensor.dims)});
    out.insert(tensor.name);
  }
  auto left_out = [&](const TensorSpec& spec) { return out.count(spec.name) == 0; };
  io.inputs.erase(std::remove_if(io.inputs.begin(), io.inputs.end(), left_out), io.inputs.end());
  check_ports(graph, inputs, outputs, io);
  return out;
}

}  // namespace

std::string new_slots_of(const StageSpec& stage) { return cat("new K and V of layers ", stage.first, " to ", stage.last); }

void Context::bind(const Shapes& shapes, const Addresses& addresses) {
  for (const auto& [name, shape] : shapes) {
    if (tensors_.count(name) == 0) continue;
    if (auto known = shapes_.find(name); known != shapes_.end() && known->second == shape) continue;
    if (!execution_->set_shape(name.c_str(), shape.data(), static_cast<int>(shape.size())))
      fail(Kind::device, "the engine of ", graph_, " takes no ", name, " of shape ", shape, reason_of(runtime_),
           "; build the engines again");
    shapes_[name] = shape;
  }
  for (const auto& [name, address] : addresses) {
    if (tensors_.count(name) == 0) continue;
    if (auto known = addresses_.find(name); known != addresses_.end() && known->second == address) continue;
    if (!execution_->set_address(name.c_str(), address)) run_failure("TensorRT", graph_, "it has no tensor " + name);
    addresses_[name] = address;
  }
}

void Context::enqueue() {
  if (!execution_->enqueue(cuda_.stream()))
    run_failure("TensorRT", graph_, "it does not start the graph" + reason_of(runtime_));
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
  std::set<std::string> tensors = checked_tensors(record.file, *engine, io);
  int64_t scratch = 0;
  for (int profile = 0; profile < engine->profiles(); ++profile) scratch = std::max(scratch, engine->scratch(profile));
  engines_.emplace(graph, Loaded{std::move(engine), scratch, io, std::move(tensors)});
}

std::map<std::string, GraphIO> LoadedEngines::contracts() const {
  const Manifest& m = bundle_.manifest();
  const std::string& dialect = set_.dialect;
  const Graphs& graphs = m.dialects.at(dialect);
  std::map<std::string, GraphIO> out{
      {graphs.vision, vision_io(m, dialect)}, {graphs.embed, embed_io(m)}, {graphs.head, head_io(m, dialect)}};
  for (size_t i = 0; i < m.stages.size(); ++i)
    out.emplace(graphs.stages[i], stage_io(m, dialect, m.stages[i].query, &m.stages[i]));
  for (const std::string& gate : graphs.gates) out.emplace(gate, gate_io(m));
  if (graphs.score) out.emplace(*graphs.score, score_io(m, dialect));
  if (graphs.text_tower) out.emplace(*graphs.text_tower, text_tower_io(m));
  if (graphs.projector) out.emplace(*graphs.projector, projector_io(m));
  return out;
}

// The largest size of every input and output but the caches and the rotary tables, over all graphs.
std::map<std::string, int64_t> LoadedEngines::io_bytes() const {
  const Manifest& m = bundle_.manifest();
  const std::string& vision = m.dialects.at(set_.dialect).vision;
  const bool own = m.image.own_size();
  const int64_t pictures = own && m.video ? 2 : 1;  // a pair of frames
  int64_t most = own ? longest_side() : 0, unit = m.model.tower.patch * m.model.tower.square;
  std::map<std::string, int64_t> out;
  for (const auto& [graph, loaded] : engines_)
    for (const std::vector<TensorSpec>& side : {loaded.io.inputs, loaded.io.outputs})
      for (const TensorSpec& spec : side) {
        if (spec.shape.size() == 4 && spec.name != names::kPixels) continue;
        if (spec.name == names::kCos || spec.name == names::kSin) continue;
        if (spec.name == names::kSlidingCos || spec.name == names::kSlidingSin) continue;
        if (spec.name == names::kState || spec.name == names::kStateEnds) continue;
        int64_t bytes = bytes_of(spec.dtype);
        for (const auto& size : spec.shape) {
          const int64_t* fixed = std::get_if<int64_t>(&size);
          const std::string free = fixed ? "" : std::get<std::string>(size);
          bytes *= fixed                                 ? *fixed
                   : free == "images"                    ? pictures
                   : free == "height" || free == "width" ? most
                   : free == "states"                    ? m.model.tower.states
                   : free != "tokens"                    ? m.max_context
                   : graph != vision                     ? longest(graph)
                   : own                                 ? most * most / (unit * unit)
                                                         : m.model.tower.tokens;
        }
        out[spec.name] = std::max(out[spec.name], bytes);
      }
  if (!m.model.conv_layers.empty()) {  // states of one token; more are written where they are held
    size_t stateful = 0;
    for (const StageSpec& stage : m.stages) stateful = std::max(stateful, stage.stateful.size());
    out[names::kStateEnds] = 8 * HeldStates(m.model).ends;
    out[names::kStateOut] = 4 * m.model.state_numbers * static_cast<int64_t>(stateful);
  }
  for (size_t i = 0; i < m.stages.size(); ++i) {
    if (m.stages[i].cached.empty()) continue;
    const KVLayout layout(m.model, m.stages[i], m.kv_bytes(set_.dialect));
    int64_t at_once = layout.written_in_place() ? 1 : longest(m.dialects.at(set_.dialect).stages[i]);
    out[new_slots_of(m.stages[i])] = static_cast<int64_t>(layout.bytes(static_cast<size_t>(at_once)));
  }
  return out;
}

int64_t LoadedEngines::longest_side() const {
  const Manifest& m = bundle_.manifest();
  if (m.image.own_size()) return set_.engines.at(m.dialects.at(set_.dialect).vision).longest("height");
  auto [height, width] = m.image.output();
  return std::max(height, width);
}

std::unique_ptr<Context> LoadedEngines::new_context(const std::string& graph, int profile) {
  const Loaded& loaded = engines_.at(graph);
  tensorrt::Deserialized& engine = *loaded.engine;
  std::unique_ptr<tensorrt::Execution> made(engine.context());
  if (!made || !made->set_profile(profile < 0 ? engine.profiles() + profile : profile, cuda_.stream()))
    fail(Kind::device, "TensorRT makes no context for ", graph, reason_of(runtime_), "; end other programs on the GPU");
  cuda_.wait();
  made->set_memory(scratch_->address(), static_cast<int64_t>(scratch_->size()));
  return std::make_unique<Context>(graph, loaded.tensors, std::move(made), runtime_, cuda_);
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

GraphOutputs LoadedEngines::run(const std::string& graph, const std::vector<GraphInput>& inputs, int64_t tokens) {
  Context& used = context(graph, 0);
  Addresses addresses;
  Shapes shapes;
  for (const GraphInput& input : inputs) {
    auto bytes = static_cast<size_t>(bytes_of(input.dtype));
    for (int64_t size : input.shape) bytes *= static_cast<size_t>(size);
    addresses[input.name] = address(input.name);
    shapes[input.name] = input.shape;
    if (input.data) cuda_.copy_in(addresses[input.name], input.data, bytes);
  }
  const std::vector<TensorSpec>& given = engines_.at(graph).io.outputs;
  for (const TensorSpec& spec : given) addresses[spec.name] = address(spec.name);
  used.bind(shapes, addresses);
  used.enqueue();
  GraphOutputs out;
  for (const TensorSpec& spec : given) {
    if (spec.dtype == "int32") continue;  // the best token, for steps
    GraphOutput& output = out[spec.name];
    for (const auto& size : spec.shape) {
      const int64_t* fixed = std::get_if<int64_t>(&size);
      const std::string free = fixed ? "" : std::get<std::string>(size);
      int64_t states = bundle_.manifest().model.tower.states;
      output.shape.push_back(fixed ? *fixed : free == "images" ? 1 : free == "states" ? states : tokens);
    }
    bool whole = spec.dtype == "int64";
    whole ? output.whole.resize(output.count()) : output.floats.resize(output.count());
    void* to = whole ? static_cast<void*>(output.whole.data()) : output.floats.data();
    cuda_.copy_out(to, addresses[spec.name], output.count() * static_cast<size_t>(bytes_of(spec.dtype)));
  }
  cuda_.wait();
  return out;
}

}  // namespace vtxcore
