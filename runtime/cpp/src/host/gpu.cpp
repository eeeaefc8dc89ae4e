#include "host/gpu.hpp"

#include <dlfcn.h>

#include <cstddef>

namespace vtxcore {
namespace {

constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;  // of CUdevice_attribute

template <typename Call>
bool find(void* driver, const char* name, Call& call) {
  call = reinterpret_cast<Call>(::dlsym(driver, name));
  return call != nullptr;
}

}  // namespace

std::optional<Gpu> find_gpu(int number) {
  void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  int (*init)(unsigned);
  int (*count_of)(int*);
  int (*get)(int*, int);
  int (*name_of)(char*, int, int);
  int (*memory_of)(size_t*, int);
  int (*attribute_of)(int*, int, int);
  if (driver == nullptr || !find(driver, "cuInit", init) || !find(driver, "cuDeviceGetCount", count_of) ||
      !find(driver, "cuDeviceGet", get) || !find(driver, "cuDeviceGetName", name_of) ||
      !find(driver, "cuDeviceTotalMem_v2", memory_of) || !find(driver, "cuDeviceGetAttribute", attribute_of))
    return std::nullopt;
  int count = 0, device = 0, major = 0, minor = 0;
  if (init(0) != 0 || count_of(&count) != 0 || number >= count || get(&device, number) != 0) return std::nullopt;
  char name[100] = "";
  size_t memory = 0;
  name_of(name, sizeof name, device);
  memory_of(&memory, device);
  attribute_of(&major, kCapabilityMajor, device);
  attribute_of(&minor, kCapabilityMinor, device);
  name[sizeof name - 1] = '\0';
  return Gpu{name, {major, minor}, static_cast<int64_t>(memory)};
}

}  // namespace vtxcore
