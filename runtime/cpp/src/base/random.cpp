#include "base/random.hpp"

#include <cmath>
#include <random>

namespace vtxcore {
namespace {

uint64_t system_bits() {
  std::random_device device;
  uint64_t high = device();
  return high << 32 | device();
}

}  // namespace

Random::Random(std::optional<uint64_t> seed) : state_(seed ? *seed : system_bits()) {}

double Random::uniform() {
  state_ += 0x9e3779b97f4a7c15;
  uint64_t bits = (state_ ^ state_ >> 30) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
  return static_cast<double>((bits ^ bits >> 31) >> 11) * (1.0 / 9007199254740992.0);
}

std::vector<float> Random::normals(size_t count) {
  constexpr double kPi = 3.141592653589793;
  std::vector<float> out;
  while (out.size() < count) {
    double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    double angle = 2.0 * kPi * uniform();
    out.push_back(static_cast<float>(radius * std::cos(angle)));
    if (out.size() < count) out.push_back(static_cast<float>(radius * std::sin(angle)));
  }
  return out;
}

}  // namespace vtxcore
