// Checks of values that callers give: what is wrong, the limit, in one line.
#pragma once

#include <cstdint>
#include <string>

#include "base/errors.hpp"

namespace vtxcore {

// Throws Error(request) unless `value` is from `least` to `most`.
inline void check_whole(const std::string& name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    fail(Kind::request, name, " is ", value, "; it must be at least ", least, " and at most ", most);
}

}  // namespace vtxcore
