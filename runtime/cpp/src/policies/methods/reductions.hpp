// What several methods compute. Each file here mirrors the one of the same name in policies/methods/.
#pragma once

#include "policies/options.hpp"

namespace vtxcore {

// `keep`: a share up to 1, rounded up, or a whole number of at least 2.
int64_t number_to_keep(double keep, int64_t count);

// In which order the pivots at these positions take their tokens in the released code of DART; set_order of
// policies/methods/dart.py states the rule.
Ids set_order(const Ids& numbers);

// As numpy adds float32 along a contiguous axis: pairwise.
float pairwise_sum(const float* values, size_t count);

}  // namespace vtxcore
