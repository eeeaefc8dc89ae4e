// Random numbers from a seed, those of runtime/generator.py: SplitMix64.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace vtxcore {

class Random {
 public:
  // Without a seed the system's own randomness is used.
  explicit Random(std::optional<uint64_t> seed);
  // Uniform in [0, 1), 53 bits.
  double uniform();
  // Numbers of the standard normal distribution, by Box and Muller.
  std::vector<float> normals(size_t count);

 private:
  uint64_t state_;
};

}  // namespace vtxcore
