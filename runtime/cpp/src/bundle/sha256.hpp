// SHA-256 (FIPS 180-4).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace vtxcore {

bool has_sha_instructions();  // of the processor

class Sha256 {
 public:
  Sha256();
  // `instructions`: whether the processor's own are used, which must be there.
  explicit Sha256(bool instructions) : instructions_(instructions) {}
  void update(const void* data, size_t size);
  // 64 hexadecimal digits; the object is used up.
  std::string hex();

 private:
  void blocks(const uint8_t* data, size_t count);
  void block(const uint8_t* data);  // without instructions for it

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> waiting_{};
  size_t filled_ = 0;
  bool instructions_;
  uint64_t total_ = 0;
};

inline std::string sha256_hex(std::string_view content) {
  Sha256 hash;
  hash.update(content.data(), content.size());
  return hash.hex();
}

}  // namespace vtxcore
