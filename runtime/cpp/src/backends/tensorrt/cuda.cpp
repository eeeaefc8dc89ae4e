#include "backends/tensorrt/cuda.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "backends/loading.hpp"
#include "base/errors.hpp"

namespace vtxcore {
namespace {

constexpr int kOutOfMemory = 2, kNoDevice = 100;
constexpr int kNonBlocking = 1, kCaptureThreadLocal = 1;
constexpr int kIntegrated = 18;  // CU_DEVICE_ATTRIBUTE_INTEGRATED
constexpr int kOnDevice = 2;     // CU_MEMORYTYPE_DEVICE

const char* fix_of(int error) {
  if (error == kNoDevice) return "no NVIDIA GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES";
  // Errors after which every further call in the process fails: the device is gone, or its context is.
  static const std::set<int> kGone{214, 219, 700, 709, 710, 715, 716, 717, 718, 719, 999};
  if (kGone.count(error) > 0)
    return "the GPU does not answer this process any more; start it again, and see nvidia-smi and dmesg";
  return "run it again; run vtx-doctor if it fails again";
}

// CUDA_MEMCPY2D of cuda.h.
struct CopySide {
  size_t x = 0, y = 0;
  int type = kOnDevice;
  const void* host = nullptr;
  const void* device = nullptr;
  void* array = nullptr;
  size_t pitch = 0;
};
struct RowCopy {
  CopySide source, to;
  size_t width, height;
};

}  // namespace

struct CudaCalls {
  int (*cuInit)(unsigned);
  int (*cuGetErrorName)(int, const char**);
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuCtxGetCurrent)(void**);
  int (*cuCtxSetCurrent)(void*);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuMemGetInfo_v2)(size_t*, size_t*);
  int (*cuMemAlloc_v2)(void**, size_t);
  int (*cuMemFree_v2)(void*);
  int (*cuMemHostAlloc)(void**, size_t, unsigned);
  int (*cuMemFreeHost)(void*);
  int (*cuMemsetD8Async)(void*, unsigned char, size_t, void*);
  int (*cuMemcpyHtoDAsync_v2)(void*, const void*, size_t, void*);
  int (*cuMemcpyDtoHAsync_v2)(void*, const void*, size_t, void*);
  int (*cuMemcpy2DAsync_v2)(const void*, void*);  // of a RowCopy
  int (*cuStreamCreate)(void**, unsigned);
  int (*cuStreamDestroy_v2)(void*);
  int (*cuStreamSynchronize)(void*);
  int (*cuStreamBeginCapture_v2)(void*, int);
  int (*cuStreamEndCapture)(void*, void**);
  int (*cuGraphInstantiateWithFlags)(void**, void*, unsigned long long);
  int (*cuGraphDestroy)(void*);
  int (*cuGraphExecDestroy)(void*);
  int (*cuGraphLaunch)(void*, void*);
};

// The primary context, which CUDA's runtime in TensorRT uses too, is kept until the process ends.
Cuda::Cuda(int number) : number_(number), calls_(std::make_unique<CudaCalls>()) {
  load();
  check("cuInit", calls_->cuInit(0));
  check("cuDevicePrimaryCtxRetain", calls_->cuDevicePrimaryCtxRetain(&context_, number));
  Use held(*this);
  check("cuStreamCreate", calls_->cuStreamCreate(&stream_, kNonBlocking));
}

void Cuda::load() {
  Library library("NVIDIA's driver", "", "VTX_CUDA", {"libcuda.so.1"}, "cuGraphInstantiateWithFlags");
  auto find = [&](auto& call, const char* name) {
    call = reinterpret_cast<std::decay_t<decltype(call)>>(library.symbol(name));
  };
#define VTX_FIND(name) find(calls_->name, #name)
  VTX_FIND(cuInit);
  VTX_FIND(cuGetErrorName);
  VTX_FIND(cuDevicePrimaryCtxRetain);
  VTX_FIND(cuCtxGetCurrent);
  VTX_FIND(cuCtxSetCurrent);
  VTX_FIND(cuDeviceGetAttribute);
  VTX_FIND(cuMemGetInfo_v2);
  VTX_FIND(cuMemAlloc_v2);
  VTX_FIND(cuMemFree_v2);
  VTX_FIND(cuMemHostAlloc);
  VTX_FIND(cuMemFreeHost);
  VTX_FIND(cuMemsetD8Async);
  VTX_FIND(cuMemcpyHtoDAsync_v2);
  VTX_FIND(cuMemcpyDtoHAsync_v2);
  VTX_FIND(cuMemcpy2DAsync_v2);
  VTX_FIND(cuStreamCreate);
  VTX_FIND(cuStreamDestroy_v2);
  VTX_FIND(cuStreamSynchronize);
  VTX_FIND(cuStreamBeginCapture_v2);
  VTX_FIND(cuStreamEndCapture);
  VTX_FIND(cuGraphInstantiateWithFlags);
  VTX_FIND(cuGraphDestroy);
  VTX_FIND(cuGraphExecDestroy);
  VTX_FIND(cuGraphLaunch);
#undef VTX_FIND
}

Cuda::~Cuda() {
  Outside there(*this);
  if (!after_.empty()) {  // an error left work behind that nothing waited for
    calls_->cuStreamSynchronize(stream_);
    free_all();
  }
  calls_->cuStreamDestroy_v2(stream_);
}

Cuda::Outside::Outside(Cuda& cuda) noexcept : cuda_(cuda) {
  cuda_.calls_->cuCtxGetCurrent(&before_);
  if (before_ != cuda_.context_) cuda_.calls_->cuCtxSetCurrent(cuda_.context_);
}

Cuda::Outside::~Outside() {
  if (before_ != cuda_.context_) cuda_.calls_->cuCtxSetCurrent(before_);
}

Cuda::Use::Use(Cuda& cuda) : cuda_(cuda), held_(cuda.mutex_), before_(cuda.context_) {
  if (cuda_.uses_ == 0) {
    cuda_.check("cuCtxGetCurrent", cuda_.calls_->cuCtxGetCurrent(&before_));
    if (before_ != cuda_.context_) cuda_.check("cuCtxSetCurrent", cuda_.calls_->cuCtxSetCurrent(cuda_.context_));
  }
  ++cuda_.uses_;
}

Cuda::Use::~Use() {
  --cuda_.uses_;
  if (before_ != cuda_.context_) cuda_.calls_->cuCtxSetCurrent(before_);
}

void Cuda::check(const char* name, int error) {
  if (error == 0) return;
  const char* title = nullptr;
  calls_->cuGetErrorName(error, &title);
  fail(Kind::device, "the GPU fails at ", name, " (", title ? title : std::to_string(error), "): ", fix_of(error));
}

uint8_t* Cuda::allocate(size_t bytes, const std::string& purpose) {
  Use held(*this);
  void* address = nullptr;
  int error = calls_->cuMemAlloc_v2(&address, bytes);
  if (error == kOutOfMemory && !after_.empty()) {
    wait();
    error = calls_->cuMemAlloc_v2(&address, bytes);
  }
  if (error == kOutOfMemory) {
    auto [left, total] = memory();
    fail(Kind::device, purpose, " needs ", size_text(static_cast<int64_t>(bytes)), " of device memory, ", size_text(left),
         " of ", size_text(total), " is free; end other programs on the GPU, export with a smaller --precision or ",
         "--max-context, or use --device cpu");
  }
  check("cuMemAlloc_v2", error);
  return static_cast<uint8_t*>(address);
}

void Cuda::release(void* address) noexcept { free(calls_->cuMemFree_v2, address); }

void Cuda::free(Free call, void* released) noexcept {
  std::lock_guard<std::recursive_mutex> held(mutex_);
  if (queued_) {
    try {
      after_.emplace_back(call, released);
      return;
    } catch (...) {  // no memory to note it, so it is freed after a wait
      Outside there(*this);
      calls_->cuStreamSynchronize(stream_);
    }
  }
  Outside there(*this);
  call(released);
}

void Cuda::free_all() noexcept {
  for (const auto& [call, released] : after_) call(released);
  after_.clear();
}

void* Cuda::allocate_host(size_t bytes) {
  Use held(*this);
  void* address = nullptr;
  check("cuMemHostAlloc", calls_->cuMemHostAlloc(&address, bytes, 0));
  std::memset(address, 0, bytes);
  return address;
}

void Cuda::release_host(void* address) noexcept { free(calls_->cuMemFreeHost, address); }

std::pair<int64_t, int64_t> Cuda::memory() {
  size_t left = 0, total = 0;
  check("cuMemGetInfo_v2", calls_->cuMemGetInfo_v2(&left, &total));
  // A GPU that shares the host's memory reports the page cache as used; the system gives it back to who needs it.
  int shared = 0;
  check("cuDeviceGetAttribute", calls_->cuDeviceGetAttribute(&shared, kIntegrated, number_));
  std::optional<int64_t> available = shared != 0 ? available_memory() : std::nullopt;
  if (available) left = std::min(total, std::max(left, static_cast<size_t>(*available)));
  return {static_cast<int64_t>(left), static_cast<int64_t>(total)};
}

void Cuda::zero(void* address, size_t bytes) {
  check("cuMemsetD8Async", calls_->cuMemsetD8Async(address, 0, bytes, stream()));
}

// A GPU that reads the host's pages itself (Thor, DGX Spark) does so when the work runs, which the source may not see.
void Cuda::copy_in(void* to, const void* from, size_t bytes) {
  auto first = static_cast<const uint8_t*>(from);
  copy_pinned(to, sources_.emplace_back(first, first + bytes).data(), bytes);
}

void Cuda::copy_pinned(void* to, const void* from, size_t bytes) {
  check("cuMemcpyHtoDAsync_v2", calls_->cuMemcpyHtoDAsync_v2(to, from, bytes, stream()));
}

void Cuda::copy_out(void* to, const void* from, size_t bytes) {
  check("cuMemcpyDtoHAsync_v2", calls_->cuMemcpyDtoHAsync_v2(to, from, bytes, stream()));
}

void Cuda::copy_rows(void* to, size_t to_pitch, const void* from, size_t pitch, size_t width, size_t height) {
  RowCopy rows{{}, {}, width, height};
  rows.source.device = from;
  rows.source.pitch = pitch;
  rows.to.device = to;
  rows.to.pitch = to_pitch;
  check("cuMemcpy2DAsync_v2", calls_->cuMemcpy2DAsync_v2(&rows, stream()));
}

void Cuda::wait() {
  check("cuStreamSynchronize", calls_->cuStreamSynchronize(stream_));
  queued_ = false;
  sources_.clear();
  free_all();
}

void* Cuda::record(const std::function<void()>& work) {
  if (queued_) wait();
  void *graph = nullptr, *recorded = nullptr;
  int error = calls_->cuStreamBeginCapture_v2(stream_, kCaptureThreadLocal);
  if (error == 0) {
    bool queued = true;
    try {
      work();
    } catch (const Error&) {
      queued = false;
    } catch (...) {
      if (calls_->cuStreamEndCapture(stream_, &graph) == 0 && graph) calls_->cuGraphDestroy(graph);
      throw;
    }
    error = calls_->cuStreamEndCapture(stream_, &graph);
    if (error == 0 && queued) error = calls_->cuGraphInstantiateWithFlags(&recorded, graph, 0);
    if (graph) calls_->cuGraphDestroy(graph);
  }
  return error == 0 ? recorded : nullptr;
}

void Cuda::launch(void* recorded) { check("cuGraphLaunch", calls_->cuGraphLaunch(recorded, stream())); }

void Cuda::forget(void* recorded) noexcept { free(calls_->cuGraphExecDestroy, recorded); }

}  // namespace vtxcore
