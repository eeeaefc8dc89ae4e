#include "bundle/bundle.hpp"

#include <sys/stat.h>

#include "bundle/releases.hpp"
#include "bundle/sha256.hpp"

namespace vtxcore {
namespace {

constexpr char kManifest[] = "vtx.json";

// The content of vtx.json.
std::string read_manifest(const Folder& folder, const PublicKey* key) {
  struct stat status;
  bool there = ::stat(folder.path().c_str(), &status) == 0;
  if (there && S_ISREG(status.st_mode))
    fail(Kind::bundle, folder.path(),
         " is a file; name the bundle's directory, unpack an archive first, or make a bundle with vtx-export");
  if (!there || !S_ISDIR(status.st_mode))
    fail(Kind::bundle, folder.path(), " is not a directory; make a bundle with vtx-export --out DIR");
  if (!folder.exists(kManifest))
    fail(Kind::bundle, folder.path(), " holds no ", kManifest, ", so it is not a bundle; make one with vtx-export");
  if (key == nullptr && !folder.exists(std::string(kManifest) + kChecksum))
    parse_manifest(folder.read(kManifest, names::kMaxManifest, false));  // an older format says so
  return read_sealed(folder, kManifest, names::kMaxManifest, kCopyAgain, key);
}

[[noreturn]] void altered(const std::string& name) {
  fail(Kind::bundle, name, " was altered after the export (its SHA-256 differs); ", kCopyAgain);
}

}  // namespace

Bundle::Bundle(const std::string& path, std::optional<PublicKey> key) : folder_(path), key_(std::move(key)) {
  std::string content = read_manifest(folder_, this->key());
  digest_ = sha256_hex(content);
  manifest_ = parse_manifest(content);
  if (key_) check_release(manifest_.release, *key_, folder());
  for (const auto& [name, record] : manifest_.files) check(name);
}

File Bundle::open(const std::string& name, int64_t limit) const {
  int64_t wanted = manifest_.files.at(name).bytes;
  File file = folder_.open(name, limit);
  if (file.size() != wanted)
    fail(Kind::bundle, name, " holds ", grouped(file.size()), " bytes, the manifest says ", grouped(wanted), "; ",
         kCopyAgain);
  return file;
}

void Bundle::check(const std::string& name) {
  File file = open(name);
  const FileRecord& record = manifest_.files.at(name);
  if ((key_ || record.bytes <= names::kQuickBytes) && file.sha256() != record.sha256) altered(name);
  checked_[name] = file.identity();
}

std::string Bundle::read(const std::string& name, int64_t limit) const {
  if (manifest_.files.count(name) == 0) fail(Kind::bundle, name, " is missing from the bundle ", folder(), "; ", kCopyAgain);
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
