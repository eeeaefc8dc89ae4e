#include "backends/tensorrt/step.hpp"

namespace vtxcore {

BoundStage::BoundStage(TensorrtCacheContext& context, const StageSpec& stage, const std::string& graph,
                       const std::vector<std::string>& in)
    : shared(context), spec(stage), cuda(context.cuda), id(context.made++),
      decode(context.engines.new_context(graph, kDecode)) {
  const ModelSpec& model = context.manifest.model;
  auto place = [&](const char* name) { places.emplace(name, std::make_unique<Pinned<int64_t>>(cuda, 1)); };
  place(names::kPositions);
  if (model.sliding) place(names::kFirstSlot);
  if (model.sees_both_ways()) place(names::kSeenSlots);
  for (const std::string& name : in) slots.emplace(name, std::make_unique<Pinned<int32_t>>(cuda, 1));
}

void BoundStage::forget() {
  for (const auto& [key, recorded] : recordings)
    if (recorded && *recorded) cuda.forget(*recorded);
  recordings.clear();
}

void BoundStage::tell(const std::map<std::string, int64_t>& told) {
  for (const auto& [name, value] : told)
    if (auto found = places.find(name); found != places.end())
      *found->second->data() = value;
    else
      *slots.at(name)->data() = static_cast<int32_t>(value);
}

void BoundStage::copy_told() {
  for (const auto& [name, value] : places) cuda.copy_pinned(shared.engines.address(name), value->data(), value->bytes());
  for (const auto& [name, value] : slots) cuda.copy_pinned(shared.engines.address(name), value->data(), value->bytes());
}

TokenSteps::TokenSteps(TensorrtCacheContext& context, const Graphs& graphs)
    : context_(context), cuda_(context.cuda), ids_(cuda_, 1), best_(cuda_, 1),
      state_(cuda_, static_cast<size_t>(context.manifest.model.hidden)),
      logits_(cuda_, static_cast<size_t>(context.manifest.model.vocab)),
      embed_(context.engines.new_context(graphs.embed, 0)), head_(context.engines.new_context(graphs.head, 0)) {
  const Manifest& m = context.manifest;
  for (const TokenInput& each : m.token_inputs)
    if (!each.of_text) zeros_[names::kTokenInput + each.name] = std::make_unique<Pinned<float>>(cuda_, size_t(each.width));
  auto bind = [&](Context& to, const GraphIO& io, const Shapes& shapes) {
    Addresses addresses;
    for (const std::vector<TensorSpec>& side : {io.inputs, io.outputs})
      for (const TensorSpec& spec : side) addresses[spec.name] = context.engines.address(spec.name);
    to.bind(shapes, addresses);
  };
  bind(*embed_, embed_io(m), {{names::kIds, {1}}});
  bind(*head_, head_io(m, context.dialect), {{names::kHidden, {1, m.model.hidden}}});
}

Step TokenSteps::run(const std::vector<StageCache*>& caches, int64_t token, const Ids& positions, bool logits) {
  std::vector<DecodingCache*> decoding;
  std::vector<BoundStage*> stages;
  size_t keeping = 0;  // the first stages, whose K and V the others read
  for (StageCache* cache : caches) {
    decoding.push_back(&dynamic_cast<DecodingCache&>(*cache));
    stages.push_back(&decoding.back()->for_one_more());
    if (!cache->reads_only()) ++keeping;
  }
  *ids_.data() = token;
  for (size_t i = 0; i < caches.size(); ++i) decoding[i]->begin_token(positions[i]);
  for (auto [first, end] : {std::pair(size_t{0}, keeping), {keeping, caches.size()}}) {
    if (first == end) continue;
    auto at = [&](size_t number) { return stages.begin() + static_cast<std::ptrdiff_t>(number); };
    launch({at(first), at(end)}, first == 0, end == caches.size());
    for (size_t i = first; i < end; ++i) decoding[i]->end_token();
  }
  if (logits) cuda_.copy_out(logits_.data(), context_.engines.address(names::kLogits), logits_.bytes());
  cuda_.wait();
  for (StageCache* cache : caches)
    if (!cache->reads_only()) ++cache->length;
  auto copy = [](const Pinned<float>& from) { return Floats(from.data(), from.data() + from.bytes() / sizeof(float)); };
  return {*best_.data(), copy(state_), logits ? copy(logits_) : Floats()};
}

void TokenSteps::launch(const std::vector<BoundStage*>& stages, bool begins, bool ends) {
  BoundStage& last = *stages.back();
  Ids key;
  for (const BoundStage* stage : stages) key.push_back(stage->id);
  auto known = last.recordings.find(key);
  std::optional<void*> recorded;
  if (known == last.recordings.end()) {
    if (last.recordings.size() == kRecordings) last.forget();
  } else if (recorded = known->second; !recorded) {
    recorded = cuda_.record([&] { queue(stages, begins, ends); });
  }
  last.recordings[key] = recorded;
  if (recorded && *recorded)
    cuda_.launch(*recorded);
  else
    queue(stages, begins, ends);
}

void TokenSteps::queue(const std::vector<BoundStage*>& stages, bool begins, bool ends) {
  const LoadedEngines& engines = context_.engines;
  uint8_t *hidden = engines.address(names::kHidden), *hidden_out = engines.address(names::kHiddenOut);
  if (begins) {
    cuda_.copy_pinned(engines.address(names::kIds), ids_.data(), ids_.bytes());
    for (const auto& [name, zeros] : zeros_) cuda_.copy_pinned(engines.address(name), zeros->data(), zeros->bytes());
    embed_->enqueue();
  }
  for (BoundStage* stage : stages) {
    stage->copy_told();
    stage->decode->enqueue();
    stage->turn();
    cuda_.copy_rows(hidden, state_.bytes(), hidden_out, state_.bytes(), state_.bytes(), 1);
  }
  if (!ends) return;
  head_->enqueue();
  cuda_.copy_out(state_.data(), hidden, state_.bytes());
  cuda_.copy_out(best_.data(), engines.address(names::kBest), best_.bytes());
}

}  // namespace vtxcore
