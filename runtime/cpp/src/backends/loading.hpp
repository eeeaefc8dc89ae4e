// Graphs of a bundle that are loaded side by side: an engine folds and packs weights on one thread a graph.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bundle/manifest.hpp"

namespace vtxcore {

// Bytes of memory that a new program could take; none if the system does not say.
std::optional<int64_t> available_memory();

// Bytes with three figures: 9.41 MB.
std::string size_text(int64_t count);

// The memory that is free, and the limit of this process if it has one, for messages about too little of it.
std::string memory_in_words();

// Whether a load may take memory to be quicker: graphs side by side. So it is with small bundles, and where twice what the
// weights take in `compute` arithmetic is free: on onnxruntime each graph holds them twice while they are packed.
bool is_roomy(const Manifest& m, const std::string& compute);

// Graphs to be loaded: how to, and how large each is next to the others.
struct Loads {
  std::vector<std::function<void()>> work;
  std::vector<int64_t> sizes;
  void add(int64_t size, std::function<void()> load);
  // `threads` at a time, the largest first: so the last of them is a short one, next to which few threads wait.
  void run(int threads);
};

// A shared library, loaded for as long as the process runs: engines do not survive being unloaded.
class Library {
 public:
  // `path`: a file or a directory that the application names, empty for the search: what the process has already
  // loaded, then the variable `variable` of the environment, then `names` where the system looks. `symbol` must be
  // there. Throws Error(device), saying where it looked.
  Library(const std::string& engine, const std::string& path, const char* variable, const std::vector<std::string>& names,
          const char* symbol);

  void* symbol(const char* name) const;  // null if there is none
  const std::string& where() const { return where_; }

 private:
  bool open(const std::string& name, const char* symbol);
  void* handle_ = nullptr;
  std::string where_, tried_;
};

// A library of libvtx's own that speaks to an engine cannot be used: Error(device).
[[noreturn]] void plugin_failure(const std::string& plugin, const std::string& reason, const std::string& engine);
inline constexpr char kOtherLibvtx[] = "it is of another libvtx";

// The directory that this library, or the program that it is part of, lies in.
std::string own_directory();

// Cores that this process may use, which in a container are fewer than the machine has.
int cores();

// The threads to compute with: as many as `wanted`, 0 for all, at most one a core.
int threads_of(int wanted);

}  // namespace vtxcore
