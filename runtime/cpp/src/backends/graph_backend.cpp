#include "backends/graph_backend.hpp"

#include <algorithm>

#include "backends/loading.hpp"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace vtxcore {
namespace {

Rows rows_of(const std::string& file, GraphOutput& output, int64_t width) {
  check_width(file, output.shape, width);
  Rows out;
  out.width = static_cast<size_t>(width);
  out.data = std::move(output.floats);
  return out;
}

Rows rows_of_each(const std::string& file, GraphOutput& output, int64_t width, size_t count) {
  Rows out = rows_of(file, output, width);
  check_rows(file, out.count(), count);
  return out;
}

}  // namespace

size_t GraphOutput::count() const {
  size_t out = 1;
  for (int64_t size : shape) out *= static_cast<size_t>(size);
  return out;
}

void GraphOutput::copy(const std::string& dtype, const void* data) {
  if (dtype == "int64")
    whole.assign(static_cast<const int64_t*>(data), static_cast<const int64_t*>(data) + count());
  else
    floats.assign(static_cast<const float*>(data), static_cast<const float*>(data) + count());
}

GraphBackend::GraphBackend(const Bundle& bundle, const std::string& read)
    : bundle_(bundle), m_(bundle.manifest()), graphs_(m_.dialects.at(read)) {
  dialect = read;
}

TokenStates GraphBackend::embed(const Ids& ids) {
  auto count = static_cast<int64_t>(ids.size());
  GraphOutputs found = run(graphs_.embed, {{names::kIds, "int64", {count}, ids.data()}}, ids.size());
  TokenStates out{rows_of_each(graphs_.embed, found.at(names::kHidden), m_.model.hidden, ids.size())};
  for (const TokenInput& each : m_.token_inputs)
    if (each.of_text)
      out.inputs[each.name] = rows_of_each(graphs_.embed, found.at(names::kTokenInput + each.name), each.width, ids.size());
  return out;
}

Rows GraphBackend::run_hidden(const std::string& file, const char* output, const float* hidden, size_t n, size_t count,
                              int64_t width) {
  GraphInput in{names::kHidden, "float32", {static_cast<int64_t>(n), m_.model.hidden}, hidden};
  return rows_of_each(file, run(file, {in}, n).at(output), width, count);
}

Rows GraphBackend::head(const Rows& rows) {
  return run_hidden(graphs_.head, names::kLogits, rows.data.data(), rows.count(), rows.count(), m_.model.vocab);
}

Floats GraphBackend::gate(int64_t k, const Rows& rows) {
  auto number = static_cast<size_t>(std::find(m_.gates.begin(), m_.gates.end(), k) - m_.gates.begin());
  return run_hidden(graphs_.gates.at(number), names::kOdds, rows.data.data(), rows.count(), 1, 2).data;
}

Floats GraphBackend::text_tower(const Ids& ids) {
  const std::string& file = graphs_.text_tower.value();
  auto count = static_cast<int64_t>(ids.size());
  GraphOutputs found = run(file, {{names::kIds, "int64", {count}, ids.data()}}, ids.size());
  return rows_of_each(file, found.at(names::kTextEmbedding), m_.text_tower.value().width, 1).data;
}

Rows GraphBackend::project(const Rows& states) {
  const std::string& file = graphs_.projector.value();
  Ids shape{static_cast<int64_t>(states.count()), static_cast<int64_t>(states.width)};
  GraphOutputs found = run(file, {{names::kTowerStates, "float32", shape, states.data.data()}}, states.count());
  return rows_of_each(file, found.at(names::kHidden), m_.model.hidden, states.count());
}

std::shared_ptr<const ImageTokens> GraphBackend::vision(const Floats& pixels, const Extras& extras) {
  auto [height, width] = m_.image.output();
  std::vector<GraphInput> inputs{{names::kPixels, "float32", {1, 3, height, width}, pixels.data()}};
  float tau = names::kTauDefault;
  if (auto given = extras.find(names::kTau); given != extras.end()) tau = given->second;
  if (graphs_.vision_merges) inputs.push_back({names::kTau, "float32", {1}, &tau});
  GraphOutputs outputs = run(graphs_.vision, inputs, static_cast<size_t>(m_.model.tower.tokens));
  VisionOutputs found;
  for (const TensorSpec& spec : vision_io(m_, dialect).outputs) {
    GraphOutput& output = outputs.at(spec.name);
    if (spec.dtype == "int64")
      found.whole[spec.name] = std::move(output.whole);
    else if (spec.shape.size() == 1)
      found.signals[spec.name] = std::move(output.floats);
    else
      found.states[spec.name] = rows_of(graphs_.vision, output, width_of(spec));
  }
  return image_tokens(std::move(found), m_.model.tower.feature_width);
}

void HostBackend::load_graphs(int threads) {
  Loads loads;
  auto add = [&](int64_t size, const std::string& file, GraphIO io) {
    std::unique_ptr<HostGraph>& graph = loaded_[file];
    loads.add(size, [this, &file, &graph, io = std::move(io)] { graph = load(file, io); });
  };
  add(m_.model.layers, graphs_.head, head_io(m_));  // it may be as large as many layers
  for (size_t i = 0; i < m_.stages.size(); ++i) loads.add(m_.stages[i].layers(), [this, i] { load_stage(i); });
  add(1, graphs_.embed, embed_io(m_));
  for (const std::string& gate : graphs_.gates) add(0, gate, gate_io(m_));
  if (graphs_.score) add(0, *graphs_.score, score_io(m_, dialect));
  loads.run(threads);
#ifdef __GLIBC__
  ::malloc_trim(0);  // what loading freed: weights before they were packed
#endif
}

GraphOutputs HostBackend::run(const std::string& file, const std::vector<GraphInput>& inputs, size_t) {
  HostGraph* graph = nullptr;
  {
    std::lock_guard<std::mutex> held(lock_);
    std::unique_ptr<HostGraph>& found = loaded_[file];
    if (!found)
      found = load(file, file == graphs_.vision      ? vision_io(m_, dialect)
                         : file == graphs_.projector ? projector_io(m_)
                                                     : text_tower_io(m_));
    graph = found.get();
  }
  return graph->run(inputs);
}

}  // namespace vtxcore
