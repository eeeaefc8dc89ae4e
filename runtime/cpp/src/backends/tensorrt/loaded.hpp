// A bundle's engines on one GPU: deserialised, with their contexts, and one buffer for each input and output.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "backends/graph_backend.hpp"
#include "backends/tensorrt/cuda.hpp"
#include "bundle/fingerprint.hpp"
#include "bundle/graphs.hpp"
#include "plugins/tensorrt.hpp"

namespace vtxcore {

using Shapes = std::map<std::string, Ids>;          // of inputs with free sizes
using Addresses = std::map<std::string, uint8_t*>;  // of every tensor, on the device

// One engine with one profile; shapes and addresses are set where they change.
class Context {
 public:
  Context(std::string graph, const std::set<std::string>& tensors, std::unique_ptr<tensorrt::Execution> execution,
          tensorrt::Runtime& runtime, Cuda& cuda)
      : graph_(std::move(graph)), tensors_(tensors), execution_(std::move(execution)), runtime_(runtime), cuda_(cuda) {}
  // Of tensors that the engine has: TensorRT may leave out an input that nothing reads.
  void bind(const Shapes& shapes, const Addresses& addresses);
  void enqueue();

 private:
  std::string graph_;
  const std::set<std::string>& tensors_;
  std::unique_ptr<tensorrt::Execution> execution_;
  tensorrt::Runtime& runtime_;
  Cuda& cuda_;
  Shapes shapes_;
  Addresses addresses_;
};

// The buffer for new K and V of a stage that its engine cannot write where they belong.
std::string new_slots_of(const StageSpec& stage);
constexpr int kDecode = 0, kPrefill = -1;  // of an engine's profiles, which may be one and the same

// The engines of every graph. All of them share their working memory and, by name, their inputs and outputs.
class LoadedEngines {
 public:
  LoadedEngines(const Bundle& bundle, const EngineSet& engines, tensorrt::Runtime& runtime, Cuda& cuda);

  // A context that the caller alone uses. `profile` -1: the last.
  std::unique_ptr<Context> new_context(const std::string& graph, int profile);
  // The one context that all share for a graph and a profile.
  Context& context(const std::string& graph, int profile);
  // The most tokens that a graph's engine takes at once.
  int64_t longest(const std::string& graph) const { return set_.engines.at(graph).longest("tokens"); }
  // The most pixels of a side of an image that the vision graph takes.
  int64_t longest_side() const;
  // Where the input or output of that name lies, which all graphs share.
  uint8_t* address(const std::string& name) const { return buffers_.at(name).address(); }
  // Throws Error(context) if a graph's engine does not take `tokens` tokens at once.
  void check_tokens(const std::string& graph, size_t tokens) const;
  // Runs a graph of one profile on host arrays; sizes of its outputs that are free are `tokens`.
  GraphOutputs run(const std::string& graph, const std::vector<GraphInput>& inputs, int64_t tokens);

 private:
  struct Loaded {
    std::unique_ptr<tensorrt::Deserialized> engine;
    int64_t scratch;
    GraphIO io;
    std::set<std::string> tensors;
  };
  void load(const std::string& graph, const GraphIO& io);
  std::map<std::string, GraphIO> contracts() const;
  std::map<std::string, int64_t> io_bytes() const;

  const Bundle& bundle_;
  const EngineSet& set_;
  tensorrt::Runtime& runtime_;
  Cuda& cuda_;
  std::map<std::string, Loaded> engines_;
  std::unique_ptr<Buffer> scratch_;
  std::map<std::string, Buffer> buffers_;
  std::map<std::pair<std::string, int>, std::unique_ptr<Context>> contexts_;
};

}  // namespace vtxcore
