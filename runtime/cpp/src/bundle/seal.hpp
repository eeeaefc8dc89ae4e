// What vouches for vtx.json and engines.json, which vouch for all other files: a checksum, and maybe a signature.
#pragma once

#include <memory>
#include <string>

#include "bundle/files.hpp"

namespace vtxcore {

inline constexpr char kChecksum[] = ".sha256", kSignature[] = ".sig";

// A public key. It may be used by many threads.
class Ed25519Key {
 public:
  // `pem`: the key in PEM form; `path` is for messages. Throws Error(request), Error(device) without libcrypto.
  Ed25519Key(const std::string& pem, const std::string& path);
  // Whether `signature`, of any length, is this key's over `content`.
  bool verifies(const std::string& signature, const std::string& content) const;
  // The first 128 bits of the SHA-256 of the key itself, in hex.
  std::string fingerprint() const;

 private:
  std::shared_ptr<void> key_;  // EVP_PKEY
};

// The Ed25519 key that signatures are checked with; `name` is its file's, for messages.
class PublicKey {
 public:
  // Reads a PEM file. Throws Error(request), Error(device) without libcrypto.
  explicit PublicKey(const std::string& path);
  const std::string& name() const { return name_; }
  std::string fingerprint() const { return key_.fingerprint(); }
  bool has_signed(const std::string& content, const std::string& signature) const {
    return key_.verifies(signature, content);
  }

 private:
  std::string name_;
  Ed25519Key key_;
};

// The content of a sealed file: first its signature is checked, if a key asks for it, then its checksum. Throws
// Error(bundle), with `fix`, where it is missing, altered, not signed, or signed by somebody else.
std::string read_sealed(const Folder& folder, const std::string& name, int64_t limit, const std::string& fix,
                        const PublicKey* key);

}  // namespace vtxcore
