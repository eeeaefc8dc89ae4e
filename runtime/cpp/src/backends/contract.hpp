// What each graph must take and give, compared when it is loaded, so that no run fails for it.
#pragma once

#include <string>
#include <vector>

#include "base/tensors.hpp"
#include "bundle/graphs.hpp"

namespace vtxcore {

// An input or output as an engine describes it: numpy's name of its type, and its sizes, negative where they are free.
struct Port {
  std::string name, dtype;
  Ids shape;
};

// Throws Error(bundle) unless a loaded graph takes and gives what its contract says.
void check_ports(const std::string& graph, const std::vector<Port>& inputs, const std::vector<Port>& outputs,
                 const GraphIO& contract);

// Throws Error(bundle) unless a run gave something for each of `count` tokens: sizes that a graph leaves free show only
// there, and sessions write into what they are given.
void check_rows(const std::string& graph, size_t rows, size_t count);

// Throws Error(bundle) unless the last size of an output is `width`.
void check_width(const std::string& graph, const Ids& shape, int64_t width);

// An engine cannot load a graph: Error(bundle), or Error(device) where memory is lacking.
[[noreturn]] void load_failure(const std::string& engine, const std::string& graph, const std::string& reason);

// An engine fails while it binds to or runs a graph: Error(device).
[[noreturn]] void run_failure(const std::string& engine, const std::string& graph, const std::string& reason);

// There is no memory for a stage's cache of `capacity` slots: Error(device).
[[noreturn]] void cache_failure(size_t capacity);

}  // namespace vtxcore
