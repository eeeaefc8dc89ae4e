// The first NVIDIA GPU of this machine, as its driver describes it; no other library is needed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace vtxcore {

struct Gpu {
  std::string name;
  std::pair<int, int> capability;  // as in (8, 9)
  int64_t memory;                  // bytes
};

// None if there is no driver or no GPU.
std::optional<Gpu> find_gpu();

}  // namespace vtxcore
