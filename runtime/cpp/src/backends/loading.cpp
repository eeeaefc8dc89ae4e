#include "backends/loading.hpp"

#include <algorithm>
#include <numeric>

#include "base/parallel.hpp"
#include "bundle/names.hpp"
#include "host/memory.hpp"

namespace vtxcore {
namespace {

constexpr double kSpare = 2;  // times what a bundle needs

// Bytes in memory of a byte of weights on disk, at most: floats may be widened to float32, and int4 held in int8, too.
double growth(const std::string& precision, const std::string& compute) {
  if (precision == "fp16" || precision == "bf16") return compute == "bf16" ? 1 : 2;
  if (precision == "int4") return compute == "int8" ? 3 : 1.5;
  return precision == "int8" ? 1.5 : 1;
}

}  // namespace

bool is_roomy(const Manifest& m, const std::string& compute) {
  int64_t bytes = 0;
  for (const auto& [name, file] : m.files) bytes += file.bytes;
  if (bytes <= names::kQuickBytes) return true;
  std::optional<int64_t> free = available_memory();
  return free && static_cast<double>(*free) >= kSpare * growth(m.precision, compute) * static_cast<double>(bytes);
}

void Loads::add(int64_t size, std::function<void()> load) {
  sizes.push_back(size);
  work.push_back(std::move(load));
}

void Loads::run(int threads) {
  std::vector<size_t> order(work.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<std::function<void()>> ordered;
  for (size_t index : order) ordered.push_back(std::move(work[index]));
  run_all(ordered, threads);
}

}  // namespace vtxcore
