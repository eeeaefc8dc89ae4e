// `engines.json`: what the engines of one target were built from and for, and whether they fit this machine.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"
#include "host/gpu.hpp"

namespace vtxcore {

constexpr char kEngineFolder[] = "engines";  // of a bundle, with a directory for each target
constexpr char kFlavourEnterprise[] = "tensorrt", kFlavourRtx[] = "tensorrt_rtx";  // names of Python modules

// One engine: the bundle's files it was built from with their SHA-256, its own, and the sizes it takes.
struct EngineRecord {
  std::string file;
  int64_t bytes;
  std::string sha256;
  std::map<std::string, std::string> sources;
  std::vector<std::map<std::string, std::array<int64_t, 3>>> profiles;  // smallest, most likely, largest of free sizes

  int64_t longest(const std::string& size) const;  // the largest value that any profile takes; 0 for an unknown size
};

// The engines of one target, by the graph each was built from.
struct EngineSet {
  std::string target, flavour, version;  // the flavour's whole version
  std::pair<int, int> capability;        // of the GPU
  std::string dialect, precision;
  std::map<std::string, EngineRecord> engines;
};

// The targets that the bundle holds engines for, sorted.
std::vector<std::string> engine_targets(const Bundle& bundle);

// The engines of a target, as recorded. Throws Error(bundle) if the record is missing or damaged.
EngineSet read_engines(const Bundle& bundle, const std::string& target);

// Throws Error(device) unless these engines run on this GPU with a TensorRT of this version, "" where none is known yet.
void check_machine(const Bundle& bundle, const EngineSet& engines, const std::string& version,
                   const std::optional<Gpu>& gpu);

// The record of a graph's engine. Throws Error(bundle) if there is none, or the bundle changed since it was built.
const EngineRecord& check_sources(const Bundle& bundle, const EngineSet& engines, const std::string& graph);

// The engine's file, open; its size and, up to 64 MB, its checksum are those of the record. Throws Error(bundle).
File open_engine(const Bundle& bundle, const EngineSet& engines, const EngineRecord& record);

std::string build_command(const Bundle& bundle, const std::string& target);
std::string flavour_name(const std::string& flavour);  // as people write it: TensorRT-RTX

}  // namespace vtxcore
