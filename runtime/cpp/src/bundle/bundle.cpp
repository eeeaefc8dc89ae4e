#include "bundle/bundle.hpp"

#include <sys/stat.h>

#include "bundle/sha256.hpp"

namespace vtxcore {
namespace {

constexpr char kManifest[] = "vtx.json";
constexpr char kCure[] = "copy the bundle again, or export it again";
constexpr int64_t kMaxChecksum = 1 << 10;

// The content of vtx.json, whose checksum stands in a file beside it.
std::string read_sealed(const Folder& folder) {
  struct stat status;
  if (::stat(folder.path().c_str(), &status) != 0 || !S_ISDIR(status.st_mode))
    fail(Kind::bundle, folder.path(), " is not a directory; make a bundle with vtx-export --out DIR");
  if (!folder.exists(kManifest))
    fail(Kind::bundle, folder.path(), " holds no ", kManifest, ", so it is not a bundle; make one with vtx-export");
  std::string content = folder.read(kManifest, names::kMaxManifest, false);
  std::string seal = std::string(kManifest) + ".sha256";
  if (!folder.exists(seal)) {
    parse_manifest(content);  // an older format says so
    fail(Kind::bundle, seal, " is missing from the bundle ", folder.path(), "; ", kCure);
  }
  if (folder.read(seal, kMaxChecksum, false) != sha256_hex(content) + "  " + kManifest + "\n")
    fail(Kind::bundle, kManifest, " was altered (its SHA-256 is not the one in ", seal, "); ", kCure);
  return content;
}

[[noreturn]] void altered(const std::string& name) {
  fail(Kind::bundle, name, " was altered after the export (its SHA-256 differs); ", kCure);
}

}  // namespace

Bundle::Bundle(const std::string& path) : folder_(path) {
  std::string content = read_sealed(folder_);
  digest_ = sha256_hex(content);
  manifest_ = parse_manifest(content);
  for (const auto& [name, record] : manifest_.files) check(name);
}

File Bundle::open(const std::string& name, int64_t limit) const {
  int64_t wanted = manifest_.files.at(name).bytes;
  File file = folder_.open(name, limit);
  if (file.size() != wanted)
    fail(Kind::bundle, name, " holds ", grouped(file.size()), " bytes, the manifest says ", grouped(wanted), "; ", kCure);
  return file;
}

void Bundle::check(const std::string& name) {
  File file = open(name);
  const FileRecord& record = manifest_.files.at(name);
  if (record.bytes <= names::kQuickBytes && file.sha256() != record.sha256) altered(name);
  checked_[name] = file.identity();
}

std::string Bundle::read(const std::string& name, int64_t limit) const {
  if (manifest_.files.count(name) == 0) fail(Kind::bundle, name, " is missing from the bundle ", folder(), "; ", kCure);
  std::string content = open(name, limit).read_all();
  if (sha256_hex(content) != manifest_.files.at(name).sha256) altered(name);
  return content;
}

void Bundle::check_still(const std::string& graph) const {
  for (const auto& [name, identity] : checked_) {
    bool other_graph = name != graph && name.size() > 5 && name.compare(name.size() - 5, 5, ".onnx") == 0;
    if (!other_graph && !(open(name).identity() == identity))
      fail(Kind::bundle, name, " was replaced or written to after it was checked; load the bundle again");
  }
}

}  // namespace vtxcore
