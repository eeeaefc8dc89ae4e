// card.json: the configuration that vtx-fit chose for a bundle, as far as answers depend on it.
#pragma once

#include <optional>
#include <string>

#include "bundle/bundle.hpp"

namespace vtxcore {

struct Card {
  std::string device, compute, reduce;
  std::string k;                          // "none", "auto" or a number
  int64_t max_tiles = 0, max_pixels = 0;  // 0: no limit
  std::optional<std::string> rest;        // goes with `k`
};

// None where the bundle has no card. Throws Error(bundle) where it is damaged, was made for another manifest, or is not
// signed although the bundle must be.
std::optional<Card> read_card(const Bundle& bundle);

}  // namespace vtxcore
