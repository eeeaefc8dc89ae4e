// Failures of engines as errors of vtx: one line with the graph's name, the engine's reason, and the fix.
#pragma once

#include <string>

namespace vtxcore {

// An engine cannot load a graph: Error(bundle), or Error(device) where memory is lacking.
[[noreturn]] void load_failure(const std::string& engine, const std::string& graph, const std::string& reason);

// An engine fails while it binds to or runs a graph: Error(device).
[[noreturn]] void run_failure(const std::string& engine, const std::string& graph, const std::string& reason);

// There is no memory for a stage's cache of `capacity` slots: Error(device).
[[noreturn]] void cache_failure(size_t capacity);

}  // namespace vtxcore
