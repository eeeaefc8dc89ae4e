// A GPU that watches every call, for machines without one: the state that both halves of the stand-in share.
//
// The device's memory is this process's, by real addresses. A stream is a queue: nothing runs before something waits for
// it. What would be undefined on a GPU ends the process with a line that says what it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace standin {

using Work = std::function<void()>;

[[noreturn]] inline void broken(const std::string& what) {
  std::fprintf(stderr, "stand-in: %s\n", what.c_str());
  std::fflush(stderr);
  std::_Exit(70);
}

inline void require(bool holds, const std::string& what) {
  if (!holds) broken(what);
}

constexpr size_t kAlignment = 256;

struct Memory {
  std::vector<uint8_t> room;  // in which `bytes` aligned bytes lie
  size_t bytes;
  size_t size() const { return bytes; }
};

struct Gpu {
  size_t total = size_t{1} << 32;
  int current = 0;      // the device that the next call is for
  int number = 0;       // and the one that it must be for
  std::string refused;  // a call that fails while work is recorded
  int refused_run = 0;  // the number of the run of an engine that does not start, from 1
  int lost = 0;         // what every call gives, once the device is gone
  std::map<uintptr_t, Memory> device, host;
  std::map<std::string, int> calls;
  std::deque<Work> queue;
  std::vector<Work>* recording = nullptr;
  int engines = 0, contexts = 0, graphs = 0;  // living

  // The one GPU; at the process's end it writes what was called and what is still there to $VTX_STANDIN_REPORT.
  static Gpu& one();

  size_t used() const {
    size_t bytes = 0;
    for (const auto& [address, memory] : device) bytes += memory.size();
    return bytes;
  }

  // These bytes lie in one living allocation of the device.
  void holds(const void* address, size_t bytes, const std::string& what) const {
    auto at = reinterpret_cast<uintptr_t>(address);
    auto next = device.upper_bound(at);
    if (next != device.begin()) {
      auto found = std::prev(next);
      if (at + bytes <= found->first + found->second.size()) return;
    }
    broken(what + ": " + std::to_string(bytes) + " bytes that are not device memory");
  }

  void add(Work work) {
    if (lost != 0) return;
    if (recording)
      recording->push_back(std::move(work));
    else
      queue.push_back(std::move(work));
  }
};

}  // namespace standin
