// Pieces of work side by side.
#pragma once

#include <functional>
#include <vector>

namespace vtxcore {

// Runs them all in at most `threads` threads, the caller's among them. Throws what the first of them, in their order,
// threw; the others have ended by then.
void run_all(const std::vector<std::function<void()>>& work, int threads);

}  // namespace vtxcore
