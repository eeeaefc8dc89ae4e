#include "backends/tensorrt/release.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "base/errors.hpp"

namespace vtxcore {
namespace {

constexpr char kCheckDriver[] = "see nvidia-smi, or use --device cpu";
constexpr char kTensorrt[] = "TensorRT";
constexpr char kMajorSymbol[] = "getInferLibMajorVersion";
const char* const kVersionSymbols[] = {kMajorSymbol, "getInferLibMinorVersion", "getInferLibPatchVersion",
                                       "getInferLibBuildVersion"};

std::string major_of(const std::string& version) { return version.substr(0, version.find('.')); }

}  // namespace

Release::Release(const EngineSet& engines, const std::string& path)
    : library_("TensorRT", path, "VTX_TENSORRT", {"libnvinfer.so." + major_of(engines.version), "libnvinfer.so"},
               kMajorSymbol) {
  for (size_t i = 0; i < 4; ++i) {
    auto ask = reinterpret_cast<int (*)()>(library_.symbol(kVersionSymbols[i]));
    parts_[i] = ask ? ask() : 0;
  }
}

std::string Release::version(const std::string& like) const {
  auto count = std::min<size_t>(4, 1 + static_cast<size_t>(std::count(like.begin(), like.end(), '.')));
  std::string out = std::to_string(parts_[0]);
  for (size_t i = 1; i < count; ++i) out += "." + std::to_string(parts_[i]);
  return out;
}

// The newest plug-in that is not newer than the library: within a major release, later ones keep what earlier ones have.
void* Release::plugin() const {
  const char* named = std::getenv("VTX_PLUGINS");
  std::string folder = named && *named ? named : own_directory();
  for (int minor = parts_[1]; minor >= 0; --minor) {
    std::string path = cat(folder, "/libvtx-tensorrt-", parts_[0], ".", minor, ".so");
    if (::access(path.c_str(), R_OK) != 0) continue;
    if (void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    const char* problem = ::dlerror();
    plugin_failure(path, problem ? problem : "", "TensorRT");
  }
  fail(Kind::device, kTensorrt, " ", version("0.0.0"), " is here (", where(), "), but ", folder,
       " has no plug-in of libvtx for it; build libvtx with its headers: cmake -DVTX_TENSORRT_INCLUDES=DIR");
}

std::unique_ptr<tensorrt::Runtime> Release::runtime() const {
  void* handle = plugin();
  auto interface = reinterpret_cast<tensorrt::PluginInterface>(::dlsym(handle, tensorrt::kPluginInterfaceSymbol));
  auto make = reinterpret_cast<tensorrt::MakeRuntime>(::dlsym(handle, tensorrt::kMakeRuntimeSymbol));
  void* create = library_.symbol(tensorrt::kCreateSymbol);
  if (interface == nullptr || make == nullptr || interface() != tensorrt::kPluginInterface)
    plugin_failure("TensorRT", kOtherLibvtx, "TensorRT");
  std::unique_ptr<tensorrt::Runtime> runtime(create ? make(create) : nullptr);
  if (!runtime) fail(Kind::device, kTensorrt, " in ", where(), " does not start: ", kCheckDriver);
  return runtime;
}

}  // namespace vtxcore
