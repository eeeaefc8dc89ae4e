// vtx-cpp-traces BUNDLE TRACES OUT: asks what the conformance traces in TRACES ask, in the same order, and writes what
// this runtime does into OUT in the same form, for vtx-doctor --check-traces to judge.
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <iostream>

#include "api/model.hpp"
#include "bundle/files.hpp"
#include "bundle/safetensors.hpp"
#include "session/encoded_images.hpp"
#include "session/session.hpp"

namespace {

using namespace vtxcore;

constexpr int64_t kMaxBytes = 16 << 20;

// A stage's cache that knows the position of the token in each slot.
class PositionedCache : public StageCache {
 public:
  PositionedCache(std::unique_ptr<StageCache> inner, PositionedCache** used)
      : StageCache(inner->capacity), inner_(std::move(inner)), used_(used), positions_(static_cast<size_t>(capacity)) {}

  Scores attention(bool last_only) override { return inner_->attention(last_only); }
  Rows keys() override { return inner_->keys(); }
  SavedSlots read_kv(const Ids& slots) override {
    Positions positions = take(positions_, slots);
    SavedSlots out = inner_->read(slots);
    const auto* first = reinterpret_cast<const uint8_t*>(positions.data());
    out.insert(out.end(), first, first + positions.size() * sizeof(Position));
    return out;
  }
  void put_kv(const Ids& slots, const SavedSlots& kv, int64_t filled) override {
    Positions positions(slots.size());
    auto behind = kv.end() - static_cast<std::ptrdiff_t>(positions.size() * sizeof(Position));
    std::copy(behind, kv.end(), reinterpret_cast<uint8_t*>(positions.data()));
    for (size_t i = 0; i < slots.size(); ++i) positions_[static_cast<size_t>(slots[i])] = positions[i];
    inner_->write(slots, SavedSlots(kv.begin(), behind), filled);
  }
  bool selects_outputs() const override { return inner_->selects_outputs(); }
  void keep(int64_t filled) override {
    StageCache::keep(filled);
    inner_->keep(filled);
  }
  int64_t nearest(int64_t filled) const override { return inner_->nearest(filled); }
  void mark(int64_t filled) override { inner_->mark(filled); }
  // Its cache, for a step of a token at a position.
  StageCache* for_step(int64_t position) {
    *used_ = this;
    positions_[static_cast<size_t>(length)] = {position, position, position};
    inner_->keep(length++);
    return inner_.get();
  }
  StageCache* inner() { return inner_.get(); }
  Positions positions() const { return {positions_.begin(), positions_.begin() + static_cast<std::ptrdiff_t>(length)}; }

 protected:
  Rows run(const TokenStates& tokens, const Positions& positions, bool query, const Ids* outputs) override {
    *used_ = this;
    std::copy(positions.begin(), positions.end(), positions_.begin() + static_cast<std::ptrdiff_t>(length));
    return inner_->append(tokens, positions, query, outputs);
  }

 private:
  std::unique_ptr<StageCache> inner_;
  PositionedCache** used_;
  Positions positions_;
};

class PositionedBackend : public Backend {
 public:
  PositionedBackend(Backend& inner, size_t stages) : inner_(inner), used(stages) {
    device = inner.device, dialect = inner.dialect, compute = inner.compute, kv_slot_bytes = inner.kv_slot_bytes;
  }
  TokenStates embed(const Ids& ids) override { return inner_.embed(ids); }
  ImagePtr vision(const Pixels& view, const Extras& extras) override { return inner_.vision(view, extras); }
  Rows head(const Rows& rows) override { return inner_.head(rows); }
  bool steps() const override { return inner_.steps(); }
  Step step(const std::vector<StageCache*>& caches, int64_t token, const Ids& positions, bool logits) override {
    std::vector<StageCache*> inner;
    for (size_t i = 0; i < caches.size(); ++i) {
      const bool reads = caches[i]->reads_only();
      inner.push_back(reads ? caches[i] : static_cast<PositionedCache*>(caches[i])->for_step(positions[i]));
    }
    return inner_.step(inner, token, positions, logits);
  }
  Floats gate(int64_t k, const Rows& rows) override { return inner_.gate(k, rows); }
  Floats text_tower(const Ids& ids) override { return inner_.text_tower(ids); }
  Rows project(const Rows& states) override { return inner_.project(states); }
  std::unique_ptr<StageCache> stage(size_t index, int64_t capacity) override {
    return std::make_unique<PositionedCache>(inner_.stage(index, capacity), &used[index]);
  }
  std::unique_ptr<StageCache> reading(size_t index, const Sources& sources) override {
    Sources inner;
    for (const auto& [layer, cache] : sources) inner[layer] = static_cast<PositionedCache*>(cache)->inner();
    return inner_.reading(index, inner);
  }

 private:
  Backend& inner_;

 public:
  std::vector<PositionedCache*> used;  // the cache that each stage ran in last
};

const Json& need(const Json& value, const char* key) {
  const Json* found = value.find(key);
  if (!found) fail(Kind::request, "traces.json has no ", key, "; write the traces again");
  return *found;
}

std::vector<Message> messages_of(const Json& value) {
  std::vector<Message> out;
  for (const Json& item : *value.array()) {
    Message message{*need(item, "role").string(), {}};
    const Json& content = need(item, "content");
    if (content.string()) message.parts.push_back({false, *content.string()});
    for (const Json& part : content.array() ? *content.array() : Json::Array()) {
      bool image = *need(part, "type").string() == "image";
      message.parts.push_back({image, image ? "" : *need(part, "text").string()});
    }
    out.push_back(std::move(message));
  }
  return out;
}

Tensor bits(const Mask& mask) { return tensor_of("U8", {static_cast<int64_t>(mask.size())}, mask); }
Tensor whole(const Ids& ids) { return tensor_of("I64", {static_cast<int64_t>(ids.size())}, ids); }

class Recorder {
 public:
  Recorder(const Model& model, const std::vector<Picture>& pictures, const Json& asked, int64_t steps)
      : model_(model), pictures_(pictures), backend_(model.backend(), model.manifest().stages.size()),
        session_(backend_, model.manifest()), steps_(steps) {
    options_.k = *need(asked, "k").string(), options_.reduce = *need(asked, "reduce").string();
    if (asked.find("rest")) options_.rest = *need(asked, "rest").string();
  }

  // Asks a question; adds its tensors, and gives its entry of the index.
  Json ask(const Json& question, const std::string& start, Tensors& out) {
    Policy policy = model_.policy(options_);
    std::vector<PreparedImage> shown;
    const Json::Array& numbers = *need(question, "images").array();
    for (const Json& number : numbers)
      shown.push_back(model_.prepare(pictures_.at(static_cast<size_t>(*number.integer())), "", numbers.size()));
    bool continues = *need(question, "continues").boolean();
    const Selection* after = continues && selection_ ? &*selection_ : nullptr;
    EncodedImages encoded(model_.backend(), shown);
    Prompt prompt = prompt_of(messages_of(need(question, "messages")), shown, policy, encoded, after);
    PrefillResult result = session_.prefill(prompt, policy, after, [] {});
    selection_ = result.selection;
    record(prompt, result, start, out);
    Json::Array cuts;
    for (const Cut& cut : result.cuts)
      cuts.push_back(Json::Object{{"layer", cut.layer}, {"by", Json::Array(cut.by.begin(), cut.by.end())}});
    Json::Object entry;
    for (const char* key : {"name", "messages", "images", "continues", "replaces"})
      entry.emplace_back(key, need(question, key));
    entry.emplace_back("reused", result.reused_tokens);
    entry.emplace_back("k", result.k ? Json(result.k) : Json());
    entry.emplace_back("cuts", cuts);
    return entry;
  }

 private:
  Prompt prompt_of(const std::vector<Message>& messages, const std::vector<PreparedImage>& shown, const Policy& policy,
                   EncodedImages& encoded, const Selection* after) {
    int64_t image_id = model_.manifest().text.image_token_id;
    auto expand = [&](const std::vector<MarkedImage>& images) { return model_.text().prompt(messages, images); };
    Ids ids = model_.text().prompt(messages, placed(shown));
    auto embeddings = [&] { return model_.embed_question(messages); };
    auto text = selecting_text(model_.backend(), ids, image_id, policy, after, embeddings);
    return make_prompt(ids, image_id, encoded.encoders(policy, text, nullptr), placed(shown), policy, expand, [] {});
  }

  void record(const Prompt& prompt, const PrefillResult& result, const std::string& start, Tensors& out) {
    out[start + "ids"] = whole(prompt.ids);
    out[start + "is_vision"] = bits(prompt.is_vision);
    for (size_t i = 0; i < result.cuts.size(); ++i) out[start + "kept." + std::to_string(i)] = bits(result.cuts[i].kept);
    by_layer([&](const std::string& layer, const Positions& positions) {
      out[start + "positions." + layer] = placed_at(positions);
    });
    Floats logits = result.logits, all = logits;
    Ids tokens;
    for (int64_t step = 0; step <= steps_; ++step) {
      tokens.push_back(std::max_element(logits.begin(), logits.end()) - logits.begin());
      if (step == steps_) break;
      logits = std::move(session_.decode({tokens.back()}).data);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    by_layer([&](const std::string& layer, const Positions& positions) {
      out[start + "decoded." + layer] = placed_at({positions.end() - static_cast<std::ptrdiff_t>(steps_), positions.end()});
    });
    out[start + "tokens"] = whole(tokens);
    out[start + "logits"] = tensor_of("F32", {steps_ + 1, model_.manifest().model.vocab}, all);
  }

  Tensor placed_at(const Positions& positions) const {
    return tensor_of(positions, model_.manifest().model.position_parts());
  }

  // Each layer with the positions of the slots that it reads.
  template <typename Work>
  void by_layer(Work work) const {
    const Manifest& m = model_.manifest();
    for (int64_t layer = 1; layer <= m.model.layers; ++layer) {
      size_t number = 0;
      while (m.stages[number].last < m.model.source(layer)) ++number;
      work(std::to_string(layer), backend_.used[number]->positions());
    }
  }

  const Model& model_;
  const std::vector<Picture>& pictures_;
  PositionedBackend backend_;
  Session session_;
  int64_t steps_;
  Options options_;
  std::optional<Selection> selection_;
};

void write(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  if (!file.flush()) fail(Kind::request, "cannot write ", path);
}

void run(const std::string& bundle, const std::string& from, const std::string& to, const std::string& device) {
  Json index = parse_json(read_named(from + "/traces.json", kMaxBytes, Kind::request), "traces.json", Kind::request);
  LoadOptions options;
  options.device = device;
  if (*need(index, "device").string() == device) options.compute = *need(index, "compute").string();
  options.threads = 1;
  Model model(bundle, options);
  std::vector<Picture> read;
  std::vector<PreparedImage> images;
  Tensors pixels;
  for (const Json& item : *need(index, "images").array()) {
    read.push_back(read_picture(from + "/" + *need(item, "file").string()));
    images.push_back(model.prepare(read.back(), ""));
    std::vector<Pixels> views = images.back().views;
    if (model.manifest().image.own_size()) views.resize(1);  // they may differ in size
    Floats all;
    for (const Pixels& view : views) all.insert(all.end(), view.values.begin(), view.values.end());
    Ids shape{static_cast<int64_t>(views.size()), 3, views.front().height, views.front().width};
    if (views.size() == 1) shape.erase(shape.begin());
    pixels["pixels." + std::to_string(pixels.size())] = tensor_of("F32", shape, all);
  }
  ::mkdir(to.c_str(), 0777);
  write(to + "/images.safetensors", pack(pixels));
  Json::Array cases, pictures;
  for (const Json& item : *need(index, "cases").array()) {
    Recorder recorder(model, read, item, *need(index, "steps").integer());
    Tensors tensors;
    Json::Array questions;
    for (const Json& question : *need(item, "questions").array())
      questions.push_back(recorder.ask(question, std::to_string(questions.size()) + ".", tensors));
    const std::string& file = *need(item, "file").string();
    write(to + "/" + file, pack(tensors));
    Json::Object entry{{"file", file}, {"questions", questions}};
    for (const char* key : {"k", "reduce", "rest"})
      if (item.find(key)) entry.emplace_back(key, need(item, key));
    cases.push_back(entry);
  }
  for (size_t i = 0; i < images.size(); ++i)
    pictures.push_back(Json::Object{{"file", need((*need(index, "images").array())[i], "file")}, {"sha256", images[i].key}});
  write(to + "/traces.json", Json(Json::Object{{"format", 2},
                                               {"runtime", "libvtx"},
                                               {"manifest", model.bundle().digest()},
                                               {"device", model.backend().device},
                                               {"compute", model.backend().compute},
                                               {"steps", need(index, "steps")},
                                               {"layers", model.manifest().model.layers},
                                               {"images", pictures},
                                               {"cases", cases}})
                                 .dump());
}

}  // namespace

int main(int count, char** values) {
  if (count != 4 && count != 5) {
    std::cerr << "Usage: vtx-cpp-traces BUNDLE TRACES OUT [DEVICE]\n";
    return 2;
  }
  try {
    run(values[1], values[2], values[3], count == 5 ? values[4] : "cpu");
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "Error: " << error.what() << "\n";
    return 1;
  }
}
