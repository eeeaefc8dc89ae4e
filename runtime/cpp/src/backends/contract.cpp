#include "backends/contract.hpp"

#include <algorithm>

#include "backends/loading.hpp"
#include "base/errors.hpp"

namespace vtxcore {
namespace {

std::string sizes(const TensorSpec& spec) {
  std::string out;
  for (const auto& size : spec.shape)
    out += (out.empty() ? "" : ", ") + std::visit([](const auto& one) { return piece(one); }, size);
  return "[" + out + "]";
}

// Equal in every size that both sides name.
bool fits(const TensorSpec& declared, const Port& port) {
  bool same = port.dtype == declared.dtype && port.shape.size() == declared.shape.size();
  for (size_t i = 0; same && i < port.shape.size(); ++i) {
    const int64_t* size = std::get_if<int64_t>(&declared.shape[i]);
    same = size == nullptr || port.shape[i] < 0 || port.shape[i] == *size;
  }
  return same;
}

[[noreturn]] void mismatch(const std::string& graph, const std::string& name, const std::string& dtype, const Ids& shape,
                           const std::string& wanted_dtype, const std::string& wanted) {
  fail(Kind::bundle, graph, ": ", name, " is ", dtype, " ", shape, ", vtx.json says ", wanted_dtype, " ", wanted,
       "; export the bundle again");
}

void check_side(const std::string& graph, const std::vector<Port>& ports, const std::vector<TensorSpec>& declared) {
  bool counted = ports.size() == declared.size();
  for (const Port& port : ports) {
    auto spec = std::find_if(declared.begin(), declared.end(), [&](const TensorSpec& s) { return s.name == port.name; });
    if (!counted || spec == declared.end())
      fail(Kind::bundle, graph, " is not the graph that vtx.json says it is; export the bundle again");
    if (!fits(*spec, port)) mismatch(graph, port.name, port.dtype, port.shape, spec->dtype, sizes(*spec));
  }
  if (!counted) fail(Kind::bundle, graph, " is not the graph that vtx.json says it is; export the bundle again");
}

}  // namespace

void check_ports(const std::string& graph, const std::vector<Port>& inputs, const std::vector<Port>& outputs,
                 const GraphIO& contract) {
  check_side(graph, inputs, contract.inputs);
  check_side(graph, outputs, contract.outputs);
}

void check_rows(const std::string& graph, size_t rows, size_t count) {
  if (rows != count) fail(Kind::bundle, graph, " gives ", rows, " outputs for ", count, " tokens; export the bundle again");
}

void check_width(const std::string& graph, const Ids& shape, int64_t width) {
  if (shape.empty() || shape.back() != width)
    mismatch(graph, "an output", "float32", shape, "float32", cat("[tokens, ", width, "]"));
}

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
    fail(Kind::device, "not enough memory to load ", graph, " (", memory_in_words(),
         "); vtx-inspect shows the bundle's size; end other programs, raise the limit, or export with a smaller "
         "--precision, e.g. int4");
  fail(Kind::bundle, engine, " cannot load ", graph, ": ", one_line(reason), "; export the bundle again");
}

void run_failure(const std::string& engine, const std::string& graph, const std::string& reason) {
  if (lacks_memory(reason))
    fail(Kind::device, "not enough memory to run ", graph, " (", memory_in_words(),
         "); end other programs, ask about fewer images or with a shorter question, or export with a smaller --precision");
  fail(Kind::device, engine, " failed in ", graph, ": ", one_line(reason), "; check the bundle with vtx-doctor");
}

void cache_failure(size_t capacity) {
  fail(Kind::device, "not enough memory for a KV cache of ", capacity, " slots (", memory_in_words(),
       "); end other programs, or export with a smaller --max-context");
}

}  // namespace vtxcore
