// One GPU through its driver: memory, copies, one stream, graphs. Failures are Error(device).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/loading.hpp"

namespace vtxcore {

struct CudaCalls;

// One GPU and one stream on it. Work is queued, and `wait` waits for all of it; a Use is held meanwhile.
class Cuda {
 public:
  // Makes this thread the only one that uses the GPU, and the GPU's context the thread's current one, as long as it
  // lives: the application may use another one.
  class Use {
   public:
    explicit Use(Cuda& cuda);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use();

   private:
    Cuda& cuda_;
    std::lock_guard<std::recursive_mutex> held_;
    void* before_;
  };

  explicit Cuda(int number);  // of the GPU; throws Error(device) where there is no driver or no GPU answers
  ~Cuda();
  Cuda(const Cuda&) = delete;
  Cuda& operator=(const Cuda&) = delete;

  // The address of `bytes` bytes; the error says how many are free where there are not enough.
  uint8_t* allocate(size_t bytes, const std::string& purpose);
  // What is released while work is queued, which may use it, is freed once something has waited for that work.
  void release(void* address) noexcept;
  void* allocate_host(size_t bytes);  // zeroed, and read and written by the device itself
  void release_host(void* address) noexcept;
  std::pair<int64_t, int64_t> memory();  // free and total bytes of the device

  void zero(void* address, size_t bytes);
  void copy_in(void* to, const void* from, size_t bytes);      // of a copy of `bytes` bytes that is kept until a wait
  void copy_pinned(void* to, const void* from, size_t bytes);  // of memory of `allocate_host`, read as the work runs
  void copy_out(void* to, const void* from, size_t bytes);
  // `height` rows of `width` bytes, `pitch` bytes apart, from one place on the device to another.
  void copy_rows(void* to, size_t to_pitch, const void* from, size_t pitch, size_t width, size_t height);
  void wait();

  // Records what `work` queues, instead of running it, once all that was queued before has run; `launch` queues all of it at
  // once. Null if the driver or TensorRT cannot record it.
  void* record(const std::function<void()>& work);
  void launch(void* recorded);
  void forget(void* recorded) noexcept;

  // For a call that queues work on it.
  void* stream() {
    queued_ = true;
    return stream_;
  }

 private:
  // The GPU's context for a thread that may not wait for the others.
  class Outside {
   public:
    explicit Outside(Cuda& cuda) noexcept;
    Outside(const Outside&) = delete;
    Outside& operator=(const Outside&) = delete;
    ~Outside();

   private:
    Cuda& cuda_;
    void* before_ = nullptr;
  };

  using Free = int (*)(void*);
  void free(Free call, void* released) noexcept;
  void free_all() noexcept;
  void load();
  void check(const char* name, int error);

  const int number_;
  std::recursive_mutex mutex_;
  int uses_ = 0;
  std::unique_ptr<CudaCalls> calls_;
  void* context_ = nullptr;
  void* stream_ = nullptr;
  bool queued_ = false;                        // work that nothing has waited for
  std::vector<std::pair<Free, void*>> after_;  // to be freed once there is none
  std::deque<std::vector<uint8_t>> sources_;   // which queued copies may not have read yet
};

// Device memory that is freed with this object.
class Buffer {
 public:
  Buffer(Cuda& cuda, size_t bytes, const std::string& purpose)
      : cuda_(&cuda), size_(bytes), address_(cuda.allocate(bytes, purpose)) {}
  Buffer(Buffer&& other) noexcept
      : cuda_(other.cuda_), size_(other.size_), address_(std::exchange(other.address_, nullptr)) {}
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() {
    if (address_) cuda_->release(address_);
  }
  uint8_t* address() const { return address_; }
  size_t size() const { return size_; }

 private:
  Cuda* cuda_;
  size_t size_;
  uint8_t* address_;
};

constexpr size_t kAlignment = 256;  // bytes, of every address bound to TensorRT (NvInferRuntime.h, setTensorAddress)
// The bytes from one such address to the next one behind `bytes` bytes.
inline size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Host memory that the device reads and writes by itself: `count` values.
template <typename Value>
class Pinned {
 public:
  Pinned(Cuda& cuda, size_t count)
      : cuda_(cuda), bytes_(count * sizeof(Value)), data_(static_cast<Value*>(cuda.allocate_host(bytes_))) {}
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned() { cuda_.release_host(data_); }
  Value* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  Cuda& cuda_;
  size_t bytes_;
  Value* data_;
};

}  // namespace vtxcore
