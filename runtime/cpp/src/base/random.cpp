#include "base/random.hpp"

#include <array>
#include <cmath>
#include <random>
#include <utility>
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

uint64_t Random::bits() {
  step();
  auto high = static_cast<uint64_t>(state_ >> 64), low = static_cast<uint64_t>(state_);
  uint64_t mixed = high ^ low;
  auto turn = static_cast<unsigned>(high >> 58);
  return mixed >> turn | mixed << (-turn & 63u);
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * (1.0 / 9007199254740992.0); }

namespace {

// Marsaglia and Tsang's ziggurat of 256 layers in float32, with 23 bits of a layer's width.
struct Ziggurat {
  static constexpr double kEdge = 3.6541528853610087963519472518;  // of the lowest layer
  static constexpr double kArea = 0.00492867323399;                // of each layer
  std::array<uint32_t, 256> inside{};                              // below it a draw lies under the curve for certain
  std::array<float, 256> width{}, height{};

  Ziggurat() {
    constexpr double kUnits = 8388608.0;
    double x = kEdge, last = kEdge, base = kArea / std::exp(-0.5 * x * x);
    inside[0] = static_cast<uint32_t>(x / base * kUnits);
    width[0] = static_cast<float>(base / kUnits), width[255] = static_cast<float>(x / kUnits);
    height[0] = 1.0f, height[255] = static_cast<float>(std::exp(-0.5 * x * x));
    for (size_t i = 254; i > 0; --i) {
      x = std::sqrt(-2.0 * std::log(kArea / x + std::exp(-0.5 * x * x)));
      inside[i + 1] = static_cast<uint32_t>(x / last * kUnits);
      last = x;
      width[i] = static_cast<float>(x / kUnits), height[i] = static_cast<float>(std::exp(-0.5 * x * x));
    }
  }
};

}  // namespace

std::vector<float> Random::normals(size_t count) {
  static const Ziggurat kZiggurat;
  constexpr auto kEdge = static_cast<float>(Ziggurat::kEdge);
  std::optional<uint32_t> kept;  // the upper half of the last 64 bits
  auto word = [&] {
    if (kept) return std::exchange(kept, std::nullopt).value();
    uint64_t both = bits();
    kept = static_cast<uint32_t>(both >> 32);
    return static_cast<uint32_t>(both);
  };
  auto uniform_float = [&] { return static_cast<float>(word() >> 8) * (1.0f / 16777216.0f); };
  std::vector<float> out;
  while (out.size() < count) {
    uint32_t drawn = word();
    size_t layer = drawn & 255;
    uint32_t magnitude = drawn >> 9 & 0x7fffff;
    float x = static_cast<float>(magnitude) * kZiggurat.width[layer];
    if (drawn >> 8 & 1) x = -x;
    if (magnitude < kZiggurat.inside[layer]) {
      out.push_back(x);
    } else if (layer == 0) {  // the tail
      float beyond, y;
      do {
        beyond = -(1.0f / kEdge) * std::log1p(-uniform_float());
        y = -std::log1p(-uniform_float());
      } while (y + y <= beyond * beyond);
      out.push_back(magnitude >> 8 & 1 ? -(kEdge + beyond) : kEdge + beyond);
    } else {
      float high = kZiggurat.height[layer - 1], low = kZiggurat.height[layer];
      if (static_cast<double>((high - low) * uniform_float() + low) < std::exp(-0.5 * x * x)) out.push_back(x);
    }
  }
  return out;
}

}  // namespace vtxcore
