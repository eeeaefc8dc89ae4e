// An NVIDIA GPU of this machine, as its driver describes it; no other library is needed.
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

// The GPU of this number, from 0, in the driver's order; none if there is no driver or no such GPU.
std::optional<Gpu> find_gpu(int number = 0);

}  // namespace vtxcore
