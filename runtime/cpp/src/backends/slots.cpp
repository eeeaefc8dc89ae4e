#include "backends/slots.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "backends/backend.hpp"
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

size_t begin_of_group(const TokenStates& tokens, size_t number) {
  auto groups = tokens.inputs.find(names::kGroup);
  if (groups == tokens.inputs.end() || number == 0 || number >= tokens.count()) return number;
  const Floats& of = groups->second.data;
  if (of[number] < 0) return number;
  return std::min(number, static_cast<size_t>(std::find(of.begin(), of.end(), of[number]) - of.begin()));
}

std::vector<size_t> run_ends(const TokenStates& tokens, size_t first, size_t end, size_t most) {
  std::set<size_t> found;
  size_t at = first;
  for (size_t left = most > 0 ? (end - first + most - 1) / most : 1; left > 0; --left) {
    at += (end - at + left - 1) / left;
    found.insert(begin_of_group(tokens, at));
  }
  found.erase(first);
  return {found.begin(), found.end()};
}

std::vector<size_t> part_ends(const TokenStates& tokens, size_t most) {
  std::vector<size_t> out;
  for (size_t start = 0, count = tokens.count(); start < count; start = out.back()) {
    size_t end = begin_of_group(tokens, std::min(start + most, count));
    if (end == start)  // a group that is longer
      do ++end;
      while (begin_of_group(tokens, end) != end);
    out.push_back(end);
  }
  return out;
}

namespace {

size_t total_of(const std::vector<size_t>& slot_bytes, size_t capacity) {
  auto slots = static_cast<int64_t>(capacity), total = int64_t{0};
  for (size_t bytes : slot_bytes)
    if (__builtin_add_overflow(total, product({slots, static_cast<int64_t>(bytes)}), &total)) cache_failure(capacity);
  return static_cast<size_t>(total);
}

}  // namespace

SlotMemory::SlotMemory(const std::vector<size_t>& slot_bytes, size_t capacity)
    : slot_bytes_(slot_bytes), memory_(total_of(slot_bytes, capacity), capacity) {
  size_t begin = 0;
  for (size_t bytes : slot_bytes) begins_.push_back(std::exchange(begin, begin + capacity * bytes));
}

SavedSlots SlotMemory::read(const Ids& slots) const {
  SavedSlots out(slots.size() * std::accumulate(slot_bytes_.begin(), slot_bytes_.end(), size_t{0}));
  uint8_t* to = out.data();
  for (size_t plane = 0; plane < slot_bytes_.size(); ++plane)
    for (int64_t slot : slots) {
      const size_t bytes = slot_bytes_[plane];
      std::memcpy(to, memory_.data() + begins_[plane] + static_cast<size_t>(slot) * bytes, bytes);
      to += bytes;
    }
  return out;
}

void SlotMemory::write(const Ids& slots, const SavedSlots& kv) {
  const uint8_t* from = kv.data();
  for (size_t plane = 0; plane < slot_bytes_.size(); ++plane)
    for (int64_t slot : slots) {
      const size_t bytes = slot_bytes_[plane];
      std::memcpy(memory_.data() + begins_[plane] + static_cast<size_t>(slot) * bytes, from, bytes);
      from += bytes;
    }
}

// ---- what all caches do alike

size_t LayerForm::bytes() const {
  auto out = static_cast<size_t>(dtype == "F32" ? 4 : dtype == "F16" || dtype == "U16" ? 2 : 1);
  for (int64_t size : shape) out *= static_cast<size_t>(size);
  return out;
}

SavedSlots StageCache::read(const Ids& slots) {
  SavedSlots out = read_kv(slots);
  if (!slides()) return out;
  const Ids positions = take(placed_, slots);
  const auto* first = reinterpret_cast<const uint8_t*>(positions.data());
  out.insert(out.end(), first, first + positions.size() * sizeof(int64_t));
  return out;
}

void StageCache::write(const Ids& slots, const SavedSlots& saved, int64_t filled) {
  if (!slides()) {
    put_kv(slots, saved, filled);
  } else {
    auto behind = saved.end() - static_cast<std::ptrdiff_t>(slots.size() * sizeof(int64_t));
    Ids positions(slots.size());
    std::copy(behind, saved.end(), reinterpret_cast<uint8_t*>(positions.data()));
    for (size_t i = 0; i < slots.size(); ++i) placed_[static_cast<size_t>(slots[i])] = positions[i];
    put_kv(slots, SavedSlots(saved.begin(), behind), filled);
  }
  length = filled;
}

void StageCache::write_kv(const Ids& slots, const SavedSlots& kv, const Positions& positions, int64_t filled) {
  for (size_t i = 0; i < slots.size() && slides(); ++i) placed_[static_cast<size_t>(slots[i])] = positions[i].front();
  put_kv(slots, kv, filled);
  length = filled;
}

Ids StageCache::first_slots(const Positions& positions, int64_t filled) const {
  Ids out;
  auto end = placed_.begin() + filled;
  for (const Position& position : positions)
    out.push_back(std::upper_bound(placed_.begin(), end, position.front() - window_) - placed_.begin());
  return out;
}

Rows StageCache::append_in_parts(const TokenStates& tokens, const Positions& positions, int64_t most, const Ids* outputs) {
  Rows all(0, tokens.hidden.width);
  all.width = tokens.hidden.width;
  size_t first = 0;
  for (size_t end : run_ends(tokens, 0, tokens.count(), static_cast<size_t>(most))) {
    const Ids which = count_up(static_cast<int64_t>(first), end - first);
    const TokenStates part{take(tokens.hidden, which), take(tokens.inputs, which)};
    vtxcore::append(all, run(part, take(positions, which), false, nullptr));
    length += static_cast<int64_t>(end - first);
    first = end;
  }
  return outputs ? take(all, *outputs) : all;
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
