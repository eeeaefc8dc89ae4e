// How memory is taken, so that no more of it is resident than what is used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vtxcore {

// Zeros that take memory where they are written, page by page of the smallest size: a cache that is filled in part has
// its slots in as many places as it has heads, and large pages would make all of it resident.
class ZeroedPages {
 public:
  // Throws Error(device), which names the `capacity` of the cache that they are for, where there is no memory.
  ZeroedPages(size_t bytes, size_t capacity);
  ~ZeroedPages();
  ZeroedPages(const ZeroedPages&) = delete;
  ZeroedPages& operator=(const ZeroedPages&) = delete;

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }

 private:
  size_t size_;
  uint8_t* data_;
};

}  // namespace vtxcore
