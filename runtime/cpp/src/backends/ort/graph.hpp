// ONNX Runtime through its C API: the library, and one loaded graph.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backends/graph_backend.hpp"
#include "backends/loading.hpp"
#include "base/tensors.hpp"
#include "bundle/bundle.hpp"
#include "bundle/graphs.hpp"
#include "onnxruntime_c_api.h"

namespace vtxcore {

// The loaded library. Sessions have thread pools of their own, so the process is left as it was for its other users.
class OrtLibrary {
 public:
  explicit OrtLibrary(const std::string& path);
  // Throws Error(device) if there is none here.
  static Library find(const std::string& path);
  ~OrtLibrary();
  OrtLibrary(const OrtLibrary&) = delete;
  OrtLibrary& operator=(const OrtLibrary&) = delete;

  // Throws Error(device) with what a status says; `doing` and `what` begin the message. They are no std::string: one that
  // cannot be made for lack of memory would lose what the call before made.
  void check(OrtStatus* status, std::string_view doing, std::string_view what = "") const;
  // Throws what a status of running `graph` says.
  void check_run(OrtStatus* status, const std::string& graph) const;
  // Takes a status; what it says, empty if it is none.
  std::string reason(OrtStatus* status) const;
  // Throws Error(device) if this release cannot attend over K and V of `kv_dtype`.
  void check_release(const std::string& kv_dtype) const;

  const OrtApi* api = nullptr;
  OrtEnv* env = nullptr;
  OrtMemoryInfo* memory = nullptr;
  std::string version;
  const Library& library() const { return library_; }

 private:
  Library library_;
};

// An OrtValue that is released with the object.
class OrtTensor {
 public:
  OrtTensor(const OrtLibrary& ort, OrtValue* value) : ort_(&ort), value_(value) {}
  OrtTensor(OrtTensor&& other) noexcept : ort_(other.ort_), value_(other.value_) { other.value_ = nullptr; }
  OrtTensor& operator=(OrtTensor&&) = delete;
  ~OrtTensor();
  OrtValue* get() const { return value_; }
  // The sizes and the data of a tensor that a run gave.
  Ids shape() const;
  const void* data() const;

 private:
  const OrtLibrary* ort_;
  OrtValue* value_;
};

// A tensor over memory that the caller keeps. `dtype` is numpy's name.
OrtTensor tensor_over(const OrtLibrary& ort, const void* data, const Ids& shape, const std::string& dtype);

class OrtGraph : public HostGraph {
 public:
  // Loads the graph in the bundle's file `name` and compares it with `io`. Throws Error(bundle), Error(device).
  OrtGraph(const OrtLibrary& ort, const Bundle& bundle, const std::string& name, const GraphIO& io, int threads);
  ~OrtGraph() override;
  OrtGraph(const OrtGraph&) = delete;
  OrtGraph& operator=(const OrtGraph&) = delete;

  GraphOutputs run(const std::vector<GraphInput>& inputs) override;

  const OrtLibrary& ort;
  const std::string name;
  OrtSession* session = nullptr;

 private:
  std::vector<Port> ports(bool inputs) const;
  std::vector<TensorSpec> outputs_;
};

// Inputs and outputs bound to memory, for runs that allocate nothing.
class OrtBinding {
 public:
  explicit OrtBinding(const OrtGraph& graph);
  ~OrtBinding();
  OrtBinding(const OrtBinding&) = delete;
  OrtBinding& operator=(const OrtBinding&) = delete;
  void input(const std::string& name, const OrtTensor& value);
  void output(const std::string& name, const OrtTensor& value);
  void run();

 private:
  const OrtGraph& graph_;
  OrtIoBinding* binding_ = nullptr;
};

}  // namespace vtxcore
