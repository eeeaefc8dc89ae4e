#include "backends/slots.hpp"

#include <sys/mman.h>

#include <cmath>
#include <cstring>

#include "backends/failures.hpp"

namespace vtxcore {

SlotMemory::SlotMemory(size_t planes, size_t capacity, size_t slot_bytes)
    : planes_(planes), capacity_(capacity), slot_bytes_(slot_bytes), size_(planes * capacity * slot_bytes + 1) {
  void* memory = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) cache_failure(capacity);
#ifdef MADV_NOHUGEPAGE
  ::madvise(memory, size_, MADV_NOHUGEPAGE);
#endif
  data_ = static_cast<uint8_t*>(memory);
}

SlotMemory::~SlotMemory() { ::munmap(data_, size_); }

std::string SlotMemory::read(const Ids& slots) const {
  std::string out(planes_ * slots.size() * slot_bytes_, '\0');
  char* to = out.data();
  for (size_t plane = 0; plane < planes_; ++plane)
    for (int64_t slot : slots) {
      std::memcpy(to, data_ + (plane * capacity_ + static_cast<size_t>(slot)) * slot_bytes_, slot_bytes_);
      to += slot_bytes_;
    }
  return out;
}

void SlotMemory::write(const Ids& slots, const std::string& kv) {
  const char* from = kv.data();
  for (size_t plane = 0; plane < planes_; ++plane)
    for (int64_t slot : slots) {
      std::memcpy(data_ + (plane * capacity_ + static_cast<size_t>(slot)) * slot_bytes_, from, slot_bytes_);
      from += slot_bytes_;
    }
}

float half_to_float(uint16_t half) {
  int exponent = half >> 10 & 31;
  int mantissa = half & 1023;
  float value = exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
                : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                 : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return half & 0x8000 ? -value : value;
}

}  // namespace vtxcore
