#include "base/random.hpp"

#include <array>
#include <random>
#include <vector>

namespace vtxcore {
namespace {

// numpy's SeedSequence: a pool of four words, hashed and mixed (M. O'Neill's seed_seq_fe128).
class SeedSequence {
 public:
  explicit SeedSequence(const std::vector<uint32_t>& entropy) {
    for (size_t i = 0; i < pool_.size(); ++i) pool_[i] = hash(i < entropy.size() ? entropy[i] : 0);
    for (size_t from = 0; from < pool_.size(); ++from)
      for (size_t to = 0; to < pool_.size(); ++to)
        if (from != to) pool_[to] = mix(pool_[to], hash(pool_[from]));
    for (size_t from = pool_.size(); from < entropy.size(); ++from)
      for (uint32_t& word : pool_) word = mix(word, hash(entropy[from]));
  }

  std::array<uint64_t, 4> state() const {
    std::array<uint64_t, 4> out{};
    uint32_t constant = 0x8b51f9dd;
    for (size_t i = 0; i < 8; ++i) {
      uint32_t word = pool_[i % 4] ^ constant;
      constant *= 0x58f38ded;
      word *= constant;
      word ^= word >> 16;
      out[i / 2] |= uint64_t{word} << 32 * (i % 2);
    }
    return out;
  }

 private:
  uint32_t hash(uint32_t value) {
    value ^= constant_;
    constant_ *= 0x931e8875;
    value *= constant_;
    return value ^ value >> 16;
  }

  static uint32_t mix(uint32_t a, uint32_t b) {
    uint32_t value = a * 0xca01f9dd - b * 0x4973f715;
    return value ^ value >> 16;
  }

  std::array<uint32_t, 4> pool_{};
  uint32_t constant_ = 0x43b0d7e5;
};

std::vector<uint32_t> words_of(std::optional<uint64_t> seed) {
  if (!seed) {
    std::random_device device;
    return {device(), device(), device(), device()};
  }
  std::vector<uint32_t> words{static_cast<uint32_t>(*seed)};
  if (*seed >> 32) words.push_back(static_cast<uint32_t>(*seed >> 32));
  return words;
}

}  // namespace

Random::Random(std::optional<uint64_t> seed) {
  std::array<uint64_t, 4> state = SeedSequence(words_of(seed)).state();
  increment_ = (Wide{state[2]} << 64 | state[3]) << 1 | 1;
  step();
  state_ += Wide{state[0]} << 64 | state[1];
  step();
}

void Random::step() {
  constexpr Wide kMultiplier = Wide{2549297995355413924ULL} << 64 | 4865540595714422341ULL;
  state_ = state_ * kMultiplier + increment_;
}

double Random::uniform() {
  step();
  auto high = static_cast<uint64_t>(state_ >> 64), low = static_cast<uint64_t>(state_);
  uint64_t mixed = high ^ low;
  auto turn = static_cast<unsigned>(high >> 58);
  uint64_t bits = mixed >> turn | mixed << (-turn & 63u);
  return static_cast<double>(bits >> 11) * (1.0 / 9007199254740992.0);
}

}  // namespace vtxcore
