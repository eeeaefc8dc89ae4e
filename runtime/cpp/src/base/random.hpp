// numpy.random.default_rng(seed): PCG64 seeded through a SeedSequence, so that a seed gives the tokens it gives in Python.
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
  // What standard_normal(count, float32) gives.
  std::vector<float> normals(size_t count);

 private:
  __extension__ using Wide = unsigned __int128;
  void step();
  uint64_t bits();
  Wide state_ = 0, increment_ = 0;
};

}  // namespace vtxcore
