// TensorRT as libvtx calls it, compiled with one release's headers: an engine's file names the ONNX graph it was built
// from and its profiles, as tests/support/gpu_standin.py writes it, and ONNX Runtime runs the graph on the CPU.
//
// TensorRT's public classes pass every call on to an object with a virtual table of the release. Here that table is made
// by hand: the few functions that libvtx calls, each in the slot that the compiler has for it, and a trap in all others.
#include <NvInferRuntime.h>
#include <onnxruntime_c_api.h>

#include <algorithm>
#include <cstring>

#include "backends/ort/graph.hpp"
#include "base/json.hpp"
#include "gpu.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

using nvinfer1::DataType;
using nvinfer1::Dims;
using standin::Gpu;
using standin::require;
using vtxcore::Ids;
using vtxcore::Json;

namespace {

constexpr size_t kSlots = 256;
constexpr int64_t kScratch = 4096;

[[noreturn]] void trap() { standin::broken("a function of TensorRT is called that libvtx does not need"); }

struct Table {
  void* slots[kSlots];
  Table() { std::fill(slots, slots + kSlots, reinterpret_cast<void*>(&trap)); }
  // A pointer to a virtual member is its offset in the table plus one (Itanium C++ ABI, x86-64).
  template <typename Member>
  void set(Member member, void* function) {
    uintptr_t offset = 0;
    std::memcpy(&offset, &member, sizeof offset);
    require(offset % 2 == 1, "a member that is not virtual");
    slots[(offset - 1) / sizeof(void*)] = function;
  }
};

// What a public class points to: a table, and whose it is.
template <typename Owner>
struct Implementation {
  void** table;
  Owner* owner;
};

struct Port {
  std::string name;
  bool input;
  ONNXTensorElementDataType type;
  Ids shape;  // -1 where free
};

vtxcore::OrtLibrary& ort() {
  static auto* library = new vtxcore::OrtLibrary("");
  return *library;
}

void check(OrtStatus* status) { ort().check(status, "the stand-in's graph"); }

size_t bytes_of(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16: return 2;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: return 8;
    default: return 4;
  }
}

size_t count_of(const Ids& shape) {
  size_t count = 1;
  for (int64_t size : shape) count *= static_cast<size_t>(size);
  return count;
}

// --- contexts -------------------------------------------------------------------------------------

struct EngineImpl;

struct ContextImpl {
  Implementation<ContextImpl> implementation;
  EngineImpl& engine;
  int profile = -1;
  void* scratch = nullptr;
  std::map<std::string, Ids> shapes;
  std::map<std::string, void*> addresses;

  explicit ContextImpl(EngineImpl& of);
};

struct EngineImpl {
  Implementation<EngineImpl> implementation;
  OrtSession* session = nullptr;
  std::string graph;
  std::vector<Port> ports;
  std::vector<Port> unread;  // inputs of the graph that the engine does not have
  std::vector<std::map<std::string, std::array<Ids, 3>>> profiles;
  int contexts = 0;

  const Port& port(const std::string& name) const {
    for (const Port& found : ports)
      if (found.name == name) return found;
    standin::broken("the engine has no tensor " + name);
  }
  bool has(const std::string& name) const {
    return std::any_of(ports.begin(), ports.end(), [&](const Port& port) { return port.name == name; });
  }
};

using ContextSelf = Implementation<ContextImpl>;
using EngineSelf = Implementation<EngineImpl>;

bool set_profile(ContextSelf* self, int32_t profile, cudaStream_t) {
  ContextImpl& context = *self->owner;
  require(context.profile < 0, "the profile is set twice");
  require(profile >= 0 && profile < static_cast<int>(context.engine.profiles.size()), "a profile that is not there");
  context.profile = profile;
  return true;
}

void set_memory(ContextSelf* self, void* memory, int64_t bytes) {
  ContextImpl& context = *self->owner;
  require(context.profile >= 0, "working memory before the profile");
  require(bytes >= kScratch * (context.profile + 1), "too little working memory");
  Gpu::one().holds(memory, static_cast<size_t>(bytes), "working memory");
  context.scratch = memory;
}

bool set_shape(ContextSelf* self, const char* name, const Dims& dims) {
  ContextImpl& context = *self->owner;
  Ids shape(dims.d, dims.d + dims.nbDims);
  require(context.profile >= 0, "a shape before the profile");
  require(context.engine.port(name).input, std::string("a shape of the output ") + name);
  auto known = context.shapes.find(name);
  require(known == context.shapes.end() || known->second != shape, std::string("the shape of ") + name + " is set twice");
  const auto& profile = context.engine.profiles[static_cast<size_t>(context.profile)];
  if (auto bounds = profile.find(name); bounds != profile.end()) {
    require(bounds->second[0].size() == shape.size(), std::string("another number of axes of ") + name);
    for (size_t i = 0; i < shape.size(); ++i)
      if (shape[i] < bounds->second[0][i] || shape[i] > bounds->second[2][i]) return false;
  }
  context.shapes[name] = shape;
  return true;
}

bool set_address(ContextSelf* self, const char* name, void* address) {
  ContextImpl& context = *self->owner;
  auto known = context.addresses.find(name);
  require(known == context.addresses.end() || known->second != address, std::string(name) + " is bound twice");
  require(reinterpret_cast<uintptr_t>(address) % standin::kAlignment == 0, std::string(name) + " is not aligned");
  context.addresses[name] = address;
  return context.engine.has(name);
}

// As set, or as it stands in the graph.
Ids shape_of(const ContextImpl& context, const Port& port) {
  if (auto set = context.shapes.find(port.name); set != context.shapes.end()) return set->second;
  for (int64_t size : port.shape) require(size >= 0, "the shape of " + port.name + " is not set");
  return port.shape;
}

using Values = std::vector<vtxcore::OrtTensor>;

void compute(EngineImpl& engine, const std::map<std::string, Ids>& shapes, const std::map<std::string, void*>& addresses) {
  std::vector<std::string> held;
  std::vector<const char*> in, out;
  std::vector<const OrtValue*> values;
  Values inputs;
  held.reserve(engine.ports.size() + engine.unread.size());
  for (const Port& port : engine.ports) {
    (port.input ? in : out).push_back(port.name.c_str());
    if (!port.input) continue;
    const Ids& shape = shapes.at(port.name);
    size_t bytes = count_of(shape) * bytes_of(port.type);
    held.emplace_back(static_cast<const char*>(addresses.at(port.name)), bytes);
    held.back().reserve(16);  // an empty past has an address, too
    OrtValue* value = nullptr;
    check(ort().api->CreateTensorWithDataAsOrtValue(ort().memory, held.back().data(), bytes, shape.data(), shape.size(),
                                                    port.type, &value));
    inputs.emplace_back(ort(), value);
    values.push_back(value);
  }
  for (const Port& port : engine.unread) {
    Ids shape = port.shape;
    for (int64_t& size : shape) size = std::max<int64_t>(size, 1);
    held.emplace_back(count_of(shape) * bytes_of(port.type), 0);
    OrtValue* value = nullptr;
    check(ort().api->CreateTensorWithDataAsOrtValue(ort().memory, held.back().data(), held.back().size(), shape.data(),
                                                    shape.size(), port.type, &value));
    in.push_back(port.name.c_str());
    inputs.emplace_back(ort(), value);
    values.push_back(value);
  }
  std::vector<OrtValue*> found(out.size(), nullptr);
  check(ort().api->Run(engine.session, nullptr, in.data(), values.data(), in.size(), out.data(), out.size(), found.data()));
  Values outputs;
  for (OrtValue* value : found) outputs.emplace_back(ort(), value);
  std::map<uintptr_t, uintptr_t> regions;
  for (size_t i = 0; i < out.size(); ++i) {
    const Port& port = engine.port(out[i]);
    size_t bytes = count_of(outputs[i].shape()) * bytes_of(port.type);
    void* address = addresses.at(port.name);
    Gpu::one().holds(address, bytes, "the output " + port.name);
    std::memcpy(address, outputs[i].data(), bytes);
    regions[reinterpret_cast<uintptr_t>(address)] = reinterpret_cast<uintptr_t>(address) + bytes;
  }
  require(regions.size() == out.size(), "two outputs at one address");
  uintptr_t end = 0;
  for (const auto& [start, stop] : regions) {
    require(end <= start, "two outputs overlap");
    end = stop;
  }
}

bool enqueue(ContextSelf* self, cudaStream_t) {
  ContextImpl& context = *self->owner;
  EngineImpl& engine = context.engine;
  if (++Gpu::one().calls["enqueueV3"] == Gpu::one().refused_run) return false;
  require(context.scratch != nullptr, "no working memory");
  require(Gpu::one().current == Gpu::one().number, "TensorRT runs on another device");
  if (Gpu::one().recording && Gpu::one().refused == "execute") return false;
  require(context.addresses.size() == engine.ports.size(), "a tensor has no address");
  std::map<std::string, Ids> shapes;
  for (const Port& port : engine.ports) {
    if (!port.input) continue;
    shapes[port.name] = shape_of(context, port);
    size_t bytes = count_of(shapes[port.name]) * bytes_of(port.type);
    Gpu::one().holds(context.addresses.at(port.name), bytes, "the input " + port.name);
    if (port.name.compare(0, 5, "past_") != 0) continue;
    auto read = reinterpret_cast<uintptr_t>(context.addresses.at(port.name));
    for (const auto& [name, address] : context.addresses) {
      auto written = reinterpret_cast<uintptr_t>(address);
      bool within = name.compare(0, 8, "present_") == 0 && written >= read && written - read < bytes;
      require(!within, name + " is written into what " + port.name + " reads");
    }
  }
  Gpu::one().add([&engine, shapes, addresses = context.addresses] { compute(engine, shapes, addresses); });
  return true;
}

Table& context_table() {
  static Table table;
  using V = nvinfer1::apiv::VExecutionContext;
  table.set(&V::setOptimizationProfileAsync, reinterpret_cast<void*>(&set_profile));
  table.set(&V::setDeviceMemoryV2, reinterpret_cast<void*>(&set_memory));
  table.set(&V::setInputShape, reinterpret_cast<void*>(&set_shape));
  table.set(&V::setTensorAddress, reinterpret_cast<void*>(&set_address));
  table.set(&V::enqueueV3, reinterpret_cast<void*>(&enqueue));
  return table;
}

ContextImpl::ContextImpl(EngineImpl& of) : implementation{context_table().slots, this}, engine(of) {}

class Context : public nvinfer1::IExecutionContext {
 public:
  ContextImpl& state() { return state_; }
  explicit Context(EngineImpl& engine) : state_(engine) {
    mImpl = reinterpret_cast<nvinfer1::apiv::VExecutionContext*>(&state_.implementation);
    ++engine.contexts, ++Gpu::one().contexts;
  }
  ~Context() noexcept override {
    require(Gpu::one().queue.empty(), "a context is deleted while work is queued");
    --state_.engine.contexts, --Gpu::one().contexts;
  }

 private:
  ContextImpl state_;
};

// --- engines --------------------------------------------------------------------------------------

int32_t tensors(const EngineSelf* self) { return static_cast<int32_t>(self->owner->ports.size()); }
const char* tensor_name(const EngineSelf* self, int32_t number) {
  return self->owner->ports.at(static_cast<size_t>(number)).name.c_str();
}
nvinfer1::TensorIOMode tensor_mode(const EngineSelf* self, const char* name) {
  return self->owner->port(name).input ? nvinfer1::TensorIOMode::kINPUT : nvinfer1::TensorIOMode::kOUTPUT;
}
DataType tensor_type(const EngineSelf* self, const char* name) {
  switch (self->owner->port(name).type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return DataType::kFLOAT;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16: return DataType::kHALF;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: return DataType::kINT64;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: return DataType::kINT32;
    default: standin::broken("a type that the stand-in does not know");
  }
}
Dims tensor_shape(const EngineSelf* self, const char* name) {
  Dims out{};
  for (int64_t size : self->owner->port(name).shape) out.d[out.nbDims++] = size;
  return out;
}
int32_t profile_count(const EngineSelf* self) { return static_cast<int32_t>(self->owner->profiles.size()); }
int64_t scratch_bytes(const EngineSelf*, int32_t profile) { return kScratch * (profile + 1); }
nvinfer1::IExecutionContext* make_context(EngineSelf* self, nvinfer1::ExecutionContextAllocationStrategy strategy) {
  require(strategy == nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED, "TensorRT would allocate by itself");
  return new Context(*self->owner);
}

Table& engine_table() {
  static Table table;
  using V = nvinfer1::apiv::VCudaEngine;
  using Make = nvinfer1::IExecutionContext* (V::*)(nvinfer1::ExecutionContextAllocationStrategy) noexcept;
  table.set(&V::getNbIOTensors, reinterpret_cast<void*>(&tensors));
  table.set(&V::getIOTensorName, reinterpret_cast<void*>(&tensor_name));
  table.set(&V::getTensorIOMode, reinterpret_cast<void*>(&tensor_mode));
  table.set(&V::getTensorDataType, reinterpret_cast<void*>(&tensor_type));
  table.set(&V::getTensorShape, reinterpret_cast<void*>(&tensor_shape));
  table.set(&V::getNbOptimizationProfiles, reinterpret_cast<void*>(&profile_count));
  table.set(&V::getDeviceMemorySizeForProfileV2, reinterpret_cast<void*>(&scratch_bytes));
  table.set(static_cast<Make>(&V::createExecutionContext), reinterpret_cast<void*>(&make_context));
  return table;
}

class Engine : public nvinfer1::ICudaEngine {
 public:
  explicit Engine(const Json& told) {
    state_.implementation = {engine_table().slots, &state_};
    mImpl = reinterpret_cast<nvinfer1::apiv::VCudaEngine*>(&state_.implementation);
    state_.graph = *told.find("graph")->string();
    open(state_.graph);
    for (const Json& profile : *told.find("profiles")->array()) read_profile(profile);
    ++Gpu::one().engines;
  }
  ~Engine() noexcept override {
    require(state_.contexts == 0, "an engine is deleted before its contexts");
    ort().api->ReleaseSession(state_.session);
    --Gpu::one().engines;
  }

 private:
  void open(const std::string& graph) {
    OrtSessionOptions* options = nullptr;
    check(ort().api->CreateSessionOptions(&options));
    check(ort().api->SetIntraOpNumThreads(options, 1));
    check(ort().api->CreateSession(ort().env, graph.c_str(), options, &state_.session));
    ort().api->ReleaseSessionOptions(options);
    size_t inputs = 0, outputs = 0;
    check(ort().api->SessionGetInputCount(state_.session, &inputs));
    check(ort().api->SessionGetOutputCount(state_.session, &outputs));
    for (size_t i = 0; i < inputs + outputs; ++i) add_port(i < inputs, i < inputs ? i : i - inputs);
    leave_out_unread();
  }

  // TensorRT leaves out inputs that nothing reads: those for attention, of a stage whose layers keep states alone.
  void leave_out_unread() {
    std::vector<Port>& ports = state_.ports;
    auto is_past = [](const Port& port) { return port.name.compare(0, 5, "past_") == 0; };
    if (!state_.has("state") || std::any_of(ports.begin(), ports.end(), is_past)) return;
    auto is_read = [](const Port& port) {
      return port.name != "total_slots" && port.name != "position_ids" && port.name != "cos" && port.name != "sin";
    };
    auto unread = std::stable_partition(ports.begin(), ports.end(), is_read);
    state_.unread.assign(unread, ports.end());
    ports.erase(unread, ports.end());
  }

  void add_port(bool input, size_t number) {
    const OrtApi* api = ort().api;
    OrtAllocator* allocator = nullptr;
    char* name = nullptr;
    OrtTypeInfo* info = nullptr;
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    check(api->GetAllocatorWithDefaultOptions(&allocator));
    check(input ? api->SessionGetInputName(state_.session, number, allocator, &name)
                : api->SessionGetOutputName(state_.session, number, allocator, &name));
    check(input ? api->SessionGetInputTypeInfo(state_.session, number, &info)
                : api->SessionGetOutputTypeInfo(state_.session, number, &info));
    check(api->CastTypeInfoToTensorInfo(info, &tensor));
    Port port{name, input, ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, {}};
    size_t dims = 0;
    check(api->GetTensorElementType(tensor, &port.type));
    check(api->GetDimensionsCount(tensor, &dims));
    port.shape.resize(dims);
    check(api->GetDimensions(tensor, port.shape.data(), dims));
    api->ReleaseTypeInfo(info);
    check(api->AllocatorFree(allocator, name));
    state_.ports.push_back(std::move(port));
  }

  void read_profile(const Json& profile) {
    state_.profiles.emplace_back();
    for (const auto& [name, bounds] : *profile.object()) {
      auto& range = state_.profiles.back()[name];
      for (size_t i = 0; i < 3; ++i)
        for (const Json& size : *(*bounds.array())[i].array()) range[i].push_back(*size.integer());
    }
  }

  EngineImpl state_;
};

// --- the runtime ----------------------------------------------------------------------------------

struct RuntimeImpl {
  Implementation<RuntimeImpl> implementation;
  nvinfer1::ILogger* logger;
};

nvinfer1::ICudaEngine* deserialize(Implementation<RuntimeImpl>* self, const void* blob, size_t bytes) {
  try {
    std::string content(static_cast<const char*>(blob), bytes);
    return new Engine(vtxcore::parse_json(content, "the engine", vtxcore::Kind::bundle));
  } catch (const vtxcore::Error&) {
    self->owner->logger->log(nvinfer1::ILogger::Severity::kERROR, "Serialization assertion\nstdArchiveReader failed");
    return nullptr;
  }
}

class Runtime : public nvinfer1::IRuntime {
 public:
  explicit Runtime(nvinfer1::ILogger* logger) {
    using Deserialize = nvinfer1::ICudaEngine* (nvinfer1::apiv::VRuntime::*)(const void*, size_t) noexcept;
    static Table table;
    table.set(static_cast<Deserialize>(&nvinfer1::apiv::VRuntime::deserializeCudaEngine),
              reinterpret_cast<void*>(&deserialize));
    state_ = {{table.slots, &state_}, logger};
    mImpl = reinterpret_cast<nvinfer1::apiv::VRuntime*>(&state_.implementation);
  }
  ~Runtime() noexcept override { require(Gpu::one().engines == 0, "the runtime is deleted before its engines"); }

 private:
  RuntimeImpl state_;
};

}  // namespace

EXPORT void* createInferRuntime_INTERNAL(void* logger, int32_t version) noexcept {
  require(version == NV_TENSORRT_VERSION, "the plug-in was compiled with another release's headers");
  return new Runtime(static_cast<nvinfer1::ILogger*>(logger));
}
EXPORT int32_t getInferLibMajorVersion() noexcept { return NV_TENSORRT_MAJOR; }
EXPORT int32_t getInferLibMinorVersion() noexcept { return NV_TENSORRT_MINOR; }
EXPORT int32_t getInferLibPatchVersion() noexcept { return NV_TENSORRT_PATCH; }
EXPORT int32_t getInferLibBuildVersion() noexcept { return NV_TENSORRT_BUILD; }
