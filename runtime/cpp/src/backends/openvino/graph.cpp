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

// The directory that this library, or the program that it is part of, lies in.
std::string own_directory() {
  Dl_info info;
  static const int here = 0;
  if (::dladdr(&here, &info) == 0 || info.dli_fname == nullptr) return ".";
  std::string file = info.dli_fname;
  size_t slash = file.rfind('/');
  return slash == std::string::npos ? "." : file.substr(0, slash);
}

struct Found {
  openvino::BridgeFunction bridge;
  std::string where;
};

// Loads OpenVINO where it is named, then the bridge, which finds it by its release. Both stay for the process.
Found find(const std::string& path) {
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
    fail(Kind::device, "the plug-in ", module, " cannot be loaded (", reason, "); build libvtx where CMake finds ",
         kOpenvino, ", or use device cpu");
  }
  auto bridge = reinterpret_cast<openvino::BridgeFunction>(::dlsym(handle, openvino::kBridgeSymbol));
  if (bridge == nullptr) fail(Kind::device, "the plug-in ", module, " is of another libvtx; install both together");
  return {bridge, where};
}

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

OpenvinoLibrary::OpenvinoLibrary(const std::string& path) {
  Found found = find(path);
  where_ = found.where;
  try {
    core_.reset(found.bridge(openvino::kBridgeVersion));
  } catch (const std::exception& error) {
    fail(Kind::device, kOpenvino, " in ", where_, " does not start: ", error.what());
  }
  if (!core_) fail(Kind::device, "the plug-in ", kModule, " is of another libvtx; install both together");
}

std::string OpenvinoLibrary::obstacle(const std::string& path) {
  try {
    find(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
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

OpenvinoGraph::OpenvinoGraph(std::string graph, std::unique_ptr<openvino::Compiled> compiled, const GraphIO& io)
    : name(std::move(graph)), outputs_(io.outputs), compiled_(std::move(compiled)) {
  request_ = loading(name, [&] { return compiled_->request(); });
}

std::vector<OpenvinoGraph::Output> OpenvinoGraph::run(const std::vector<OpenvinoInput>& inputs) {
  std::lock_guard<std::mutex> lock(lock_);
  return running(name, [&] {
    for (const OpenvinoInput& input : inputs)
      request_->set(input.name, input.type, input.shape, const_cast<void*>(input.data));
    request_->run();
    std::vector<Output> out;
    for (const TensorSpec& spec : outputs_) {
      openvino::TensorView view = request_->get(spec.name);
      size_t count = 1;
      for (int64_t side : view.shape) count *= static_cast<size_t>(side);
      Output output{view.shape, {}, {}};
      if (spec.dtype == "int64")
        output.whole.assign(static_cast<const int64_t*>(view.data), static_cast<const int64_t*>(view.data) + count);
      else
        output.floats.assign(static_cast<const float*>(view.data), static_cast<const float*>(view.data) + count);
      out.push_back(std::move(output));
    }
    return out;
  });
}

Rows OpenvinoGraph::rows(const OpenvinoInput& input, int64_t width, size_t count) {
  Output output = std::move(run({input})[0]);
  check_width(name, output.shape, width);
  Rows out;
  out.width = static_cast<size_t>(width);
  out.data = std::move(output.floats);
  check_rows(name, out.count(), count);
  return out;
}

}  // namespace vtxcore
