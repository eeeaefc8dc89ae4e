#include "backends/engines.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "bundle/names.hpp"
#include "host/gpu.hpp"

namespace vtxcore {

const std::vector<Engine>& engines() {
  static const std::vector<Engine> kEngines{
      ort_engine(),
      openvino_engine(),
      tensorrt_engine(),
  };
  return kEngines;
}

namespace {

constexpr char kAuto[] = "auto";

bool computes(const Engine& engine, const std::string& compute) {
  return std::find(engine.compute.begin(), engine.compute.end(), compute) != engine.compute.end();
}

// Devices that compute so; with an empty `compute` all.
std::string devices(const std::string& compute = "") {
  std::vector<std::string> out;
  for (const Engine& engine : engines())
    if (compute.empty() || computes(engine, compute)) out.emplace_back(engine.device);
  return listed(out);
}

std::string arithmetic() {
  std::vector<std::string> out;
  for (const Engine& engine : engines())
    for (const std::string& compute : engine.compute)
      if (std::find(out.begin(), out.end(), compute) == out.end()) out.push_back(compute);
  return listed(out);
}

// The instruction sets of which this arithmetic needs one, as Linux names them.
std::vector<std::string> instructions(const std::string& compute) {
  std::vector<std::string> out;
  for (const names::Instructions& known : names::kInstructions)
    if (compute == known.compute) out.emplace_back(known.flag);
  return out;
}

// Whether every core has what this arithmetic needs. Other systems than Linux do not say.
bool has_instructions(const std::string& compute) {
  const std::vector<std::string> flags = instructions(compute);
  if (flags.empty()) return true;
  std::ifstream file("/proc/cpuinfo");
  bool able = false;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    able = false;
    std::istringstream words(line);
    for (std::string word; words >> word;) able |= std::find(flags.begin(), flags.end(), word) != flags.end();
    if (!able) return false;
  }
  return able;
}

// The fastest arithmetic that kept the bundle's answers at export, or the engine's first. int4 weights do not multiply
// integers by default, since they would take three times the memory.
std::string default_compute(const Engine& engine, const Manifest& m) {
  auto kept = [&](const char* kind) {
    return computes(engine, kind) && std::find(m.arithmetic.begin(), m.arithmetic.end(), kind) != m.arithmetic.end();
  };
  if (kept("int8") && m.precision != "int4" && has_instructions("int8")) return "int8";
  if (kept("bf16") && has_instructions("bf16")) return "bf16";
  return engine.compute.front();
}

// Why this engine cannot answer, and the fix; empty if it can.
std::string obstacle(const Engine& engine, const Bundle& bundle, const BackendOptions& options) {
  if (!options.compute.empty() && !computes(engine, options.compute))
    return cat(engine.device, " computes in ", listed(engine.compute), ", not ", options.compute,
               "; that has: ", devices(options.compute));
  if (!engine.gpu && bundle.manifest().dialects.count(engine.dialect) == 0)  // engines name the dialect of theirs
    return cat(engine.device, " reads graphs of the '", engine.dialect, "' dialect and this bundle holds none; export it ",
               "with --dialect ort,", engine.dialect);
  if (!has_instructions(options.compute))
    return cat(options.compute, " arithmetic needs one of the instruction sets ", listed(instructions(options.compute)),
               ", and this processor reports none; use --compute f32, or leave it out");
  if (options.gpu > 0 && !find_gpu(options.gpu))
    return cat(engine.device, ":", std::to_string(options.gpu), " is not there; see nvidia-smi");
  try {
    engine.check(bundle, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// `failed`: a device that a load has failed on, which is left out.
const Engine& choose(const Bundle& bundle, const std::string& device, const BackendOptions& options,
                     const std::string& failed) {
  std::vector<const Engine*> able;
  for (const Engine& engine : engines())
    if (failed != engine.device && (device == kAuto || device == engine.device)) able.push_back(&engine);
  std::stable_sort(able.begin(), able.end(),
                   [&](const Engine* a, const Engine* b) { return a->merit(bundle) > b->merit(bundle); });
  std::string first;
  for (const Engine* engine : able) {
    std::string reason = obstacle(*engine, bundle, options);
    if (reason.empty()) return *engine;
    if (first.empty()) first = reason;
  }
  throw Error(Kind::device, first);
}

}  // namespace

std::string obstacle(const Bundle& bundle, const std::string& device, const BackendOptions& options) {
  for (const Engine& engine : engines())
    if (device == engine.device) return obstacle(engine, bundle, options);
  return cat("device '", device.substr(0, 40), "' is not available in this version");
}

std::pair<std::string, int> split_device(const std::string& device) {
  size_t colon = device.find(':');
  std::string name = device.substr(0, colon), number = colon == std::string::npos ? "0" : device.substr(colon + 1);
  const Engine* found = nullptr;
  for (const Engine& engine : engines())
    if (name == engine.device) found = &engine;
  if (found == nullptr && name != kAuto)
    fail(Kind::device, "device '", device.substr(0, 40), "' is not available in this version; it runs on: ", kAuto, ", ",
         devices());
  bool digits = !number.empty() && number.size() < 4 && number.find_first_not_of("0123456789") == std::string::npos;
  if (colon != std::string::npos && (found == nullptr || !found->gpu || !digits))
    fail(Kind::device, "device '", device.substr(0, 40), "': only a GPU has a number, from 0: tensorrt:1");
  return {name, std::stoi(number)};
}

std::unique_ptr<Backend> open_backend(const Bundle& bundle, const std::string& device, BackendOptions options) {
  if (!options.compute.empty() && devices(options.compute).empty())
    fail(Kind::device, "no device computes in '", options.compute.substr(0, 40), "'; there are: ", arithmetic());
  auto [name, gpu] = split_device(device);
  options.gpu = gpu;
  auto open = [&](const Engine& engine) {
    BackendOptions chosen = options;
    if (chosen.compute.empty()) chosen.compute = default_compute(engine, bundle.manifest());
    return engine.open(bundle, chosen);
  };
  const Engine& engine = choose(bundle, name, options, "");
  try {
    return open(engine);
  } catch (const Error& error) {  // auto goes on to a CPU where a GPU has no room, or does not answer
    if (name != kAuto || !engine.gpu || error.kind() != Kind::device) throw;
    return open(choose(bundle, name, options, engine.device));
  }
}

}  // namespace vtxcore
