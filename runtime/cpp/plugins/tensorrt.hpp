// What libvtx asks of TensorRT. TensorRT's classes are C++ with virtual tables that differ between major releases, so a
// plug-in compiled with one release's headers stands between; both sides of this header are built together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vtxcore::tensorrt {

constexpr int kPluginInterface = 4;  // rises with every change of this header
constexpr int kMaxDims = 8;

// An input or output of an engine: numpy's name of its type, "" where vtx has none, and its sizes, -1 where free.
struct EngineTensor {
  const char* name;
  bool input;
  const char* dtype;
  int dims;
  int64_t shape[kMaxDims];
};

// An execution context on memory that its user owns. False: TensorRT refuses.
class Execution {
 public:
  virtual ~Execution() = default;
  virtual bool set_profile(int profile, void* stream) = 0;
  virtual void set_memory(void* address, int64_t bytes) = 0;
  virtual bool set_shape(const char* name, const int64_t* sizes, int count) = 0;
  virtual bool set_address(const char* name, void* address) = 0;
  virtual bool enqueue(void* stream) = 0;
};

class Deserialized {
 public:
  virtual ~Deserialized() = default;
  virtual int tensors() = 0;
  virtual EngineTensor tensor(int number) = 0;
  virtual int profiles() = 0;
  virtual int64_t scratch(int profile) = 0;  // bytes of working memory
  virtual Execution* context() = 0;          // null where TensorRT makes none; the caller deletes it
};

// Lives longer than its engines, and they longer than their contexts.
class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual Deserialized* deserialize(const void* content, size_t bytes) = 0;  // null: see `reason`; the caller deletes it
  virtual const char* reason() = 0;  // TensorRT's last error since this was asked for, "" if there was none
};

// The symbols of a plug-in. `create`: TensorRT's createInferRuntime_INTERNAL; null where it makes no runtime.
using PluginInterface = int (*)();
using MakeRuntime = Runtime* (*)(void* create);
constexpr char kPluginInterfaceSymbol[] = "vtx_tensorrt_plugin_interface";
constexpr char kMakeRuntimeSymbol[] = "vtx_tensorrt_make_runtime";
constexpr char kCreateSymbol[] = "createInferRuntime_INTERNAL";

}  // namespace vtxcore::tensorrt
