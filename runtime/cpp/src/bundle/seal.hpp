// What vouches for vtx.json and engines.json, which vouch for all other files: a checksum, and maybe a signature.
#pragma once

#include <memory>
#include <string>

#include "bundle/files.hpp"

namespace vtxcore {

inline constexpr char kChecksum[] = ".sha256", kSignature[] = ".sig";
inline constexpr int64_t kSignatureBytes = 64;

// The Ed25519 key that signatures are checked with, which many threads may use; `name` is its file's, for messages.
class PublicKey {
 public:
  // Reads a PEM file. Throws Error(request), Error(device) without libcrypto.
  explicit PublicKey(const std::string& path);
  const std::string& name() const { return name_; }
  // The first 128 bits of the SHA-256 of the key itself, in hex.
  std::string fingerprint() const;
  bool has_signed(const std::string& content, const std::string& signature) const;

 private:
  std::string name_;
  std::shared_ptr<void> key_;  // EVP_PKEY
};

// The content of a sealed file: first its signature is checked, if a key asks for it, then its checksum. Throws
// Error(bundle), with `fix`, where it is missing, altered, not signed, or signed by somebody else.
std::string read_sealed(const Folder& folder, const std::string& name, int64_t limit, const std::string& fix,
                        const PublicKey* key);

}  // namespace vtxcore
