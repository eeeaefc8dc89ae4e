// Arrays as the runtime passes them: hidden states, masks and ids.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace vtxcore {

using Ids = std::vector<int64_t>;
using Mask = std::vector<uint8_t>;  // 0 or 1
using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Scores = std::pair<Floats, Floats>;  // sum and maximum of the attention, one a slot or an image token

// A token's position: time, row and column. The three are equal for text, and for all tokens where a position is one number.
using Position = std::array<int64_t, 3>;
using Positions = std::vector<Position>;

using SavedSlots = std::vector<uint8_t>;  // K and V of some slots of a stage, as its cache holds them

struct Rows;

// Hidden states in the memory of a device, which go from stage to stage without the host in between. Nobody writes to them.
class DeviceRows {
 public:
  virtual ~DeviceRows() = default;
  virtual size_t count() const = 0;
  virtual Floats read() const = 0;
  // Some of them: neighbours in the same memory, others as a copy on the device.
  virtual std::shared_ptr<const DeviceRows> take(const Ids& which) const = 0;
  // Rows of the host and of this device one after the other, as a copy on the device.
  virtual std::shared_ptr<const DeviceRows> joined(const Rows& first, const Rows& second) const = 0;
};

// Hidden states [count, width] float32. Those that a stage gives may be `on_device`; then `data` is empty, and `host` copies
// them. `take`, `append` and `cut` leave them there.
struct Rows {
  size_t width = 0;
  Floats data;
  std::shared_ptr<const DeviceRows> on_device;

  Rows() = default;
  Rows(size_t count, size_t wide) : width(wide), data(count * wide) {}
  Rows(std::shared_ptr<const DeviceRows> rows, size_t wide) : width(wide), on_device(std::move(rows)) {}
  size_t count() const { return on_device ? on_device->count() : width == 0 ? 0 : data.size() / width; }
  const float* row(size_t index) const { return data.data() + index * width; }
  float* row(size_t index) { return data.data() + index * width; }
};

// What the vision graph takes of a view of an image: [pictures, 3, height, width], two pictures for a pair of frames.
struct Pixels {
  int64_t height, width;
  Floats values;
  int64_t pictures = 1;
  bool operator==(const Pixels& o) const {
    return height == o.height && width == o.width && pictures == o.pictures && values == o.values;
  }
};

// Hidden states of tokens, and what stages read of each token in addition, by the manifest's names.
struct TokenStates {
  Rows hidden;
  std::map<std::string, Rows> inputs = {};
  size_t count() const { return hidden.count(); }
};

inline int64_t count_of(const Mask& mask) {
  int64_t total = 0;
  for (uint8_t bit : mask) total += bit;
  return total;
}

inline Ids indices_of(const Mask& mask, bool wanted = true) {
  Ids found;
  for (size_t i = 0; i < mask.size(); ++i)
    if ((mask[i] != 0) == wanted) found.push_back(static_cast<int64_t>(i));
  return found;
}

// Positions first, first + 1, ...
inline Ids count_up(int64_t first, size_t count) {
  Ids out(count);
  for (size_t i = 0; i < count; ++i) out[i] = first + static_cast<int64_t>(i);
  return out;
}

// The rows that `which` names, in its order.
inline Rows take(const Rows& rows, const Ids& which) {
  if (rows.on_device) return {rows.on_device->take(which), rows.width};
  Rows out(which.size(), rows.width);
  for (size_t i = 0; i < which.size(); ++i) {
    const float* from = rows.row(static_cast<size_t>(which[i]));
    std::copy(from, from + rows.width, out.row(i));
  }
  return out;
}

inline void append(Rows& rows, const Rows& more) {
  if (rows.on_device || more.on_device) {
    rows = {(rows.on_device ? rows : more).on_device->joined(rows, more), more.width};
    return;
  }
  rows.width = more.width;
  rows.data.insert(rows.data.end(), more.data.begin(), more.data.end());
}

// Leaves the first `count` of them.
inline void cut(Rows& rows, size_t count) {
  if (rows.on_device)
    rows = take(rows, count_up(0, count));
  else
    rows.data.resize(count * rows.width);
}

// The same rows in the host's memory.
inline Rows host(Rows rows) {
  if (rows.on_device) rows.data = rows.on_device->read(), rows.on_device.reset();
  return rows;
}

inline std::map<std::string, Rows> take(const std::map<std::string, Rows>& all, const Ids& which) {
  std::map<std::string, Rows> out;
  for (const auto& [name, rows] : all) out[name] = take(rows, which);
  return out;
}

template <typename Value>
std::vector<Value> take(const std::vector<Value>& values, const Ids& which) {
  std::vector<Value> out;
  out.reserve(which.size());
  for (int64_t index : which) out.push_back(values[static_cast<size_t>(index)]);
  return out;
}

// The product of sizes that a file gives; where it has more than 62 bits, a number of 62, as no memory or file is so large.
inline int64_t product(std::initializer_list<int64_t> sizes) {
  constexpr int64_t kMost = int64_t{1} << 62;
  int64_t out = 1;
  for (int64_t size : sizes)
    if (__builtin_mul_overflow(out, size, &out) || out > kMost) return kMost;
  return out;
}

// Positions of text: first, first + 1, ...
inline Positions text_positions(int64_t first, size_t count) {
  Positions out;
  out.reserve(count);
  for (int64_t number : count_up(first, count)) out.push_back({number, number, number});
  return out;
}

}  // namespace vtxcore
