// The methods that remove a whole image: never, before a fixed layer (VTW), or where a gate says so (DyVTE).
#pragma once

#include "policies/policy.hpp"

namespace vtxcore {

MethodPtr full();
MethodPtr withdraw(int64_t k);
// At each boundary with a gate the image leaves when its probability is above `threshold`; what each gate said is kept
// in `decisions`.
MethodPtr gate(Odds odds, Ids ks, double threshold, std::shared_ptr<std::vector<Decision>> decisions);

}  // namespace vtxcore
