#include "backends/ort/graph.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>

#include "backends/contract.hpp"

namespace vtxcore {
namespace {

constexpr int kApiVersion = 21;  // the oldest release whose operators the bundles need is 1.22
static_assert(kApiVersion <= ORT_API_VERSION, "the header is older than the API that is asked for");

ONNXTensorElementDataType type_of(const std::string& dtype) {
  static const std::map<std::string, ONNXTensorElementDataType> kTypes{{"float32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
                                                                       {"float16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},
                                                                       {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
                                                                       {"int32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
                                                                       {"int8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8}};
  return kTypes.at(dtype);
}

size_t bytes_of(const std::string& dtype) { return dtype == "int64" ? 8 : dtype == "float16" ? 2 : dtype == "int8" ? 1 : 4; }

// numpy's name of a type.
std::string name_of(ONNXTensorElementDataType type) {
  for (const char* name : {"float32", "float16", "int64", "int32", "int8"})
    if (type_of(name) == type) return name;
  return "a type that graphs of vtx do not have";
}

constexpr char kEngine[] = "onnxruntime";

}  // namespace

// onnxruntime reports nothing to its maker, and keeps nothing in the user's home for that, unless the environment says that
// it may. Its API can turn this off only once the library has begun with it.
Library OrtLibrary::find(const std::string& path) {
  ::setenv(names::kOrtSilence, "1", 0);
  return Library(kEngine, path, "VTX_ONNXRUNTIME", {"libonnxruntime.so.1", "libonnxruntime.so"}, "OrtGetApiBase");
}

OrtLibrary::OrtLibrary(const std::string& path) : library_(find(path)) {
  auto base = reinterpret_cast<const OrtApiBase* (*)()>(library_.symbol("OrtGetApiBase"))();
  version = base->GetVersionString();
  api = base->GetApi(kApiVersion);
  if (api == nullptr)
    fail(Kind::device, "onnxruntime ", version, " in ", library_.where(), " is too old, 1.22 or newer is needed");
  OrtEnv* made = nullptr;
  check(api->CreateEnv(ORT_LOGGING_LEVEL_FATAL, "vtx", &made), "onnxruntime does not start");
  std::unique_ptr<OrtEnv, void (*)(OrtEnv*)> held(made, api->ReleaseEnv);
  check(api->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory), "onnxruntime does not start");
  env = held.release();
}

OrtLibrary::~OrtLibrary() {
  if (memory) api->ReleaseMemoryInfo(memory);
  if (env) api->ReleaseEnv(env);
}

std::string OrtLibrary::reason(OrtStatus* status) const {
  if (status == nullptr) return "";
  std::unique_ptr<OrtStatus, void (*)(OrtStatus*)> held(status, api->ReleaseStatus);
  std::string text = api->GetErrorMessage(status);
  return text.empty() ? "for no reason that it gives" : text;
}

void OrtLibrary::check(OrtStatus* status, std::string_view doing, std::string_view what) const {
  std::string why = reason(status);
  if (!why.empty()) fail(Kind::device, doing, what, ": ", why);
}

void OrtLibrary::check_run(OrtStatus* status, const std::string& graph) const {
  std::string why = reason(status);
  if (!why.empty()) run_failure(kEngine, graph, why);
}

void OrtLibrary::check_release(const std::string& kv_dtype) const {
  int major = 0, minor = 0;
  if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) != 2) return;
  if (kv_dtype == "int8" && std::pair(major, minor) < std::pair(1, 27))
    fail(Kind::device, "K and V in int8 need onnxruntime 1.27 or newer, this is ", version,
         "; take a newer library, or export with --kv-precision fp16");
}

OrtTensor::~OrtTensor() {
  if (value_) ort_->api->ReleaseValue(value_);
}

Ids OrtTensor::shape() const {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  ort_->check(ort_->api->GetTensorTypeAndShape(value_, &info), "onnxruntime gives no shape");
  std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> held(
      info, ort_->api->ReleaseTensorTypeAndShapeInfo);
  size_t dims = 0;
  ort_->check(ort_->api->GetDimensionsCount(info, &dims), "onnxruntime gives no shape");
  Ids out(dims);
  ort_->check(ort_->api->GetDimensions(info, out.data(), dims), "onnxruntime gives no shape");
  return out;
}

const void* OrtTensor::data() const {
  void* data = nullptr;
  ort_->check(ort_->api->GetTensorMutableData(value_, &data), "onnxruntime gives no data");
  return data;
}

OrtTensor tensor_over(const OrtLibrary& ort, const void* data, const Ids& shape, const std::string& dtype) {
  static uint8_t nothing[8];
  size_t size = bytes_of(dtype);
  for (int64_t side : shape) size *= static_cast<size_t>(side);
  OrtValue* value = nullptr;
  void* memory = data ? const_cast<void*>(data) : nothing;  // an empty vector has no data, and a tensor needs some
  ort.check(
      ort.api->CreateTensorWithDataAsOrtValue(ort.memory, memory, size, shape.data(), shape.size(), type_of(dtype), &value),
      "onnxruntime takes no tensor");
  return OrtTensor(ort, value);
}

OrtGraph::OrtGraph(const OrtLibrary& library, const Bundle& bundle, const std::string& file, const GraphIO& io, int threads)
    : ort(library), name(file), outputs_(io.outputs) {
  const OrtApi* api = ort.api;
  OrtSessionOptions* options = nullptr;
  ort.check(api->CreateSessionOptions(&options), "onnxruntime has no options");
  std::unique_ptr<OrtSessionOptions, void (*)(OrtSessionOptions*)> held(options, api->ReleaseSessionOptions);
  auto set = [&](OrtStatus* status) { ort.check(status, "onnxruntime refuses an option"); };
  set(api->SetIntraOpNumThreads(options, threads));
  set(api->SetInterOpNumThreads(options, 1));
  // The threads of a pool spin after a run; a bundle has a pool a stage, so they stop at once for the next one.
  set(api->AddSessionConfigEntry(options, "session.force_spinning_stop", "1"));
  // While a session is made nothing ends their spinning, and they would take a core from the other sessions.
  set(api->AddSessionConfigEntry(options, "session.intra_op.spin_duration_us", "50"));
  // From 1.27 on a matrix of more than 1 GiB in float32 would stay narrow, and be widened for each token.
  set(api->AddSessionConfigEntry(options, "optimization.constant_folding_max_output_size_in_bytes", "0"));
  set(api->SetSessionLogSeverityLevel(options, ORT_LOGGING_LEVEL_FATAL));
  set(api->SetSessionGraphOptimizationLevel(options, ORT_ENABLE_ALL));
  set(api->DisableMemPattern(options));   // the number of tokens changes with every prompt
  set(api->DisableCpuMemArena(options));  // each session's own would keep what the longest prompt took
  bundle.check_still(name);
  std::string why = ort.reason(api->CreateSession(ort.env, bundle.path(name).c_str(), options, &session));
  if (!why.empty() && ::access("/proc/self", F_OK) != 0)
    fail(Kind::device, "onnxruntime needs /proc, which this container or chroot lacks; mount it: mount -t proc proc /proc");
  if (!why.empty()) load_failure(kEngine, name, why);
  try {
    bundle.check_still(name);
    check_ports(name, ports(true), ports(false), io);
  } catch (...) {
    api->ReleaseSession(session);
    throw;
  }
}

OrtGraph::~OrtGraph() { ort.api->ReleaseSession(session); }

std::vector<Port> OrtGraph::ports(bool inputs) const {
  const OrtApi* api = ort.api;
  auto told = [&](OrtStatus* status) { ort.check(status, "onnxruntime does not describe ", name); };
  size_t count = 0;
  told(inputs ? api->SessionGetInputCount(session, &count) : api->SessionGetOutputCount(session, &count));
  OrtAllocator* allocator = nullptr;
  told(api->GetAllocatorWithDefaultOptions(&allocator));
  std::vector<Port> out(count);
  for (size_t i = 0; i < count; ++i) {
    char* text = nullptr;
    told(inputs ? api->SessionGetInputName(session, i, allocator, &text)
                : api->SessionGetOutputName(session, i, allocator, &text));
    auto give_back = [&](char* word) { api->ReleaseStatus(api->AllocatorFree(allocator, word)); };
    std::unique_ptr<char, decltype(give_back)> name_held(text, give_back);
    out[i].name = text;
    OrtTypeInfo* info = nullptr;
    told(inputs ? api->SessionGetInputTypeInfo(session, i, &info) : api->SessionGetOutputTypeInfo(session, i, &info));
    std::unique_ptr<OrtTypeInfo, void (*)(OrtTypeInfo*)> held(info, api->ReleaseTypeInfo);
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    told(api->CastTypeInfoToTensorInfo(info, &tensor));
    if (tensor == nullptr) continue;  // a sequence or a map, which no contract has
    ONNXTensorElementDataType type;
    told(api->GetTensorElementType(tensor, &type));
    out[i].dtype = name_of(type);
    size_t dims = 0;
    told(api->GetDimensionsCount(tensor, &dims));
    out[i].shape.resize(dims);
    told(api->GetDimensions(tensor, out[i].shape.data(), dims));
  }
  return out;
}

GraphOutputs OrtGraph::run(const std::vector<GraphInput>& inputs) {
  std::vector<const char*> in, out;
  std::vector<const OrtValue*> values;
  std::vector<OrtTensor> held;
  held.reserve(inputs.size() + outputs_.size());  // before there is anything that would be lost
  for (const GraphInput& input : inputs) {
    in.push_back(input.name.c_str());
    held.push_back(tensor_over(ort, input.data, input.shape, input.dtype));
    values.push_back(held.back().get());
  }
  for (const TensorSpec& spec : outputs_) out.push_back(spec.name.c_str());
  std::vector<OrtValue*> made(out.size(), nullptr);
  OrtStatus* status =
      ort.api->Run(session, nullptr, in.data(), values.data(), in.size(), out.data(), out.size(), made.data());
  for (OrtValue* value : made) held.emplace_back(ort, value);
  ort.check_run(status, name);
  GraphOutputs outputs;
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const OrtTensor& tensor = held[inputs.size() + i];
    GraphOutput& output = outputs[outputs_[i].name];
    output.shape = tensor.shape();
    output.copy(outputs_[i].dtype, tensor.data());
  }
  return outputs;
}

OrtBinding::OrtBinding(const OrtGraph& graph) : graph_(graph) {
  graph.ort.check(graph.ort.api->CreateIoBinding(graph.session, &binding_), "onnxruntime failed in ", graph.name);
}

OrtBinding::~OrtBinding() { graph_.ort.api->ReleaseIoBinding(binding_); }

void OrtBinding::input(const std::string& name, const OrtTensor& value) {
  graph_.ort.check_run(graph_.ort.api->BindInput(binding_, name.c_str(), value.get()), graph_.name);
}

void OrtBinding::output(const std::string& name, const OrtTensor& value) {
  graph_.ort.check_run(graph_.ort.api->BindOutput(binding_, name.c_str(), value.get()), graph_.name);
}

void OrtBinding::run() {
  graph_.ort.check_run(graph_.ort.api->RunWithBinding(graph_.session, nullptr, binding_), graph_.name);
}

}  // namespace vtxcore
