// CUDA's driver as vtx calls it, in C++ and in Python.
#include <cstring>
#include <utility>

#include "gpu.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

using standin::Gpu;
using standin::require;

namespace {

constexpr int kOutOfMemory = 2, kLaunchFailure = 719, kInvalidated = 901;
constexpr int kOnDevice = 2;
char stream_storage;
void* const kStream = &stream_storage;

Gpu& called(const char* name) {
  Gpu& gpu = Gpu::one();
  ++gpu.calls[name];
  return gpu;
}

// For calls that are for the current device.
Gpu& here(const char* name) {
  Gpu& gpu = called(name);
  require(gpu.current == gpu.number, std::string(name) + " for device " + std::to_string(gpu.current));
  return gpu;
}

std::string setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

void report() {
  const Gpu& gpu = Gpu::one();
  std::FILE* file = std::fopen(setting("VTX_STANDIN_REPORT", "/dev/null").c_str(), "w");
  if (file == nullptr) return;
  std::fprintf(
      file,
      "{\"device\": %zu, \"host\": %zu, \"queued\": %zu, \"graphs\": %d, \"engines\": %d, \"contexts\": %d, \"current\": %d",
      gpu.device.size(), gpu.host.size(), gpu.queue.size(), gpu.graphs, gpu.engines, gpu.contexts, gpu.current);
  for (const auto& [name, count] : gpu.calls) std::fprintf(file, ", \"%s\": %d", name.c_str(), count);
  std::fprintf(file, "}\n");
  std::fclose(file);
}

bool lies_in(const std::map<uintptr_t, standin::Memory>& memory, const void* address) {
  auto at = reinterpret_cast<uintptr_t>(address);
  auto next = memory.upper_bound(at);
  if (next == memory.begin()) return false;
  auto found = std::prev(next);
  return at < found->first + found->second.size();
}

// For calls that give an error once the device is gone.
#define VTX_ANSWERS(gpu) \
  if ((gpu).lost != 0) return (gpu).lost

void* allocate(std::map<uintptr_t, standin::Memory>& memory, size_t bytes, uint8_t content) {
  standin::Memory block{std::vector<uint8_t>(bytes + standin::kAlignment, content), bytes};
  auto first = reinterpret_cast<uintptr_t>(block.room.data());
  uintptr_t address = (first + standin::kAlignment - 1) / standin::kAlignment * standin::kAlignment;
  memory[address] = std::move(block);  // moved, so the address stays
  return reinterpret_cast<void*>(address);
}

struct Recorded {
  std::vector<standin::Work> works;
};

}  // namespace

Gpu& standin::Gpu::one() {
  static Gpu* gpu = [] {
    auto* made = new Gpu;
    made->total = std::stoull(setting("VTX_STANDIN_MEMORY", "4294967296"));
    made->current = std::stoi(setting("VTX_STANDIN_DEVICE", "0"));
    made->number = std::stoi(setting("VTX_STANDIN_USED", "0"));
    made->refused = setting("VTX_STANDIN_REFUSED", "");
    made->refused_run = std::stoi(setting("VTX_STANDIN_REFUSED_RUN", "0"));
    std::atexit(report);
    return made;
  }();
  return *gpu;
}

// --- what a test does to the device ---

// The device has as much memory as is in use and so many bytes more: other programs have the rest.
EXPORT void vtx_standin_leave(size_t bytes) { Gpu::one().total = Gpu::one().used() + bytes; }
// The device is gone: every call gives this error.
EXPORT void vtx_standin_lose(int error) {
  Gpu::one().queue.clear();
  Gpu::one().lost = error;
}

// --- the driver ---

EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDeviceGetCount(int* count) {
  *count = setting("VTX_STANDIN_CAPABILITY", "8.9").empty() ? 0 : 2;
  return 0;
}
EXPORT int cuDeviceGet(int* device, int number) {
  *device = number;
  return 0;
}
EXPORT int cuDeviceGetName(char* name, int room, int) {
  std::snprintf(name, static_cast<size_t>(room), "Stand-in");
  return 0;
}
EXPORT int cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = Gpu::one().total;
  return 0;
}
EXPORT int cuDriverGetVersion(int* version) {
  *version = 12020;
  return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int number) {
  if (attribute == 18) {  // whether it shares the host's memory
    require(number == Gpu::one().number, "an attribute of another device");
    *value = std::getenv("VTX_STANDIN_PAGE_CACHE") != nullptr;
    return 0;
  }
  std::string capability = setting("VTX_STANDIN_CAPABILITY", "8.9");
  size_t dot = capability.find('.');
  require(attribute == 75 || attribute == 76, "an attribute that nobody knows");
  *value = std::stoi(attribute == 75 ? capability.substr(0, dot) : capability.substr(dot + 1));
  return 0;
}

// --- contexts: that of a device is its number and one, as none is null ---

EXPORT int cuDevicePrimaryCtxRetain(void** context, int number) {
  VTX_ANSWERS(called("cuDevicePrimaryCtxRetain"));
  *context = reinterpret_cast<void*>(intptr_t{1} + number);
  return 0;
}
EXPORT int cuCtxGetCurrent(void** context) {
  Gpu& gpu = called("cuCtxGetCurrent");
  VTX_ANSWERS(gpu);
  *context = reinterpret_cast<void*>(intptr_t{1} + gpu.current);
  return 0;
}
EXPORT int cuCtxSetCurrent(void* context) {
  Gpu& gpu = called("cuCtxSetCurrent");
  VTX_ANSWERS(gpu);
  gpu.current = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return 0;
}

// --- memory ---

EXPORT int cuMemAlloc_v2(void** address, size_t bytes) {
  Gpu& gpu = here("cuMemAlloc_v2");
  VTX_ANSWERS(gpu);
  require(bytes > 0, "an allocation of nothing");
  require(gpu.recording == nullptr, "an allocation spoils a recording");
  if (gpu.used() + bytes > gpu.total) return kOutOfMemory;
  *address = allocate(gpu.device, bytes, 0xFF);  // NaN, in both float types
  return 0;
}
EXPORT int cuMemFree_v2(void* address) {
  Gpu& gpu = here("cuMemFree_v2");
  require(gpu.queue.empty(), "memory is freed while work is queued");
  require(gpu.device.erase(reinterpret_cast<uintptr_t>(address)) == 1, "memory is freed that is not there");
  return 0;
}
EXPORT int cuMemGetInfo_v2(size_t* left, size_t* total) {
  Gpu& gpu = here("cuMemGetInfo_v2");
  VTX_ANSWERS(gpu);
  *total = gpu.total;
  *left = gpu.total - gpu.used();
  if (std::getenv("VTX_STANDIN_PAGE_CACHE") != nullptr) *left = 1000;  // the rest is page cache, as on a Jetson
  return 0;
}
EXPORT int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  Gpu& gpu = here("cuMemHostAlloc");
  VTX_ANSWERS(gpu);
  *address = allocate(gpu.host, bytes, 0xFF);
  return 0;
}
EXPORT int cuMemFreeHost(void* address) {
  Gpu& gpu = here("cuMemFreeHost");
  require(gpu.queue.empty(), "host memory is freed while work is queued");
  require(gpu.host.erase(reinterpret_cast<uintptr_t>(address)) == 1, "host memory is freed that is not there");
  return 0;
}

// --- the stream, and graphs of recorded work ---

EXPORT int cuMemsetD8Async(void* address, unsigned char value, size_t bytes, void* stream) {
  Gpu& gpu = here("cuMemsetD8Async");
  VTX_ANSWERS(gpu);
  require(stream == kStream, "another stream");
  gpu.holds(address, bytes, "cuMemsetD8Async");
  gpu.add([=] { std::memset(address, value, bytes); });
  return 0;
}
EXPORT int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  Gpu& gpu = here("cuMemcpyHtoDAsync_v2");
  VTX_ANSWERS(gpu);
  require(stream == kStream, "another stream");
  gpu.holds(to, bytes, "cuMemcpyHtoDAsync_v2");
  require(!lies_in(gpu.device, from), "device memory where the host's is meant");
  require(lies_in(gpu.host, from) || gpu.recording == nullptr, "pageable memory in a graph: it will be gone");
  gpu.calls["copies in"] += gpu.recording == nullptr;
  gpu.add([=] { std::memcpy(to, from, bytes); });  // late, as by a GPU that reads the host's pages itself
  return 0;
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  Gpu& gpu = here("cuMemcpyDtoHAsync_v2");
  VTX_ANSWERS(gpu);
  require(stream == kStream, "another stream");
  gpu.holds(from, bytes, "cuMemcpyDtoHAsync_v2");
  require(!lies_in(gpu.device, to), "device memory where the host's is meant");
  require(lies_in(gpu.host, to) || gpu.recording == nullptr, "pageable memory in a graph: it will be gone");
  gpu.calls["copies out"] += gpu.recording == nullptr;
  gpu.add([=] { std::memcpy(to, from, bytes); });
  return 0;
}

// CUDA_MEMCPY2D of cuda.h.
struct Copy2D {
  size_t from_x, from_y;
  unsigned from_type;
  const void* from_host;
  const char* from;
  void* from_array;
  size_t pitch;
  size_t to_x, to_y;
  unsigned to_type;
  void* to_host;
  char* to;
  void* to_array;
  size_t to_pitch;
  size_t width, height;
};

EXPORT int cuMemcpy2DAsync_v2(const Copy2D* given, void* stream) {
  Gpu& gpu = here("cuMemcpy2DAsync_v2");
  VTX_ANSWERS(gpu);
  const Copy2D copy = *given;
  require(stream == kStream, "another stream");
  require(copy.from_type == kOnDevice && copy.to_type == kOnDevice, "a copy of rows of the host");
  require(copy.from_x + copy.from_y + copy.to_x + copy.to_y == 0, "rows that do not begin at the address");
  require(copy.height > 0 && copy.width <= copy.to_pitch && copy.width <= copy.pitch, "rows wider than their pitch");
  gpu.holds(copy.to, (copy.height - 1) * copy.to_pitch + copy.width, "cuMemcpy2DAsync_v2");
  gpu.holds(copy.from, (copy.height - 1) * copy.pitch + copy.width, "cuMemcpy2DAsync_v2");
  gpu.add([=] {
    for (size_t row = 0; row < copy.height; ++row)
      std::memmove(copy.to + row * copy.to_pitch, copy.from + row * copy.pitch, copy.width);
  });
  return 0;
}
EXPORT int cuStreamCreate(void** stream, unsigned) {
  here("cuStreamCreate");
  VTX_ANSWERS(Gpu::one());
  *stream = kStream;
  return 0;
}
EXPORT int cuStreamDestroy_v2(void*) {
  called("cuStreamDestroy_v2");
  return 0;
}
EXPORT int cuStreamSynchronize(void* stream) {
  Gpu& gpu = here("cuStreamSynchronize");
  VTX_ANSWERS(gpu);
  require(stream == kStream, "another stream");
  require(gpu.recording == nullptr, "a wait inside of a recording");
  if (gpu.calls["cuStreamSynchronize"] > std::stoi(setting("VTX_STANDIN_WAITS", "1000000000"))) {
    gpu.queue.clear();
    return kLaunchFailure;
  }
  while (!gpu.queue.empty()) {
    standin::Work work = std::move(gpu.queue.front());
    gpu.queue.pop_front();
    work();
  }
  return 0;
}
EXPORT int cuStreamBeginCapture_v2(void*, int) {
  Gpu& gpu = here("cuStreamBeginCapture_v2");
  VTX_ANSWERS(gpu);
  require(gpu.recording == nullptr, "a recording inside of a recording");
  require(gpu.queue.empty(), "a recording while work is queued");
  if (gpu.refused == "cuStreamBeginCapture_v2") return kInvalidated;
  gpu.recording = new std::vector<standin::Work>;
  return 0;
}
EXPORT int cuStreamEndCapture(void*, void** graph) {
  Gpu& gpu = here("cuStreamEndCapture");
  require(gpu.recording != nullptr, "the end of no recording");
  *graph = std::exchange(gpu.recording, nullptr);
  if (gpu.refused == "execute" || gpu.refused == "cuStreamEndCapture") {
    delete static_cast<std::vector<standin::Work>*>(std::exchange(*graph, nullptr));
    return kInvalidated;
  }
  return 0;
}
EXPORT int cuGraphInstantiateWithFlags(void** run, void* graph, unsigned long long) {
  Gpu& gpu = here("cuGraphInstantiateWithFlags");
  auto* works = static_cast<std::vector<standin::Work>*>(graph);
  require(!works->empty(), "an empty graph");
  if (gpu.refused == "cuGraphInstantiateWithFlags") return kInvalidated;
  *run = new Recorded{*works};
  ++gpu.graphs;
  return 0;
}
EXPORT int cuGraphDestroy(void* graph) {
  called("cuGraphDestroy");
  delete static_cast<std::vector<standin::Work>*>(graph);
  return 0;
}
EXPORT int cuGraphExecDestroy(void* run) {
  --here("cuGraphExecDestroy").graphs;
  delete static_cast<Recorded*>(run);
  return 0;
}
EXPORT int cuGraphLaunch(void* run, void* stream) {
  Gpu& gpu = here("cuGraphLaunch");
  VTX_ANSWERS(gpu);
  require(stream == kStream, "another stream");
  for (const standin::Work& work : static_cast<Recorded*>(run)->works) gpu.queue.push_back(work);
  return 0;
}
EXPORT int cuGetErrorName(int error, const char** name) {
  *name = error == kInvalidated   ? "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
          : error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
                                  : "CUDA_ERROR_UNKNOWN";
  return 0;
}
