// What libvtx asks of OpenVINO. Its C API can neither rewrite a graph nor attend over blocks, and its C++ API belongs to one
// release; so what needs OpenVINO's headers stands in a library of its own, libvtx_openvino.so, which libvtx loads when a
// bundle is to be answered there. Both are built together: classes and std::exception may cross between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace vtxcore::openvino {

enum class Type { f32, f16, bf16, u8, i32, i64 };

// An input or output: `names` are all that it has, `type` is OpenVINO's word, and free sizes are -1.
struct PortView {
  std::vector<std::string> names;
  std::string type;
  std::vector<int64_t> shape;
};

struct TensorView {
  std::vector<int64_t> shape;
  const void* data;
};

// One run at a time over tensors that are set. What goes wrong is a std::exception, here and below.
class Request {
 public:
  virtual ~Request() = default;
  // A tensor over memory that the caller keeps until another one is set.
  virtual void set(const std::string& name, Type type, const std::vector<int64_t>& shape, void* data) = 0;
  virtual void run() = 0;
  // Valid until the next run.
  virtual TensorView get(const std::string& name) = 0;
};

// A compiled graph.
class Compiled {
 public:
  virtual ~Compiled() = default;
  virtual std::unique_ptr<Request> request() = 0;
};

// Drops pages of the weights' files while it lives, or when it goes.
class Dropping {
 public:
  virtual ~Dropping() = default;
};

// Memory for weights that a graph gets in place of its own.
class WeightMemory {
 public:
  virtual ~WeightMemory() = default;
  // `bytes` of it, which stay until it is gone.
  virtual int8_t* take(size_t bytes) = 0;
};

// A graph that was read and can be rewritten before it is compiled.
class Model {
 public:
  virtual ~Model() = default;
  virtual std::vector<PortView> inputs() const = 0;
  virtual std::vector<PortView> outputs() const = 0;
  virtual void keep_narrow(const std::string& compute) = 0;
  virtual int64_t weight_block() const = 0;
  // `key_scales` [kv_heads, head_dim] of layers whose keys are divided by them.
  virtual void page_caches(const std::vector<int64_t>& layers, int64_t heads, const std::set<int64_t>& sliding, bool windows,
                           bool both_ways, const std::map<int64_t, std::vector<float>>& key_scales) = 0;
  virtual void choose_rows(bool whole) = 0;
  virtual std::vector<int64_t> split_states() = 0;
  virtual void multiply_integers() = 0;
  // `memory` must stay as long as what is compiled from the model.
  virtual void bring_to_int8(WeightMemory& memory) = 0;
  virtual void reshape(const std::string& input, const std::vector<int64_t>& shape) = 0;
  virtual std::unique_ptr<Compiled> compile(const std::map<std::string, std::string>& settings) = 0;
  virtual std::unique_ptr<Dropping> letting_go() const = 0;
};

class Core {
 public:
  virtual ~Core() = default;
  virtual std::string version() const = 0;
  virtual std::string capabilities() const = 0;  // what the processor computes, one word next to the other
  virtual std::unique_ptr<Model> read(const std::string& path) = 0;
};

// The one symbol of libvtx_openvino.so; the caller owns the core. Null where the library was built for another bridge.
inline constexpr int kBridgeVersion = 8;
inline constexpr char kBridgeSymbol[] = "vtx_openvino_core";
using BridgeFunction = Core* (*)(int version);

}  // namespace vtxcore::openvino
