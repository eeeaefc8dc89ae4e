// Backends whose graphs run on host arrays: all but their stages.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "backends/contract.hpp"
#include "bundle/bundle.hpp"

namespace vtxcore {

// An array that goes into a graph: numpy's name of its type, and its sizes. `data` is null where it is in place already.
struct GraphInput {
  std::string name, dtype;
  Ids shape;
  const void* data;
};

// An array that comes out of one: float32 or int64.
struct GraphOutput {
  Ids shape;
  Floats floats;
  Ids whole;

  size_t count() const;
  // Takes the values at `data`.
  void copy(const std::string& dtype, const void* data);
};
using GraphOutputs = std::map<std::string, GraphOutput>;

class GraphBackend : public Backend {
 public:
  GraphBackend(const Bundle& bundle, const std::string& dialect);
  TokenStates embed(const Ids& ids) final;
  std::shared_ptr<const ImageTokens> vision(const Pixels& view, const Extras& extras) final;
  std::shared_ptr<const ImageTokens> video(const Pixels& view) final;
  Rows views(const std::vector<const Pixels*>& views) final;
  ExpertStep expert(const std::vector<SavedSlots>& prompt, Floats state, Ids positions) final;
  Rows head(const Rows& rows) override;
  Floats gate(int64_t k, const Rows& rows) final;
  Floats text_tower(const Ids& ids) final;
  Rows project(const Rows& states) final;

 protected:
  // Runs the graph in the bundle's `file`; sizes of its outputs that are free are `tokens`.
  virtual GraphOutputs run(const std::string& file, const std::vector<GraphInput>& inputs, size_t tokens) = 0;
  // An output [count, width] of hidden states [n, hidden].
  Rows run_hidden(const std::string& file, const char* output, const float* hidden, size_t n, size_t count, int64_t width);

  const Bundle& bundle_;
  const Manifest& m_;
  const Graphs& graphs_;

 private:
  std::once_flag tables_read_;  // by the first actions
  std::map<std::string, Floats> tables_;
};

class HostGraph {
 public:
  virtual ~HostGraph() = default;
  virtual GraphOutputs run(const std::vector<GraphInput>& inputs) = 0;
};

// A backend on the processor, with an object for each graph. Those that only images and texts need are loaded when they
// first run.
class HostBackend : public GraphBackend {
 public:
  using GraphBackend::GraphBackend;

 protected:
  virtual std::unique_ptr<HostGraph> load(const std::string& file, const GraphIO& io) = 0;
  virtual void load_stage(size_t index) = 0;
  // All but those, `threads` at a time.
  void load_graphs(int threads);
  GraphOutputs run(const std::string& file, const std::vector<GraphInput>& inputs, size_t tokens) override;
  HostGraph* score() const { return graphs_.score ? loaded_.at(*graphs_.score).get() : nullptr; }

 private:
  std::map<std::string, std::unique_ptr<HostGraph>> loaded_;
  std::mutex lock_;
};

}  // namespace vtxcore
