#include "backends/backend.hpp"

#include "base/errors.hpp"

namespace vtxcore {

void StageCache::check_room(size_t count) const {
  if (length + static_cast<int64_t>(count) > capacity)
    fail(Kind::context, length, " + ", count, " tokens in a cache of ", capacity, " slots");
}

Rows StageCache::append(const Rows& rows, const Ids& positions, bool query) {
  check_room(rows.count());
  Rows out = run(rows, positions, query);
  length += static_cast<int64_t>(rows.count());
  return out;
}

Rows StageCache::append_for(const Ids& asked, const Rows& rows, const Ids& positions) {
  check_room(rows.count());
  Rows out = run_for(asked, rows, positions);
  length += static_cast<int64_t>(rows.count());
  return out;
}

void StageCache::keep(int64_t filled) {
  if (filled > length) fail(Kind::device, "a cache of ", length, " tokens cannot keep ", filled);
  length = filled;
}

}  // namespace vtxcore
