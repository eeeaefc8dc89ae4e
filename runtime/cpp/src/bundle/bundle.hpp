// A bundle on disk: its manifest, its files, and whether they are what they were at export.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "bundle/files.hpp"
#include "bundle/manifest.hpp"
#include "bundle/safetensors.hpp"
#include "bundle/seal.hpp"

namespace vtxcore {

class Bundle {
 public:
  // Reads the manifest, and checks every file's presence and size and the checksums of files up to 64 MB. With a key
  // the manifest's signature is verified before anything else is read or parsed, and every file is hashed.
  // Throws Error(bundle).
  explicit Bundle(const std::string& path, std::optional<PublicKey> key = std::nullopt);

  const Manifest& manifest() const { return manifest_; }
  const std::string& folder() const { return folder_.path(); }
  // SHA-256 of vtx.json.
  const std::string& digest() const { return digest_; }
  // The key that must have signed the bundle; null if none is asked for.
  const PublicKey* key() const { return key_ ? &*key_ : nullptr; }

  // A file of at most `limit` bytes; these very bytes were compared with the manifest's checksum.
  std::string read(const std::string& name, int64_t limit) const;
  Tensors tensors(const std::string& name, int64_t limit) const { return unpack(read(name, limit), name); }

  // The path of a graph for a library that opens it, and the weights it names, by itself. Called before and after,
  // `check_still` throws where a file is not the one that was checked.
  std::string path(const std::string& name) const { return folder() + "/" + name; }
  void check_still(const std::string& graph) const;

 private:
  File open(const std::string& name, int64_t limit = -1) const;
  void check(const std::string& name);

  Folder folder_;
  std::optional<PublicKey> key_;
  std::string digest_;
  Manifest manifest_;
  std::map<std::string, Identity> checked_;
};

}  // namespace vtxcore
