// Quantities as a person reads them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

namespace vtxcore {

// Bytes with three figures: 9.41 MB.
inline std::string size_text(int64_t count) {
  static const char* const kUnits[] = {"kB", "MB", "GB", "TB"};
  if (count < 1000) return std::to_string(count) + " B";
  auto power = std::min<size_t>(4, (std::to_string(count).size() - 1) / 3);
  char text[40];
  std::snprintf(text, sizeof text, "%.3g %s", static_cast<double>(count) / std::pow(1000.0, static_cast<double>(power)),
                kUnits[power - 1]);
  return text;
}

}  // namespace vtxcore
