// Ed25519 by OpenSSL's libcrypto, found at run time: a bundle that needs no signature needs no libcrypto.
#pragma once

#include <memory>
#include <string>

namespace vtxcore {

// A public key. It may be used by many threads.
class Ed25519Key {
 public:
  // `pem`: the key in PEM form; `path` is for messages. Throws Error(request), Error(device) without libcrypto.
  Ed25519Key(const std::string& pem, const std::string& path);
  // Whether `signature`, of any length, is this key's over `content`.
  bool verifies(const std::string& signature, const std::string& content) const;

 private:
  std::shared_ptr<void> key_;  // EVP_PKEY
};

}  // namespace vtxcore
