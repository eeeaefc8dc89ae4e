// What each graph of a bundle takes and gives: names, types and sizes, worked out from the manifest.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "base/json.hpp"
#include "bundle/manifest.hpp"

namespace vtxcore {

// One input or output: numpy's name of its type, and its sizes; a size that is a string is free.
struct TensorSpec {
  std::string name, dtype;
  std::vector<std::variant<int64_t, std::string>> shape;
};

struct GraphIO {
  std::vector<TensorSpec> inputs, outputs;
};

// Names of what each layer of a stage has contain "{layer}", or the number where a `stage` is given.
GraphIO embed_io(const Manifest& m);
GraphIO head_io(const Manifest& m, const std::string& dialect);  // of a model that outputs actions one step of its expert
GraphIO gate_io(const Manifest& m);
GraphIO text_tower_io(const Manifest& m);  // where there is one
GraphIO projector_io(const Manifest& m);   // where there is one
GraphIO video_io(const Manifest& m);       // where frames have a graph of their own
int64_t width_of(const TensorSpec& spec);  // its last size, a number
GraphIO vision_io(const Manifest& m, const std::string& dialect);
GraphIO stage_io(const Manifest& m, const std::string& dialect, bool query, const StageSpec* stage = nullptr);
GraphIO score_io(const Manifest& m, const std::string& dialect);

// Throws Error(bundle) unless `declared` is the interface that follows from the manifest.
void check_interface(const Manifest& m, const Json& declared);

}  // namespace vtxcore
