#include "bundle/seal.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <vector>

#include "base/errors.hpp"
#include "bundle/sha256.hpp"

namespace vtxcore {
namespace {

constexpr int64_t kMaxChecksum = 1 << 10, kMaxKey = 1 << 16;

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

std::string read_sealed(const Folder& folder, const std::string& name, int64_t limit, const std::string& fix,
                        const PublicKey* key) {
  std::string content = folder.read(name, limit, false), seal = name + kChecksum;
  if (key != nullptr) check_signature(folder, name, content, *key);
  if (!folder.exists(seal)) fail(Kind::bundle, seal, " is missing from the bundle ", folder.path(), "; ", fix);
  if (folder.read(seal, kMaxChecksum, false) != sha256_hex(content) + "  " + last_part(name) + "\n")
    fail(Kind::bundle, name, " was altered (its SHA-256 is not the one in ", seal, "); ", fix);
  return content;
}

namespace {

constexpr char kMake[] = "openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out public.pem";

// Gives no password, so that none is asked for at the terminal.
int no_password(char*, int, int, void*) { return -1; }

// The functions that are called, as openssl/evp.h and openssl/pem.h declare them.
struct Libcrypto {
  void* (*bio_over)(const void*, int);
  int (*bio_free)(void*);
  void* (*read_key)(void*, void**, int (*)(char*, int, int, void*), void*);
  int (*kind)(const void*);
  int (*kind_called)(const char*);
  void (*key_free)(void*);
  void* (*context)();
  void (*context_free)(void*);
  int (*begin)(void*, void**, const void*, void*, void*);
  int (*verify)(void*, const unsigned char*, size_t, const unsigned char*, size_t);
  int (*raw)(const void*, unsigned char*, size_t*);
  void (*forget_errors)();
};

template <typename Function>
bool take(void* library, Function& function, std::initializer_list<const char*> names) {
  void* found = nullptr;
  for (const char* name : names)
    if (found == nullptr) found = ::dlsym(library, name);
  function = reinterpret_cast<Function>(found);
  return found != nullptr;
}

// Whether the library has all of them, as 1.1.1 and all newer ones have.
bool fill(void* library, Libcrypto& c) {
  return take(library, c.bio_over, {"BIO_new_mem_buf"}) && take(library, c.bio_free, {"BIO_free"}) &&
         take(library, c.read_key, {"PEM_read_bio_PUBKEY"}) &&
         take(library, c.kind, {"EVP_PKEY_get_base_id", "EVP_PKEY_base_id"}) &&
         take(library, c.kind_called, {"OBJ_sn2nid"}) && take(library, c.key_free, {"EVP_PKEY_free"}) &&
         take(library, c.context, {"EVP_MD_CTX_new"}) && take(library, c.context_free, {"EVP_MD_CTX_free"}) &&
         take(library, c.begin, {"EVP_DigestVerifyInit"}) && take(library, c.verify, {"EVP_DigestVerify"}) &&
         take(library, c.raw, {"EVP_PKEY_get_raw_public_key"}) && take(library, c.forget_errors, {"ERR_clear_error"});
}

Libcrypto find() {
  const char* named = std::getenv("VTX_LIBCRYPTO");
  std::vector<std::string> names{"libcrypto.so.3", "libcrypto.so.4", "libcrypto.so.1.1", "libcrypto.so"};
  if (named && *named) names = {named};
  Libcrypto found;
  std::string tried;
  for (const std::string& name : names) {
    void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // for as long as the process runs
    if (library != nullptr && fill(library, found)) return found;
    const char* problem = library == nullptr ? ::dlerror() : nullptr;
    tried += (tried.empty() ? "" : "; ") + (problem ? std::string(problem) : name + " is too old or another library");
    if (library != nullptr) ::dlclose(library);
  }
  not_found("signatures need OpenSSL's libcrypto, 1.1.1 or newer, which", tried, "in VTX_LIBCRYPTO");
}

const Libcrypto& libcrypto() {
  static const Libcrypto found = find();  // once it throws, the next call searches again
  return found;
}

}  // namespace

PublicKey::PublicKey(const std::string& path) : name_(last_part(path)) {
  std::string pem = read_named(path, kMaxKey, Kind::request);
  const Libcrypto& c = libcrypto();
  std::shared_ptr<void> bio(c.bio_over(pem.data(), static_cast<int>(pem.size())), c.bio_free);
  if (!bio) throw std::bad_alloc();
  key_.reset(c.read_key(bio.get(), nullptr, no_password, nullptr), c.key_free);
  c.forget_errors();
  if (!key_) fail(Kind::request, path, " holds no public key in PEM form; make one: ", kMake);
  if (c.kind(key_.get()) != c.kind_called("ED25519")) fail(Kind::request, path, " is not an Ed25519 key; make one: ", kMake);
}

std::string PublicKey::fingerprint() const {
  const Libcrypto& c = libcrypto();
  std::string raw(32, '\0');
  size_t size = raw.size();
  bool given = c.raw(key_.get(), reinterpret_cast<unsigned char*>(raw.data()), &size) == 1 && size == raw.size();
  c.forget_errors();
  if (!given) throw std::bad_alloc();
  return sha256_hex(raw).substr(0, 32);
}

bool PublicKey::has_signed(const std::string& content, const std::string& signature) const {
  const Libcrypto& c = libcrypto();
  std::shared_ptr<void> context(c.context(), c.context_free);
  if (!context) throw std::bad_alloc();
  auto bytes = [](const std::string& text) { return reinterpret_cast<const unsigned char*>(text.data()); };
  bool fits = c.begin(context.get(), nullptr, nullptr, nullptr, key_.get()) == 1 &&
              c.verify(context.get(), bytes(signature), signature.size(), bytes(content), content.size()) == 1;
  c.forget_errors();
  return fits;
}

}  // namespace vtxcore
