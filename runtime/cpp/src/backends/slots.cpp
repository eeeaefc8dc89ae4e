#include "backends/slots.hpp"

#include <sys/mman.h>

#include <cstring>
#include <map>

#include "backends/contract.hpp"
#include "bundle/names.hpp"

namespace vtxcore {

Ids seen_slots(const TokenStates& tokens, int64_t length) {
  Ids seen = count_up(length + 1, tokens.count());
  auto groups = tokens.inputs.find(names::kGroup);
  if (groups == tokens.inputs.end()) return seen;
  std::map<float, int64_t> last;
  for (size_t i = seen.size(); i-- > 0;)
    if (float group = groups->second.data[i]; group >= 0) seen[i] = last.emplace(group, seen[i]).first->second;
  return seen;
}

SlotMemory::SlotMemory(size_t planes, size_t capacity, size_t slot_bytes)
    : planes_(planes), capacity_(capacity), slot_bytes_(slot_bytes),
      memory_(static_cast<size_t>(
                  product({static_cast<int64_t>(planes), static_cast<int64_t>(capacity), static_cast<int64_t>(slot_bytes)})),
              capacity) {}

SavedSlots SlotMemory::read(const Ids& slots) const {
  SavedSlots out(planes_ * slots.size() * slot_bytes_);
  uint8_t* to = out.data();
  for (size_t plane = 0; plane < planes_; ++plane)
    for (int64_t slot : slots) {
      std::memcpy(to, memory_.data() + (plane * capacity_ + static_cast<size_t>(slot)) * slot_bytes_, slot_bytes_);
      to += slot_bytes_;
    }
  return out;
}

void SlotMemory::write(const Ids& slots, const SavedSlots& kv) {
  const uint8_t* from = kv.data();
  for (size_t plane = 0; plane < planes_; ++plane)
    for (int64_t slot : slots) {
      std::memcpy(memory_.data() + (plane * capacity_ + static_cast<size_t>(slot)) * slot_bytes_, from, slot_bytes_);
      from += slot_bytes_;
    }
}

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
