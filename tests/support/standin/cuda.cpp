// CUDA's driver and runtime as libvtx calls them.
#include <cstring>
#include <utility>

#include "gpu.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

using standin::Gpu;
using standin::require;

namespace {

constexpr int kOutOfMemory = 2, kDriverTooOld = 35, kLaunchFailure = 719, kInvalidated = 901;
constexpr int kIn = 1, kOut = 2, kWithin = 3;
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

int refuse() {
  Gpu::one().failed = true;
  return kInvalidated;
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
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  std::string capability = setting("VTX_STANDIN_CAPABILITY", "8.9");
  size_t dot = capability.find('.');
  require(attribute == 75 || attribute == 76, "an attribute that nobody knows");
  *value = std::stoi(attribute == 75 ? capability.substr(0, dot) : capability.substr(dot + 1));
  return 0;
}

EXPORT int cudaGetDevice(int* device) {
  Gpu& gpu = called("cudaGetDevice");
  VTX_ANSWERS(gpu);
  *device = gpu.current;
  return gpu.calls["cudaGetDevice"] <= std::stoi(setting("VTX_STANDIN_TOO_OLD", "0")) ? kDriverTooOld : 0;
}
EXPORT int cudaSetDevice(int device) {
  Gpu& gpu = called("cudaSetDevice");
  VTX_ANSWERS(gpu);
  gpu.current = device;
  return 0;
}
EXPORT int cudaGetLastError() {
  called("cudaGetLastError").failed = false;
  return 0;
}

// --- memory ---

EXPORT int cudaMalloc(void** address, size_t bytes) {
  Gpu& gpu = here("cudaMalloc");
  VTX_ANSWERS(gpu);
  require(bytes > 0, "an allocation of nothing");
  require(gpu.recording == nullptr, "an allocation spoils a recording");
  if (gpu.used() + bytes > gpu.total) return kOutOfMemory;
  *address = allocate(gpu.device, bytes, 0xFF);  // NaN, in both float types
  return 0;
}
EXPORT int cudaFree(void* address) {
  Gpu& gpu = called("cudaFree");
  require(gpu.queue.empty(), "memory is freed while work is queued");
  require(gpu.device.erase(reinterpret_cast<uintptr_t>(address)) == 1, "memory is freed that is not there");
  return 0;
}
EXPORT int cudaMemGetInfo(size_t* left, size_t* total) {
  Gpu& gpu = here("cudaMemGetInfo");
  VTX_ANSWERS(gpu);
  *total = gpu.total;
  *left = gpu.total - gpu.used();
  if (std::getenv("VTX_STANDIN_PAGE_CACHE") != nullptr) *left = 1000;  // the rest is page cache, as on a Jetson
  return 0;
}
EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int number) {
  Gpu& gpu = called("cudaDeviceGetAttribute");
  require(attribute == 18 && number == gpu.number, "another attribute, or one of another device");
  *value = std::getenv("VTX_STANDIN_PAGE_CACHE") != nullptr;
  return 0;
}
EXPORT int cudaHostAlloc(void** address, size_t bytes, unsigned) {
  Gpu& gpu = here("cudaHostAlloc");
  VTX_ANSWERS(gpu);
  *address = allocate(gpu.host, bytes, 0xFF);
  return 0;
}
EXPORT int cudaFreeHost(void* address) {
  Gpu& gpu = called("cudaFreeHost");
  require(gpu.queue.empty(), "host memory is freed while work is queued");
  require(gpu.host.erase(reinterpret_cast<uintptr_t>(address)) == 1, "host memory is freed that is not there");
  return 0;
}

// --- the stream, and graphs of recorded work ---

EXPORT int cudaMemsetAsync(void* address, int value, size_t bytes, void* stream) {
  Gpu& gpu = here("cudaMemsetAsync");
  VTX_ANSWERS(gpu);
  require(stream == kStream, "another stream");
  gpu.holds(address, bytes, "cudaMemsetAsync");
  gpu.add([=] { std::memset(address, value, bytes); });
  return 0;
}
EXPORT int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  Gpu& gpu = here("cudaMemcpyAsync");
  VTX_ANSWERS(gpu);
  require(stream == kStream, "another stream");
  require(kind == kIn || kind == kOut, "a copy of another kind");
  gpu.holds(kind == kIn ? to : from, bytes, "cudaMemcpyAsync");
  const void* outside = kind == kIn ? from : to;
  require(!lies_in(gpu.device, outside), "device memory where the host's is meant");
  gpu.calls[kind == kIn ? "copies in" : "copies out"] += gpu.recording == nullptr;
  bool pinned = lies_in(gpu.host, outside);
  require(pinned || gpu.recording == nullptr, "pageable memory in a graph: it will be gone");
  if (kind == kIn && !pinned) {  // as CUDA stages it
    auto staged = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
    gpu.add([=] { std::memcpy(to, staged->data(), bytes); });
  } else {
    gpu.add([=] { std::memcpy(to, from, bytes); });
  }
  return 0;
}
EXPORT int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t pitch, size_t width, size_t height,
                             int kind, void* stream) {
  Gpu& gpu = here("cudaMemcpy2DAsync");
  VTX_ANSWERS(gpu);
  require(stream == kStream && kind == kWithin, "cudaMemcpy2DAsync: another stream or kind");
  require(height > 0 && width <= to_pitch && width <= pitch, "rows wider than their pitch");
  gpu.holds(to, (height - 1) * to_pitch + width, "cudaMemcpy2DAsync");
  gpu.holds(from, (height - 1) * pitch + width, "cudaMemcpy2DAsync");
  gpu.add([=] {
    for (size_t row = 0; row < height; ++row)
      std::memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * pitch, width);
  });
  return 0;
}
EXPORT int cudaStreamCreateWithFlags(void** stream, unsigned) {
  here("cudaStreamCreateWithFlags");
  VTX_ANSWERS(Gpu::one());
  *stream = kStream;
  return 0;
}
EXPORT int cudaStreamDestroy(void*) {
  called("cudaStreamDestroy");
  return 0;
}
EXPORT int cudaStreamSynchronize(void* stream) {
  Gpu& gpu = here("cudaStreamSynchronize");
  VTX_ANSWERS(gpu);
  require(stream == kStream, "another stream");
  require(gpu.recording == nullptr, "a wait inside of a recording");
  require(!gpu.failed, "an error that nobody has asked for: the next call reports it");
  if (gpu.calls["cudaStreamSynchronize"] > std::stoi(setting("VTX_STANDIN_WAITS", "1000000000"))) {
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
EXPORT int cudaStreamBeginCapture(void*, int) {
  Gpu& gpu = here("cudaStreamBeginCapture");
  VTX_ANSWERS(gpu);
  require(gpu.recording == nullptr, "a recording inside of a recording");
  require(gpu.queue.empty(), "a recording while work is queued");
  if (gpu.refused == "cudaStreamBeginCapture") return refuse();
  gpu.recording = new std::vector<standin::Work>;
  return 0;
}
EXPORT int cudaStreamEndCapture(void*, void** graph) {
  Gpu& gpu = here("cudaStreamEndCapture");
  require(gpu.recording != nullptr, "the end of no recording");
  *graph = std::exchange(gpu.recording, nullptr);
  if (gpu.refused == "execute" || gpu.refused == "cudaStreamEndCapture") {
    delete static_cast<std::vector<standin::Work>*>(std::exchange(*graph, nullptr));
    return refuse();
  }
  return 0;
}
EXPORT int cudaGraphInstantiateWithFlags(void** run, void* graph, unsigned long long) {
  Gpu& gpu = here("cudaGraphInstantiateWithFlags");
  auto* works = static_cast<std::vector<standin::Work>*>(graph);
  require(!works->empty(), "an empty graph");
  if (gpu.refused == "cudaGraphInstantiate") return refuse();
  *run = new Recorded{*works};
  ++gpu.graphs;
  return 0;
}
EXPORT int cudaGraphDestroy(void* graph) {
  called("cudaGraphDestroy");
  delete static_cast<std::vector<standin::Work>*>(graph);
  return 0;
}
EXPORT int cudaGraphExecDestroy(void* run) {
  --called("cudaGraphExecDestroy").graphs;
  delete static_cast<Recorded*>(run);
  return 0;
}
EXPORT int cudaGraphLaunch(void* run, void* stream) {
  Gpu& gpu = here("cudaGraphLaunch");
  VTX_ANSWERS(gpu);
  require(stream == kStream, "another stream");
  for (const standin::Work& work : static_cast<Recorded*>(run)->works) gpu.queue.push_back(work);
  return 0;
}
EXPORT const char* cudaGetErrorName(int error) {
  if (error == kInvalidated) return "cudaErrorStreamCaptureInvalidated";
  return error == kOutOfMemory ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}
