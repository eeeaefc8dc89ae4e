// K by the kind of answer: what the form of a request says its answer will be, and the card's K and rest for that.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bundle/card.hpp"
#include "policies/policy.hpp"
#include "prompt/guiding.hpp"

namespace vtxcore {

// The kinds of answer that a request's form asks for; whatever is not closed is quoted text. Throws Error(request).
std::set<std::string> kinds_of(const std::optional<Guide>& guide);

// The largest K, or "none", and the largest rest of the kinds that a request's form asks for; of all kinds if it may be
// quoted text. In full if one was not measured or needs it, or if no rest can be chosen at that K.
std::pair<std::string, std::optional<Rest>> card_depth(const std::vector<KindDepth>& depths,
                                                       const std::optional<Guide>& guide, const ModelSpec& model);

}  // namespace vtxcore
