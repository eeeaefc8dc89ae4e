// The methods that drop some image tokens, by name. Each file mirrors the one of the same name in policies/methods/.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "policies/options.hpp"
#include "policies/policy.hpp"

namespace vtxcore {

struct MethodKind {
  const char* name;
  MethodPtr (*make)(SpecOptions&);
  std::map<std::string, std::string> presets;
};

// Every method that this library knows, in alphabetical order.
const std::vector<MethodKind>& method_kinds();

MethodPtr make_cdpruner(SpecOptions& options);
MethodPtr make_cls(SpecOptions& options);
MethodPtr make_dart(SpecOptions& options);
MethodPtr make_fastv(SpecOptions& options);
MethodPtr make_lsm(SpecOptions& options);
MethodPtr make_mustdrop(SpecOptions& options);

// Merging of windows (MustDrop Eq. 5) from the threshold `tau` on.
std::shared_ptr<const Entry> lsm_entry(double tau, const std::string& order);
void check_tau(const std::string& name, double tau);

// `keep`: a share up to 1, rounded up, or a whole number of at least 2.
void check_keep(const std::string& name, double keep);
int64_t number_to_keep(double keep, int64_t count);

// In which order the pivots at these positions take their tokens in the released code of DART; set_order of
// policies/methods/dart.py states the rule.
Ids set_order(const Ids& numbers);

// As numpy adds float32 along a contiguous axis: pairwise.
float pairwise_sum(const float* values, size_t count);

}  // namespace vtxcore
