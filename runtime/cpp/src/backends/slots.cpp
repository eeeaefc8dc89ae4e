#include "backends/slots.hpp"

#include <cstring>

namespace vtxcore {

SlotMemory::SlotMemory(size_t planes, size_t capacity, size_t slot_bytes)
    : planes_(planes), capacity_(capacity), slot_bytes_(slot_bytes),
      memory_(static_cast<size_t>(
                  product({static_cast<int64_t>(planes), static_cast<int64_t>(capacity), static_cast<int64_t>(slot_bytes)})),
              capacity) {}

std::string SlotMemory::read(const Ids& slots) const {
  std::string out(planes_ * slots.size() * slot_bytes_, '\0');
  char* to = out.data();
  for (size_t plane = 0; plane < planes_; ++plane)
    for (int64_t slot : slots) {
      std::memcpy(to, memory_.data() + (plane * capacity_ + static_cast<size_t>(slot)) * slot_bytes_, slot_bytes_);
      to += slot_bytes_;
    }
  return out;
}

void SlotMemory::write(const Ids& slots, const std::string& kv) {
  const char* from = kv.data();
  for (size_t plane = 0; plane < planes_; ++plane)
    for (int64_t slot : slots) {
      std::memcpy(memory_.data() + (plane * capacity_ + static_cast<size_t>(slot)) * slot_bytes_, from, slot_bytes_);
      from += slot_bytes_;
    }
}

}  // namespace vtxcore
