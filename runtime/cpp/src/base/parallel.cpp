#include "base/parallel.hpp"

#include <atomic>
#include <exception>
#include <system_error>
#include <thread>

namespace vtxcore {

void run_all(const std::vector<std::function<void()>>& work, int threads) {
  std::atomic<size_t> next{0};
  std::vector<std::exception_ptr> problems(work.size());
  auto take = [&] {
    for (size_t i = next++; i < work.size(); i = next++) {
      try {
        work[i]();
      } catch (...) {
        problems[i] = std::current_exception();
      }
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(work.size());
  try {
    for (size_t i = 1; i < work.size() && static_cast<int>(i) < threads; ++i) helpers.emplace_back(take);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): neither threads nor memory for more; these do all of it
  }
  take();
  for (std::thread& helper : helpers) helper.join();
  for (const std::exception_ptr& problem : problems)
    if (problem) std::rethrow_exception(problem);
}

}  // namespace vtxcore
