// The plug-in for one release of TensorRT: compiled with its headers, linked with nothing of it.
#include "tensorrt.hpp"

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace vtxcore::tensorrt {
namespace {

const char* name_of(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kFLOAT: return "float32";
    case nvinfer1::DataType::kHALF: return "float16";
    case nvinfer1::DataType::kINT8: return "int8";
    case nvinfer1::DataType::kINT32: return "int32";
    case nvinfer1::DataType::kINT64: return "int64";
    default: return "";
  }
}

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

// Keeps the last error as the reason of a failure. TensorRT calls it from several threads. With VTX_TENSORRT_LOG in the
// environment every message goes to stderr.
class Logger : public nvinfer1::ILogger {
 public:
  void log(Severity severity, const char* message) noexcept override {
    if (shown_) std::fprintf(stderr, "TensorRT: %s\n", message);
    if (severity > Severity::kERROR) return;
    std::lock_guard<std::mutex> held(mutex_);
    try {
      last_ = message;
    } catch (...) {
      last_.clear();
    }
  }
  // The last error since it was asked for.
  std::string take() {
    std::lock_guard<std::mutex> held(mutex_);
    return std::exchange(last_, {});
  }

 private:
  std::mutex mutex_;
  std::string last_;
  const bool shown_ = std::getenv("VTX_TENSORRT_LOG") != nullptr;
};

class ReleaseExecution : public Execution {
 public:
  explicit ReleaseExecution(nvinfer1::IExecutionContext* context) : context_(context) {}
  bool set_profile(int profile, void* stream) override {
    return context_->setOptimizationProfileAsync(profile, stream_of(stream));
  }
  void set_memory(void* address, int64_t bytes) override { context_->setDeviceMemoryV2(address, bytes); }
  bool set_shape(const char* name, const int64_t* sizes, int count) override {
    nvinfer1::Dims dims{};
    dims.nbDims = count;
    std::copy(sizes, sizes + count, dims.d);
    return context_->setInputShape(name, dims);
  }
  bool set_address(const char* name, void* address) override { return context_->setTensorAddress(name, address); }
  bool enqueue(void* stream) override { return context_->enqueueV3(stream_of(stream)); }

 private:
  std::unique_ptr<nvinfer1::IExecutionContext> context_;
};

constexpr auto kUserManaged = nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED;

class ReleaseEngine : public Deserialized {
 public:
  explicit ReleaseEngine(nvinfer1::ICudaEngine* engine) : engine_(engine) {}
  int tensors() override { return engine_->getNbIOTensors(); }
  EngineTensor tensor(int number) override {
    const char* name = engine_->getIOTensorName(number);
    nvinfer1::Dims dims = engine_->getTensorShape(name);
    bool input = engine_->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT;
    EngineTensor out{name, input, name_of(engine_->getTensorDataType(name)), std::clamp(dims.nbDims, 0, kMaxDims), {}};
    std::copy(dims.d, dims.d + out.dims, out.shape);
    return out;
  }
  int profiles() override { return engine_->getNbOptimizationProfiles(); }
  int64_t scratch(int profile) override { return engine_->getDeviceMemorySizeForProfileV2(profile); }
  Execution* context() override {
    nvinfer1::IExecutionContext* made = engine_->createExecutionContext(kUserManaged);
    return made ? new ReleaseExecution(made) : nullptr;
  }

 private:
  std::unique_ptr<nvinfer1::ICudaEngine> engine_;
};

class ReleaseRuntime : public Runtime {
 public:
  explicit ReleaseRuntime(void* create) {
    auto make = reinterpret_cast<void* (*)(void*, int32_t)>(create);
    runtime_.reset(static_cast<nvinfer1::IRuntime*>(make(&logger_, NV_TENSORRT_VERSION)));
  }
  bool made() const { return runtime_ != nullptr; }
  Deserialized* deserialize(const void* content, size_t bytes) override {
    nvinfer1::ICudaEngine* engine = runtime_->deserializeCudaEngine(content, bytes);
    return engine ? new ReleaseEngine(engine) : nullptr;
  }
  const char* reason() override {
    reason_ = logger_.take();
    return reason_.c_str();
  }

 private:
  Logger logger_;
  std::string reason_;
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
};

}  // namespace
}  // namespace vtxcore::tensorrt

extern "C" __attribute__((visibility("default"))) int vtx_tensorrt_plugin_interface() {
  return vtxcore::tensorrt::kPluginInterface;
}

extern "C" __attribute__((visibility("default"))) vtxcore::tensorrt::Runtime* vtx_tensorrt_make_runtime(void* create) {
  auto made = std::make_unique<vtxcore::tensorrt::ReleaseRuntime>(create);
  return made->made() ? made.release() : nullptr;
}
