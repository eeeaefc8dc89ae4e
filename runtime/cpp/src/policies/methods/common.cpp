#include <algorithm>
#include <cmath>

#include "policies/methods/reductions.hpp"

namespace vtxcore {

const std::vector<MethodKind>& method_kinds() {
  // A preset has a paper's name and number, and does what the code released with it does.
  static const std::string kMustDrop = ",positions=renumber,order=merged-first,keys=last-block";
  auto counts = [](const std::string& more) {
    return std::map<std::string, std::string>{
        {"192", "keep=192" + more}, {"128", "keep=128" + more}, {"64", "keep=64" + more}};
  };
  static const std::vector<MethodKind> kKinds{
      {"cdpruner", make_cdpruner, counts(",text=tower")},
      {"cls", make_cls, {}},
      {"dart", make_dart, counts(",order=code")},
      {"fastv", make_fastv, {}},
      {"lsm", make_lsm, {}},
      {"mustdrop",
       make_mustdrop,
       {{"192", "gamma=0.001,alpha=0.001" + kMustDrop},
        {"128", "gamma=0.0012,alpha=0.001" + kMustDrop},
        {"64", "gamma=0.011,alpha=0.01" + kMustDrop},
        {"vizwiz-64", "gamma=0.005,alpha=0.001" + kMustDrop}}},
  };
  return kKinds;
}

void check_keep(const std::string& name, double keep) {
  if (!(keep > 0 && keep <= 1) && !(keep >= 2 && keep == std::floor(keep)))
    fail(Kind::request, name, ": keep is ", python_repr(keep), "; give the share to keep, above 0 and up to 1, or a whole ",
         "number of at least 2");
}

int64_t number_to_keep(double keep, int64_t count) {
  constexpr double kAll = 1e15;  // more than there are tokens, and still a whole number of 64 bits
  return keep <= 1 ? share(keep, count) : static_cast<int64_t>(std::min(keep, kAll));
}

float pairwise_sum(const float* values, size_t count) {
  if (count < 8) {
    float total = 0;
    for (size_t i = 0; i < count; ++i) total += values[i];
    return total;
  }
  if (count <= 128) {
    float part[8];
    for (size_t j = 0; j < 8; ++j) part[j] = values[j];
    size_t i = 8;
    for (; i + 8 <= count; i += 8)
      for (size_t j = 0; j < 8; ++j) part[j] += values[i + j];
    float total = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    for (; i < count; ++i) total += values[i];
    return total;
  }
  size_t half = count / 2;
  half -= half % 8;
  return pairwise_sum(values, half) + pairwise_sum(values + half, count - half);
}

}  // namespace vtxcore
