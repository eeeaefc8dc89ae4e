#include "backends/allocation.hpp"

#include <sys/mman.h>

#include "backends/failures.hpp"

namespace vtxcore {

ZeroedPages::ZeroedPages(size_t bytes, size_t capacity) : size_(bytes + 1) {
  void* memory = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) cache_failure(capacity);
#ifdef MADV_NOHUGEPAGE
  ::madvise(memory, size_, MADV_NOHUGEPAGE);
#endif
  data_ = static_cast<uint8_t*>(memory);
}

ZeroedPages::~ZeroedPages() { ::munmap(data_, size_); }

}  // namespace vtxcore
