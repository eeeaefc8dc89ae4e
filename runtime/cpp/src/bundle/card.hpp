// card.json: the configuration that vtx-fit chose for a bundle, as far as answers depend on it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"

namespace vtxcore {

// The K of one kind of answers, none for no withdrawal, and the share of the image tokens that stays from it on.
struct KindDepth {
  std::string kind;
  std::optional<int64_t> k;
  double rest;
};

struct Card {
  std::string device, compute, reduce;
  std::string k;                          // "none", "auto" or a number
  int64_t max_tiles = 0, max_pixels = 0;  // 0: no limit
  std::optional<std::string> rest;        // goes with `k`
  std::vector<KindDepth> kinds;           // for K = "card"; those that were measured
  std::optional<double> accept;           // the probability from which on an answer to choices is accepted
};

// None where the bundle has no card. Throws Error(bundle) where it is damaged, was made for another manifest, or is not
// signed although the bundle must be.
std::optional<Card> read_card(const Bundle& bundle);

}  // namespace vtxcore
