// OpenVINO as libvtx sees it: the library, a compiled graph and its runs, and failures that name it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/graph_backend.hpp"
#include "backends/loading.hpp"
#include "backends/openvino/bridge.hpp"
#include "base/tensors.hpp"
#include "bundle/bundle.hpp"
#include "bundle/graphs.hpp"

namespace vtxcore {

inline constexpr char kOpenvino[] = "OpenVINO";

// OpenVINO and the bridge to it. Throws Error(device) if one is missing, or where they do not belong together.
class OpenvinoLibrary {
 public:
  // `path`: OpenVINO's library or its directory, as for `Library`.
  explicit OpenvinoLibrary(const std::string& path);
  // What makes a core, and where OpenVINO is.
  static std::pair<openvino::BridgeFunction, std::string> find(const std::string& path);

  openvino::Core& core() const { return *core_; }
  // Reads the graph in the bundle's file `name` and compares it with `io`. Throws Error(bundle), Error(device).
  std::unique_ptr<openvino::Model> read(const Bundle& bundle, const std::string& name, const GraphIO& io,
                                        const std::string& compute) const;
  std::string described() const;

 private:
  std::string where_;
  std::unique_ptr<openvino::Core> core_;
};

// Does `work`, whose std::exceptions become the error of a `graph` that cannot be loaded, or fails in a run.
template <typename Work>
auto loading(const std::string& graph, Work&& work) {
  try {
    return work();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    load_failure(kOpenvino, graph, error.what());
  }
}

template <typename Work>
auto running(const std::string& graph, Work&& work) {
  try {
    return work();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    run_failure(kOpenvino, graph, error.what());
  }
}

// A compiled graph with one infer request. Calls from several threads wait for each other.
class OpenvinoGraph : public HostGraph {
 public:
  // `model`: what it was compiled from. The engine packs the weights of a graph of any size in its first run, which leaves
  // no pages of their files resident.
  OpenvinoGraph(std::string name, std::unique_ptr<openvino::Compiled> compiled, std::unique_ptr<openvino::Model> model,
                const GraphIO& io);
  GraphOutputs run(const std::vector<GraphInput>& inputs) override;

  const std::string name;

 private:
  std::vector<TensorSpec> outputs_;
  std::unique_ptr<openvino::Compiled> compiled_;
  std::unique_ptr<openvino::Model> unpacked_;  // null after the first run
  std::unique_ptr<openvino::Request> request_;
  std::mutex lock_;
};

// A stage's compiled graph; each cache makes its own infer request over it. `for_many`: the same stage with its weights in
// a form that is quicker for many tokens, where it has one, and `held` the memory that these weights came from.
// `state_parts`: the widths of the parts in which it gives its layers' states; none: in one.
struct OpenvinoStage {
  std::string name;
  std::unique_ptr<openvino::WeightMemory> held;
  std::unique_ptr<openvino::Compiled> compiled, for_many;
  std::vector<int64_t> state_parts;
};

}  // namespace vtxcore
