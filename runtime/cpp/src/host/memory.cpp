#include "host/memory.hpp"

#include <fstream>
#include <string>

namespace vtxcore {

std::optional<int64_t> available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  int64_t count = 0;
  while (file >> word)
    if (word == "MemAvailable:" && file >> count) return count * 1024;
  return std::nullopt;
}

}  // namespace vtxcore
