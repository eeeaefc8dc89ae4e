// Checks of values that callers give: what is wrong, the limit, in one line.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "base/errors.hpp"
#include "base/json.hpp"

namespace vtxcore {

// Throws Error(request) unless `value` is from `least` to `most`.
inline void check_whole(const std::string& name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    fail(Kind::request, name, " is ", value, "; it must be at least ", least, " and at most ", most);
}

// Throws Error(request), saying what is `allowed`, unless `value` is a finite number from `least` to `most`.
inline void check_number(const std::string& name, double value, const std::string& allowed, double least,
                         double most = std::numeric_limits<double>::max()) {
  if (!(value >= least && value <= most)) fail(Kind::request, name, " is ", python_repr(value), "; it must be ", allowed);
}

}  // namespace vtxcore
