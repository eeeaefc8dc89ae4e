#include "backends/openvino/graph.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "backends/contract.hpp"

namespace vtxcore {
namespace {

constexpr char kModule[] = "libvtx_openvino.so";
constexpr char kVariable[] = "VTX_OPENVINO";
constexpr char kVersion[] = "get_openvino_version";  // ov::get_openvino_version()

// OpenVINO's word for a type, and numpy's.
std::string dtype_of(const std::string& type) {
  static const std::map<std::string, std::string> kTypes{
      {"f32", "float32"}, {"f16", "float16"}, {"i64", "int64"}, {"i32", "int32"}};
  auto found = kTypes.find(type);
  return found == kTypes.end() ? type : found->second;
}

// A port may have further names, which tensors had on the way to it.
std::vector<Port> ports_of(const std::vector<openvino::PortView>& views, const std::vector<TensorSpec>& promised) {
  std::vector<Port> out;
  for (const openvino::PortView& view : views) {
    Port port{view.names.empty() ? "" : view.names.front(), dtype_of(view.type), view.shape};
    for (const TensorSpec& spec : promised)
      if (std::find(view.names.begin(), view.names.end(), spec.name) != view.names.end()) port.name = spec.name;
    out.push_back(std::move(port));
  }
  return out;
}

}  // namespace

// Loads OpenVINO where it is named, then the bridge, which finds it by its release. Both stay for the process.
std::pair<openvino::BridgeFunction, std::string> OpenvinoLibrary::find(const std::string& path) {
  const char* named = std::getenv(kVariable);
  std::string where = "where the system looks";
  if (!path.empty() || (named && *named)) where = Library(kOpenvino, path, kVariable, {"libopenvino.so"}, kVersion).where();
  std::string module = own_directory() + "/" + kModule;
  void* handle = ::dlopen(module.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    std::string reason = ::dlerror();
    if (reason.find("libopenvino.so") != std::string::npos)
      fail(Kind::device, module, " was built for another release of OpenVINO than the one in ", where, " (", reason,
           "); name that one with the option library or in ", kVariable, ", or build libvtx with the release that is here");
    plugin_failure(module, reason, kOpenvino);
  }
  auto bridge = reinterpret_cast<openvino::BridgeFunction>(::dlsym(handle, openvino::kBridgeSymbol));
  if (bridge == nullptr) plugin_failure(module, kOtherLibvtx, kOpenvino);
  return {bridge, where};
}

OpenvinoLibrary::OpenvinoLibrary(const std::string& path) {
  auto [bridge, where] = find(path);
  where_ = where;
  try {
    core_.reset(bridge(openvino::kBridgeVersion));
  } catch (const std::exception& error) {
    fail(Kind::device, kOpenvino, " in ", where_, " does not start: ", error.what());
  }
  if (!core_) plugin_failure(kModule, kOtherLibvtx, kOpenvino);
}

std::string OpenvinoLibrary::described() const { return cat("openvino ", core_->version(), " (", where_, ")"); }

std::unique_ptr<openvino::Model> OpenvinoLibrary::read(const Bundle& bundle, const std::string& name, const GraphIO& io,
                                                       const std::string& compute) const {
  bundle.check_still(name);
  auto model = loading(name, [&] { return core_->read(bundle.path(name)); });
  bundle.check_still(name);
  check_ports(name, ports_of(model->inputs(), io.inputs), ports_of(model->outputs(), io.outputs), io);
  loading(name, [&] { model->keep_narrow(compute); });
  return model;
}

OpenvinoGraph::OpenvinoGraph(std::string graph, std::unique_ptr<openvino::Compiled> compiled,
                             std::unique_ptr<openvino::Model> model, const GraphIO& io)
    : name(std::move(graph)), outputs_(io.outputs), compiled_(std::move(compiled)), unpacked_(std::move(model)) {
  request_ = loading(name, [&] { return compiled_->request(); });
}

GraphOutputs OpenvinoGraph::run(const std::vector<GraphInput>& inputs) {
  static const std::map<std::string, openvino::Type> kTypes{{"float32", openvino::Type::f32},
                                                            {"float16", openvino::Type::f16},
                                                            {"int32", openvino::Type::i32},
                                                            {"int64", openvino::Type::i64}};
  std::lock_guard<std::mutex> lock(lock_);
  return running(name, [&] {
    for (const GraphInput& input : inputs)
      request_->set(input.name, kTypes.at(input.dtype), input.shape, const_cast<void*>(input.data));
    {
      auto dropping = unpacked_ ? unpacked_->letting_go() : nullptr;
      request_->run();
    }
    unpacked_.reset();
    GraphOutputs out;
    for (const TensorSpec& spec : outputs_) {
      openvino::TensorView view = request_->get(spec.name);
      out[spec.name].shape = view.shape;
      out[spec.name].copy(spec.dtype, view.data);
    }
    return out;
  });
}

}  // namespace vtxcore
