#include "backends/backend.hpp"

#include "base/errors.hpp"

namespace vtxcore {

Rows StageCache::append(const Rows& rows, const Ids& positions, bool query) {
  auto count = static_cast<int64_t>(rows.count());
  if (length + count > capacity)
    fail(Kind::context, length, " + ", count, " tokens do not fit a cache of ", capacity, " slots");
  Rows out = run(rows, positions, query);
  length += count;
  return out;
}

void StageCache::keep(int64_t filled) {
  if (filled > length) fail(Kind::device, "a cache of ", length, " tokens cannot keep ", filled);
  length = filled;
}

}  // namespace vtxcore
