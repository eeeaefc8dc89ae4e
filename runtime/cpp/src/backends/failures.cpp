#include "backends/failures.hpp"

#include "base/errors.hpp"

namespace vtxcore {
namespace {

constexpr size_t kMaxReason = 300;  // characters of an engine's own message

// Engines report memory by text, each in its own words: bad_alloc, "Failed to allocate", "could not allocate". onnxruntime
// speaks of allocated outputs where their size is wrong, too, which is an INVALID_ARGUMENT to it.
bool lacks_memory(const std::string& text) {
  std::string lower;
  for (char c : text) lower += static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
  auto has = [&](const char* words) { return lower.find(words) != std::string::npos; };
  return (has("alloc") || has("out of memory")) && !has("invalid_argument");
}

// One line; OpenVINO's messages begin with places in its source and end with the reason.
std::string one_line(const std::string& text) {
  std::string out;
  for (char c : text) {
    bool blank = c == '\n' || c == '\r' || c == '\t' || c == ' ';
    if (!blank)
      out += c;
    else if (!out.empty() && out.back() != ' ')
      out += ' ';
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out.size() <= kMaxReason ? out : "..." + out.substr(out.size() - kMaxReason);
}

}  // namespace

void load_failure(const std::string& engine, const std::string& graph, const std::string& reason) {
  if (lacks_memory(reason))
    fail(Kind::device, "not enough memory to load ", graph,
         "; end other programs, use a smaller precision or a machine with more");
  fail(Kind::bundle, engine, " cannot load ", graph, ": ", one_line(reason), "; export the bundle again");
}

void run_failure(const std::string& engine, const std::string& graph, const std::string& reason) {
  if (lacks_memory(reason))
    fail(Kind::device, "not enough memory to run ", graph,
         "; end other programs, ask about fewer images or with a shorter question, or export with a smaller --precision");
  fail(Kind::device, engine, " failed in ", graph, ": ", one_line(reason), "; check the bundle with vtx-doctor");
}

void cache_failure(size_t capacity) {
  fail(Kind::device, "not enough memory for a KV cache of ", capacity,
       " slots; end other programs, or export with a smaller --max-context");
}

}  // namespace vtxcore
