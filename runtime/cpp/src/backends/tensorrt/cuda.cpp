#include "backends/tensorrt/cuda.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "backends/loading.hpp"
#include "base/errors.hpp"

namespace vtxcore {
namespace {

constexpr int kOutOfMemory = 2, kDriverTooOld = 35, kNoDevice = 100;
constexpr int kNonBlocking = 1, kHostDefault = 0, kCaptureThreadLocal = 1;
constexpr int kIntegrated = 18;                // cudaDevAttrIntegrated
constexpr int kIn = 1, kOut = 2, kWithin = 3;  // cudaMemcpyKind

const char* fix_of(int error) {
  if (error == kDriverTooOld)
    return "its NVIDIA driver is missing or older than the CUDA that vtx uses; install a newer driver";
  if (error == kNoDevice) return "no NVIDIA GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES";
  // Errors after which every further call in the process fails: the device is gone, or its context is.
  static const std::set<int> kGone{214, 219, 700, 709, 710, 715, 716, 717, 718, 719, 999};
  if (kGone.count(error) > 0)
    return "the GPU does not answer this process any more; start it again, and see nvidia-smi and dmesg";
  return "run it again; run vtx-doctor if it fails again";
}

}  // namespace

struct CudaCalls {
  int (*cudaGetDevice)(int*);
  int (*cudaSetDevice)(int);
  int (*cudaGetLastError)();
  int (*cudaMalloc)(void**, size_t);
  int (*cudaFree)(void*);
  int (*cudaHostAlloc)(void**, size_t, unsigned);
  int (*cudaFreeHost)(void*);
  int (*cudaMemGetInfo)(size_t*, size_t*);
  int (*cudaDeviceGetAttribute)(int*, int, int);
  int (*cudaMemsetAsync)(void*, int, size_t, void*);
  int (*cudaMemcpyAsync)(void*, const void*, size_t, int, void*);
  int (*cudaMemcpy2DAsync)(void*, size_t, const void*, size_t, size_t, size_t, int, void*);
  int (*cudaStreamCreateWithFlags)(void**, unsigned);
  int (*cudaStreamDestroy)(void*);
  int (*cudaStreamSynchronize)(void*);
  int (*cudaStreamBeginCapture)(void*, int);
  int (*cudaStreamEndCapture)(void*, void**);
  int (*cudaGraphInstantiateWithFlags)(void**, void*, unsigned long long);
  int (*cudaGraphDestroy)(void*);
  int (*cudaGraphExecDestroy)(void*);
  int (*cudaGraphLaunch)(void*, void*);
  const char* (*cudaGetErrorName)(int);
};

// CUDA 13 needs a newer driver than CUDA 12 does, so a runtime that the driver is too old for gives way to the next.
Cuda::Cuda(int number) : number_(number), calls_(std::make_unique<CudaCalls>()) {
  std::vector<std::string> names{"libcudart.so.13", "libcudart.so.12", "libcudart.so"};
  int error = kDriverTooOld;
  for (size_t first = 0; first < names.size() && error == kDriverTooOld; ++first) {
    try {
      load({names.begin() + static_cast<std::ptrdiff_t>(first), names.end()});
    } catch (const Error&) {
      if (first == 0) throw;
      break;
    }
    int current = 0;
    error = calls_->cudaGetDevice(&current);
  }
  check("cudaGetDevice", error);
  Use held(*this);
  check("cudaStreamCreateWithFlags", calls_->cudaStreamCreateWithFlags(&stream_, kNonBlocking));
}

void Cuda::load(const std::vector<std::string>& names) {
  Library library("the CUDA runtime", "", "VTX_CUDART", names, "cudaGraphInstantiateWithFlags");
  auto find = [&](auto& call, const char* name) {
    call = reinterpret_cast<std::decay_t<decltype(call)>>(library.symbol(name));
  };
#define VTX_FIND(name) find(calls_->name, #name)
  VTX_FIND(cudaGetDevice);
  VTX_FIND(cudaSetDevice);
  VTX_FIND(cudaGetLastError);
  VTX_FIND(cudaMalloc);
  VTX_FIND(cudaFree);
  VTX_FIND(cudaHostAlloc);
  VTX_FIND(cudaFreeHost);
  VTX_FIND(cudaMemGetInfo);
  VTX_FIND(cudaDeviceGetAttribute);
  VTX_FIND(cudaMemsetAsync);
  VTX_FIND(cudaMemcpyAsync);
  VTX_FIND(cudaMemcpy2DAsync);
  VTX_FIND(cudaStreamCreateWithFlags);
  VTX_FIND(cudaStreamDestroy);
  VTX_FIND(cudaStreamSynchronize);
  VTX_FIND(cudaStreamBeginCapture);
  VTX_FIND(cudaStreamEndCapture);
  VTX_FIND(cudaGraphInstantiateWithFlags);
  VTX_FIND(cudaGraphDestroy);
  VTX_FIND(cudaGraphExecDestroy);
  VTX_FIND(cudaGraphLaunch);
  VTX_FIND(cudaGetErrorName);
#undef VTX_FIND
}

Cuda::~Cuda() {
  if (!after_.empty()) {  // an error left work behind that nothing waited for
    int before = number_;
    calls_->cudaGetDevice(&before);
    calls_->cudaSetDevice(number_);
    calls_->cudaStreamSynchronize(stream_);
    free_all();
    calls_->cudaSetDevice(before);
  }
  calls_->cudaStreamDestroy(stream_);
}

Cuda::Use::Use(Cuda& cuda) : cuda_(cuda), held_(cuda.mutex_), before_(cuda.number_) {
  if (cuda_.uses_ == 0) {
    cuda_.check("cudaGetDevice", cuda_.calls_->cudaGetDevice(&before_));
    if (before_ != cuda_.number_) cuda_.check("cudaSetDevice", cuda_.calls_->cudaSetDevice(cuda_.number_));
  }
  ++cuda_.uses_;
}

Cuda::Use::~Use() {
  --cuda_.uses_;
  if (before_ != cuda_.number_) cuda_.calls_->cudaSetDevice(before_);
}

void Cuda::check(const char* name, int error) {
  if (error != 0) fail(Kind::device, "the GPU fails at ", name, " (", calls_->cudaGetErrorName(error), "): ", fix_of(error));
}

uint8_t* Cuda::allocate(size_t bytes, const std::string& purpose) {
  Use held(*this);
  void* address = nullptr;
  int error = calls_->cudaMalloc(&address, bytes);
  if (error == kOutOfMemory && !after_.empty()) {
    wait();
    error = calls_->cudaMalloc(&address, bytes);
  }
  if (error == kOutOfMemory) {
    auto [left, total] = memory();
    fail(Kind::device, purpose, " needs ", size_text(static_cast<int64_t>(bytes)), " of device memory, ", size_text(left),
         " of ", size_text(total), " is free; end other programs on the GPU, export with a smaller --precision or ",
         "--max-context, or use --device cpu");
  }
  check("cudaMalloc", error);
  return static_cast<uint8_t*>(address);
}

void Cuda::release(void* address) noexcept { free(calls_->cudaFree, address); }

void Cuda::free(Free call, void* released) noexcept {
  std::lock_guard<std::recursive_mutex> held(mutex_);
  if (queued_) {
    try {
      after_.emplace_back(call, released);
      return;
    } catch (...) {  // no memory to note it, so it is freed after a wait
      calls_->cudaStreamSynchronize(stream_);
    }
  }
  call(released);
}

void Cuda::free_all() noexcept {
  for (const auto& [call, released] : after_) call(released);
  after_.clear();
}

void* Cuda::allocate_host(size_t bytes) {
  Use held(*this);
  void* address = nullptr;
  check("cudaHostAlloc", calls_->cudaHostAlloc(&address, bytes, kHostDefault));
  std::memset(address, 0, bytes);
  return address;
}

void Cuda::release_host(void* address) noexcept { free(calls_->cudaFreeHost, address); }

std::pair<int64_t, int64_t> Cuda::memory() {
  size_t left = 0, total = 0;
  check("cudaMemGetInfo", calls_->cudaMemGetInfo(&left, &total));
  // A GPU that shares the host's memory reports the page cache as used; the system gives it back to who needs it.
  int shared = 0;
  check("cudaDeviceGetAttribute", calls_->cudaDeviceGetAttribute(&shared, kIntegrated, number_));
  std::optional<int64_t> available = shared != 0 ? available_memory() : std::nullopt;
  if (available) left = std::min(total, std::max(left, static_cast<size_t>(*available)));
  return {static_cast<int64_t>(left), static_cast<int64_t>(total)};
}

void Cuda::zero(void* address, size_t bytes) {
  check("cudaMemsetAsync", calls_->cudaMemsetAsync(address, 0, bytes, stream()));
}

void Cuda::copy_in(void* to, const void* from, size_t bytes) { copy(to, from, bytes, kIn); }
void Cuda::copy_out(void* to, const void* from, size_t bytes) { copy(to, from, bytes, kOut); }

void Cuda::copy_rows(void* to, size_t to_pitch, const void* from, size_t pitch, size_t width, size_t height) {
  int error = calls_->cudaMemcpy2DAsync(to, to_pitch, from, pitch, width, height, kWithin, stream());
  check("cudaMemcpy2DAsync", error);
}

void Cuda::wait() {
  check("cudaStreamSynchronize", calls_->cudaStreamSynchronize(stream_));
  queued_ = false;
  free_all();
}

void Cuda::copy(void* to, const void* from, size_t bytes, int kind) {
  check("cudaMemcpyAsync", calls_->cudaMemcpyAsync(to, from, bytes, kind, stream()));
}

void* Cuda::record(const std::function<void()>& work) {
  if (queued_) wait();
  void *graph = nullptr, *recorded = nullptr;
  int error = calls_->cudaStreamBeginCapture(stream_, kCaptureThreadLocal);
  if (error == 0) {
    bool queued = true;
    try {
      work();
    } catch (const Error&) {
      queued = false;
    } catch (...) {
      if (calls_->cudaStreamEndCapture(stream_, &graph) == 0 && graph) calls_->cudaGraphDestroy(graph);
      throw;
    }
    error = calls_->cudaStreamEndCapture(stream_, &graph);
    if (error == 0 && queued) error = calls_->cudaGraphInstantiateWithFlags(&recorded, graph, 0);
    if (graph) calls_->cudaGraphDestroy(graph);
  }
  if (error != 0) calls_->cudaGetLastError();  // or the next call would report it
  return error == 0 ? recorded : nullptr;
}

void Cuda::launch(void* recorded) { check("cudaGraphLaunch", calls_->cudaGraphLaunch(recorded, stream())); }

void Cuda::forget(void* recorded) noexcept { free(calls_->cudaGraphExecDestroy, recorded); }

}  // namespace vtxcore
