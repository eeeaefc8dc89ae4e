#include "bundle/seal.hpp"

#include "bundle/sha256.hpp"

namespace vtxcore {
namespace {

constexpr int64_t kMaxChecksum = 1 << 10, kSignatureBytes = 64, kMaxKey = 1 << 16;

std::string last_part(const std::string& path) { return path.substr(path.rfind('/') + 1); }

void check_signature(const Folder& folder, const std::string& name, const std::string& content, const PublicKey& key) {
  if (!folder.exists(name + kSignature))
    fail(Kind::bundle, name, " of ", folder.path(), " is not signed, and a signature by ", key.name(),
         " is required; use a signed bundle, or make one with --sign KEY");
  std::string signature = folder.read(name + kSignature, kSignatureBytes, false);
  if (!key.has_signed(content, signature))
    fail(Kind::bundle, "the signature of ", name, " does not fit it and ", key.name(),
         ": it was altered, or signed with another key; do not use this bundle");
}

}  // namespace

PublicKey::PublicKey(const std::string& path)
    : name_(last_part(path)), key_(read_named(path, kMaxKey, Kind::request), path) {}

std::string read_sealed(const Folder& folder, const std::string& name, int64_t limit, const std::string& cure,
                        const PublicKey* key) {
  std::string content = folder.read(name, limit, false), seal = name + kChecksum;
  if (key != nullptr) check_signature(folder, name, content, *key);
  if (!folder.exists(seal)) fail(Kind::bundle, seal, " is missing from the bundle ", folder.path(), "; ", cure);
  if (folder.read(seal, kMaxChecksum, false) != sha256_hex(content) + "  " + last_part(name) + "\n")
    fail(Kind::bundle, name, " was altered (its SHA-256 is not the one in ", seal, "); ", cure);
  return content;
}

}  // namespace vtxcore
