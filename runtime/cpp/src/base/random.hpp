// numpy.random.default_rng(seed): PCG64 seeded through a SeedSequence, so that a seed gives the tokens it gives in Python.
#pragma once

#include <cstdint>
#include <optional>

namespace vtxcore {

class Random {
 public:
  // Without a seed the system's own randomness is used.
  explicit Random(std::optional<uint64_t> seed);
  // Uniform in [0, 1), 53 bits.
  double uniform();

 private:
  __extension__ using Wide = unsigned __int128;
  void step();
  Wide state_ = 0, increment_ = 0;
};

}  // namespace vtxcore
