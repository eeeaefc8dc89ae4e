// Random tokens: the baseline that a method must beat.
#include <algorithm>

#include "base/errors.hpp"
#include "base/random.hpp"
#include "bundle/sha256.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

class RandomTokens : public EntryReduction {
 public:
  using EntryReduction::EntryReduction;
  std::optional<Ids> select(const ImageTokens& image, const PromptText*) const override {
    auto n = static_cast<int64_t>(image.rows.count());
    int64_t count = number_to_keep(options_.number("keep"), n);
    if (count >= n) return std::nullopt;
    std::string digest = sha256_hex(cat(options_.whole("seed"), " ", image.key));
    Random random(std::stoull(digest.substr(0, 16), nullptr, 16));
    Doubles drawn(image.rows.count());
    for (double& value : drawn) value = random.uniform();
    Ids order = count_up(0, drawn.size());
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return drawn[static_cast<size_t>(a)] < drawn[static_cast<size_t>(b)]; });
    order.resize(static_cast<size_t>(count));
    std::sort(order.begin(), order.end());
    return order;
  }
};

const Registered<RandomTokens> kRandom("random");

}  // namespace

}  // namespace vtxcore
