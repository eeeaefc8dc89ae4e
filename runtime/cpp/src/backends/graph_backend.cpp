#include "backends/graph_backend.hpp"

#include <algorithm>
#include <stdexcept>

#include "backends/loading.hpp"
#include "backends/tables.hpp"
#include "base/halves.hpp"

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

std::shared_ptr<const ImageTokens> GraphBackend::vision(const Pixels& view, const Extras& extras) {
  std::vector<GraphInput> inputs{
      {names::kPixels, "float32", {view.pictures, 3, view.height, view.width}, view.values.data()}};
  float tau = names::kTauDefault;
  if (auto given = extras.find(names::kTau); given != extras.end()) tau = given->second;
  if (graphs_.vision_merges) inputs.push_back({names::kTau, "float32", {1}, &tau});
  const TowerSpec& tower = m_.model.tower;
  int64_t unit = tower.patch * tower.square;  // pixels a side of a token, if images keep their own size
  int64_t tokens = m_.image.own_size() ? view.height * view.width / (unit * unit) : tower.tokens;
  GraphOutputs outputs = run(graphs_.vision, inputs, static_cast<size_t>(tokens));
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
  return image_tokens(std::move(found), tower);
}

std::shared_ptr<const ImageTokens> GraphBackend::video(const Pixels& view) {
  if (!m_.video->own_graph) return vision(view, {});
  if (!graphs_.video) fail(Kind::device, names::kNoFrames, "; run the bundle with --device cpu or openvino");
  GraphInput in{names::kPixels, "float32", {1, 3, view.height, view.width}, view.values.data()};
  auto tokens = static_cast<size_t>(m_.video->tokens);
  GraphOutputs outputs = run(*graphs_.video, {in}, tokens);
  VisionOutputs found;
  found.states[names::kFeatures] = rows_of_each(*graphs_.video, outputs.at(names::kFeatures), m_.model.hidden, tokens);
  return image_tokens(std::move(found), m_.model.tower);
}

Rows GraphBackend::views(const std::vector<const Pixels*>& views) {
  int64_t height = views.front()->height, width = views.front()->width;
  auto count = static_cast<int64_t>(views.size());
  Floats all;
  for (const Pixels* view : views) all.insert(all.end(), view->values.begin(), view->values.end());
  size_t tokens = views.size() * static_cast<size_t>(m_.model.tower.tokens);
  GraphOutputs found = run(graphs_.vision, {{names::kPixels, "float32", {count, 3, height, width}, all.data()}}, tokens);
  return rows_of_each(graphs_.vision, found.at(names::kFeatures), m_.model.hidden, tokens);
}

ExpertStep GraphBackend::expert(const std::vector<SavedSlots>& prompt, Floats state, Ids positions) {
  struct Layer {
    int64_t slots;
    Floats keys, values;
  };
  std::call_once(tables_read_, [this] { tables_ = read_tables(bundle_); });
  std::string dtype = m_.kv_type(dialect);
  auto heads = static_cast<size_t>(m_.model.kv_heads), dim = static_cast<size_t>(m_.model.head_dim);
  auto bytes = static_cast<size_t>(m_.kv_bytes(dialect));
  auto layers = std::make_shared<std::vector<Layer>>();
  for (size_t number = 0; number < prompt.size(); ++number) {
    const StageSpec& stage = m_.stages[number];
    const uint8_t* from = prompt[number].data();
    size_t part = prompt[number].size() / bytes / static_cast<size_t>(2 * stage.layers());  // numbers of K, or of V
    for (int64_t layer = stage.first; layer <= stage.last; ++layer) {
      layers->push_back({static_cast<int64_t>(part / heads / dim), Floats(part), Floats(part)});
      for (auto [to, scale] :
           {std::pair(&layers->back().keys, names::kKeyScaleOf), std::pair(&layers->back().values, names::kValueScaleOf)}) {
        if (dtype == "int8") {
          const Floats& scales = tables_.at(cat(scale, layer));
          for (size_t i = 0; i < part; ++i)
            (*to)[i] = static_cast<float>(static_cast<int8_t>(from[i])) * scales[i / (part / heads) * dim + i % dim];
        } else {
          widen(from, dtype, part, to->data());
        }
        from += part * bytes;
      }
    }
  }
  return [this, layers, state = std::move(state), positions = std::move(positions)](const Floats& actions, float time) {
    const ActionSpec& a = *m_.action;
    Ids table{m_.max_context, m_.model.head_dim / 2};
    std::vector<GraphInput> inputs{{names::kActions, "float32", {a.horizon, a.width}, actions.data()},
                                   {names::kTime, "float32", {1, 1}, &time},
                                   {names::kPositions, "int64", {a.rows()}, positions.data()},
                                   {names::kCos, "float32", table, tables_.at(names::kCos).data()},
                                   {names::kSin, "float32", table, tables_.at(names::kSin).data()}};
    if (a.state_in == "expert") inputs.push_back({names::kRobotState, "float32", {1, a.state}, state.data()});
    for (size_t i = 0; i < layers->size(); ++i) {
      const Layer& layer = (*layers)[i];
      Ids shape{m_.model.kv_heads, layer.slots, m_.model.head_dim};
      inputs.push_back({cat(names::kPastKey, i + 1), "float32", shape, layer.keys.data()});
      inputs.push_back({cat(names::kPastValue, i + 1), "float32", shape, layer.values.data()});
    }
    GraphOutputs found = run(graphs_.head, inputs, 0);
    return rows_of_each(graphs_.head, found.at(names::kChange), a.width, static_cast<size_t>(a.horizon)).data;
  };
}

Step Backend::step(const std::vector<StageCache*>&, int64_t, const Ids&, bool) {
  throw std::logic_error("steps() is false");
}

std::unique_ptr<StageCache> Backend::reading(size_t, const Sources&) { throw std::logic_error("every stage keeps K and V"); }

Rows Backend::views(const std::vector<const Pixels*>&) {
  fail(Kind::device, names::kNoActions, "; run the bundle with --device cpu or openvino");
}

ExpertStep Backend::expert(const std::vector<SavedSlots>&, Floats, Ids) {
  fail(Kind::device, names::kNoActions, "; run the bundle with --device cpu or openvino");
}

void HostBackend::load_graphs(int threads) {
  Loads loads;
  auto add = [&](int64_t size, const std::string& file, GraphIO io) {
    std::unique_ptr<HostGraph>& graph = loaded_[file];
    loads.add(size, [this, &file, &graph, io = std::move(io)] { graph = load(file, io); });
  };
  add(m_.model.layers, graphs_.head, head_io(m_, dialect));  // it may be as large as many layers
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
                         : file == graphs_.video     ? video_io(m_)
                                                     : text_tower_io(m_));
    graph = found.get();
  }
  return graph->run(inputs);
}

}  // namespace vtxcore
