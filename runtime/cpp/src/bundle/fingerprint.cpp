#include "bundle/fingerprint.hpp"

#include <glob.h>

#include <algorithm>
#include <cstdlib>

#include "bundle/fields.hpp"

namespace vtxcore {
namespace {

constexpr char kRecord[] = "engines.json";
constexpr int64_t kFormat = 1, kMaxRecord = 4 << 20;

std::string in_target(const std::string& target, const std::string& file) {
  return cat(kEngineFolder, "/", target, "/", file);
}

std::string dotted(std::pair<int, int> capability) { return cat(capability.first, ".", capability.second); }

const Json::Object& object_of(Fields& fields, const char* key) {
  const Json::Object* found = fields.get(key).object();
  if (found == nullptr) fields.wrong<int>(key, "an object");
  return *found;
}

std::array<int64_t, 3> read_range(const Json& value, Fields& fields) {
  const Json::Array* found = value.array();
  if (found == nullptr || found->size() != 3) fields.wrong<int>("profiles", "ranges of three sizes");
  std::array<int64_t, 3> range{};
  for (size_t i = 0; i < 3; ++i) {
    const int64_t* size = (*found)[i].integer();
    if (size == nullptr || *size < (i ? range[i - 1] : 0)) fields.wrong<int>("profiles", "sizes that rise from 0");
    range[i] = *size;
  }
  return range;
}

EngineRecord read_engine(const Json& value, const std::string& where) {
  Fields fields(value, where);
  EngineRecord out{
      check_inside(fields.text("file"), where), fields.whole("bytes", 0, int64_t{1} << 50), fields.text("sha256"), {}, {}};
  for (const auto& [name, sum] : object_of(fields, "sources")) {
    if (sum.string() == nullptr) fields.wrong<int>("sources", "an object of strings");
    out.sources[name] = *sum.string();
  }
  for (const Json& profile : fields.list("profiles")) {
    if (profile.object() == nullptr) fields.wrong<int>("profiles", "a list of objects");
    out.profiles.emplace_back();
    for (const auto& [size, range] : *profile.object()) out.profiles.back()[size] = read_range(range, fields);
  }
  fields.done();
  return out;
}

EngineSet read_set(const Json& value, const std::string& where) {
  Fields fields(value, where);
  if (int64_t format = fields.whole("format", 0); format != kFormat)
    fail(Kind::bundle, where, " has format ", format, ", this vtx reads ", kFormat, "; ", kUpgrade);
  EngineSet out;
  out.target = fields.text("target"), out.flavour = fields.text("flavour"), out.version = fields.text("version");
  Ids capability = fields.wholes("capability", 0, 1000);
  if (capability.size() != 2) fields.wrong<int>("capability", "two numbers");
  out.capability = {static_cast<int>(capability[0]), static_cast<int>(capability[1])};
  out.dialect = fields.text("dialect"), out.precision = fields.text("precision");
  if (!fields.get("workspace").is_null()) fields.whole("workspace", 0, int64_t{1} << 50);
  for (const auto& [graph, engine] : object_of(fields, "engines"))
    out.engines.emplace(graph, read_engine(engine, cat(where, ": engines.", graph)));
  fields.done();
  return out;
}

}  // namespace

int64_t EngineRecord::longest(const std::string& size) const {
  int64_t most = 0;
  for (const auto& profile : profiles)
    if (auto range = profile.find(size); range != profile.end()) most = std::max(most, range->second[2]);
  return most;
}

std::vector<std::string> engine_targets(const Bundle& bundle) {
  std::vector<std::string> out;
  std::string start;  // of the paths found, with what means something in a pattern taken as it is
  for (char c : bundle.folder() + "/" + kEngineFolder + "/") {
    if (std::string("*?[\\").find(c) != std::string::npos) start += '\\';
    start += c;
  }
  glob_t found;
  if (::glob((start + "*/" + kRecord).c_str(), 0, nullptr, &found) == 0)
    for (size_t i = 0; i < found.gl_pathc; ++i) {
      std::string path = found.gl_pathv[i];
      path.resize(path.size() - sizeof kRecord);
      out.push_back(path.substr(path.rfind('/') + 1));
    }
  ::globfree(&found);
  return out;
}

EngineSet read_engines(const Bundle& bundle, const std::string& target) {
  Folder folder(bundle.folder());
  std::string where = in_target(target, kRecord), fix = build_command(bundle, target);
  if (!folder.exists(where)) fail(Kind::bundle, folder.path(), " holds no engines for ", target, "; ", fix);
  // It is written after the bundle was signed, so its signature is its own, by the same key.
  std::string content = read_sealed(folder, where, kMaxRecord, fix + (bundle.key() ? " --sign KEY" : ""), bundle.key());
  try {
    return read_set(parse_json(content, where, Kind::bundle), where);
  } catch (const Error& error) {
    fail(Kind::bundle, where, " is damaged (", error.what(), "); ", fix);
  }
}

void check_machine(const Bundle& bundle, const EngineSet& engines, const std::string& version,
                   const std::optional<Gpu>& gpu) {
  if (!gpu)
    fail(Kind::device, "no NVIDIA GPU answers here: its driver is not installed, or this is a container without it; ",
         "install the driver (nvidia-smi shows it), or use --device cpu");
  if ((version.empty() || engines.version == version) && engines.capability == gpu->capability) return;
  std::string made_for =
      cat(flavour_name(engines.flavour), " ", engines.version, " and compute capability ", dotted(engines.capability));
  fail(Kind::device, "the engines in ", kEngineFolder, "/", engines.target, " were built for ", made_for, "; here is ",
       version.empty() ? "" : flavour_name(engines.flavour) + " " + version + " and ", "compute capability ",
       dotted(gpu->capability), " (", gpu->name, "); ", build_command(bundle, "this"));
}

const EngineRecord& check_sources(const Bundle& bundle, const EngineSet& engines, const std::string& graph) {
  std::string fix = build_command(bundle, engines.target);
  auto record = engines.engines.find(graph);
  if (record == engines.engines.end())
    fail(Kind::bundle, kEngineFolder, "/", engines.target, " holds no engine of ", graph, "; ", fix);
  for (const auto& [name, source] : record->second.sources) {
    auto known = bundle.manifest().files.find(name);
    if (known == bundle.manifest().files.end() || known->second.sha256 != source)
      fail(Kind::bundle, "the engine ", record->second.file, " was built from another ", name, " than this bundle's; ", fix);
  }
  return record->second;
}

File open_engine(const Bundle& bundle, const EngineSet& engines, const EngineRecord& record) {
  std::string fix = build_command(bundle, engines.target);
  Folder folder(bundle.folder());
  std::string name = in_target(engines.target, record.file);
  if (!folder.exists(name)) fail(Kind::bundle, name, " is missing from the bundle ", folder.path(), "; ", fix);
  File file = folder.open(name);
  if (file.size() != record.bytes)
    fail(Kind::bundle, record.file, " holds ", grouped(file.size()), " bytes of ", grouped(record.bytes), ", it is ",
         file.size() < record.bytes ? "cut short" : "too long", "; ", fix);
  if ((bundle.key() || file.size() <= names::kQuickBytes) && file.sha256() != record.sha256)
    fail(Kind::bundle, record.file, " was altered after it was built (its SHA-256 differs); ", fix);
  return file;
}

std::string build_command(const Bundle& bundle, const std::string& target) {
  return cat("build them with: vtx-build --bundle ", bundle.folder(), " --target ", target);
}

std::string flavour_name(const std::string& flavour) {
  return flavour == kFlavourRtx ? "TensorRT-RTX" : flavour == kFlavourEnterprise ? "TensorRT" : flavour;
}

}  // namespace vtxcore
