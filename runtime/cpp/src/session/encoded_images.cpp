#include "session/encoded_images.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>

#include "base/json.hpp"

namespace vtxcore {
namespace {

constexpr size_t kMaxSets = 4;  // of extra inputs, of which the image tokens are kept; beyond these the oldest go

ImagePtr enter(ImagePtr tokens, const Policy& policy, const PromptText* question, Backend& backend) {
  for (const auto& entry : policy.entries()) {
    if (std::optional<MergedTokens> merged = entry->merge(*tokens)) {
      auto made = std::make_shared<ImageTokens>();
      if (tokens->projected.first != entry->key())
        tokens->projected = {entry->key(), backend.project(merged->states(*tokens->tower))};
      made->rows = tokens->projected.second;
      made->patches = std::move(merged->patches);
      made->key = tokens->key;
      tokens = std::move(made);
    }
    if (entry->of_uncut() && tokens->uncut) {
      auto whole = std::make_shared<ImageTokens>(*tokens->uncut);
      whole->key = tokens->key;
      tokens = std::move(whole);
    }
    if (std::optional<Ids> selected = entry->select(*tokens, question))
      tokens = tokens->take(*selected, entry->keeps_positions());
  }
  return tokens;
}

}  // namespace

std::vector<Encoder> EncodedImages::encoders(const Policy& policy, const std::shared_ptr<const PromptText>& question,
                                             double* vision_ms) {
  std::string settings;
  bool asked = false;
  Extras extras;
  for (const auto& entry : policy.entries()) {
    settings += " " + entry->key();
    asked |= entry->uses_question();
    for (const auto& [name, value] : entry->vision_inputs()) extras[name] = value;
  }
  if (question && asked) settings += " " + question->key();
  std::vector<Encoder> out;
  for (const PreparedImage& image : images_) {
    auto made = std::make_shared<ImagePtr>();
    out.push_back({image.key + settings, [this, &image, policy, question, extras, made, vision_ms] {
                     if (*made) return *made;
                     auto start = std::chrono::steady_clock::now();
                     *made = enter(encode(image, extras), policy, question.get(), backend_);
                     std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
                     if (vision_ms) *vision_ms += took.count();
                     return *made;
                   }});
  }
  return out;
}

ImagePtr EncodedImages::encode(const PreparedImage& image, const Extras& extras) {
  std::string settings;
  for (const auto& [name, value] : extras) settings += cat(" ", name, "=", python_repr(double{value}));
  for (const Encoded& known : encoded_)
    if (known.image == image.key && known.extras == settings) return known.tokens;
  std::vector<ImagePtr> views;
  for (const Pixels& view : image.views) {
    ImagePtr known = image.views.size() > 1 ? encoded_view(view, image.video != nullptr, settings) : nullptr;
    if (!known) known = image.video ? backend_.video(view) : backend_.vision(view, extras);
    views.push_back(std::move(known));
  }
  ImagePtr tokens = image.arrange(views);
  tokens->key = image.key.substr(0, 64);  // of the pixels alone
  std::vector<const Floats*> given;
  for (const auto& [name, signal] : tokens->patches.signals) given.push_back(&signal);
  for (const auto& [name, rows] : tokens->patches.states) given.push_back(&rows.data);
  if (tokens->uncut)
    for (const auto& [name, signal] : tokens->uncut->patches.signals) given.push_back(&signal);
  if (const TowerTokens* tower = tokens->tower.get())
    given.insert(given.end(), {&tower->states.data, &tower->keys.data, &tower->attention});
  for (const Floats* values : given)
    if (!std::all_of(values->begin(), values->end(), [](float value) { return std::isfinite(value); }))
      fail(Kind::bundle, "what the tower says of an image is not a number; use --reduce none, or export at fp32");
  if (encoded_.size() >= kMaxSets * std::max<size_t>(1, images_.size())) encoded_.erase(encoded_.begin());
  if (!keeps_views_ || views.size() == 1) views.clear();
  encoded_.push_back({image.key, settings, tokens, std::move(views)});
  return tokens;
}

// The tokens of a tile or a frame that was among the images before; null if none is equal.
ImagePtr EncodedImages::encoded_view(const Pixels& view, bool of_video, const std::string& extras) const {
  for (const Encoded& known : encoded_before_)
    for (const PreparedImage& image : gone_)
      for (size_t i = 0; i < known.views.size() && image.key == known.image && known.extras == extras; ++i)
        if ((image.video != nullptr) == of_video && image.views[i] == view) return known.views[i];
  return nullptr;
}

void EncodedImages::replaced(std::vector<PreparedImage>& before) {
  auto gone = std::stable_partition(encoded_.begin(), encoded_.end(), [this](const Encoded& known) {
    return std::any_of(images_.begin(), images_.end(), [&](const PreparedImage& image) { return image.key == known.image; });
  });
  if (gone != encoded_.end()) {  // else they were not asked about, and those before them may still serve
    encoded_before_.assign(std::make_move_iterator(gone), std::make_move_iterator(encoded_.end()));
    encoded_.erase(gone, encoded_.end());
    gone_ = std::move(before);
  }
  keeps_views_ = true;
}

std::shared_ptr<const PromptText> selecting_text(Backend& backend, const Ids& ids, int64_t image_id, const Policy& policy,
                                                 const Selection* after, const std::function<Rows()>& embeddings) {
  auto entries = policy.entries();
  bool asked = std::any_of(entries.begin(), entries.end(), [](const auto& entry) { return entry->uses_question(); });
  auto last = std::find(ids.rbegin(), ids.rend(), image_id);
  if (!asked || last == ids.rend()) return nullptr;
  auto out = std::make_shared<PromptText>();
  std::copy_if(ids.begin(), last.base(), std::back_inserter(out->ids), [&](int64_t id) { return id != image_id; });
  auto before = static_cast<std::ptrdiff_t>(out->ids.size());
  if (after && after->policy == policy.key())
    out->ids.insert(out->ids.end(), after->ids.begin(), after->ids.end());
  else
    out->ids.insert(out->ids.end(), last.base(), ids.end());
  out->hidden = backend.embed(out->ids).hidden;
  out->after = Mask(out->ids.size(), 1);
  std::fill(out->after.begin(), out->after.begin() + before, uint8_t{0});
  if (policy.needs().text_tower) out->embeddings = embeddings();
  return out;
}

Prompt make_prompt(Ids ids, int64_t image_id, std::vector<Encoder> encoders, std::vector<MarkedImage> forms,
                   const Policy& policy, const std::function<Ids(const std::vector<MarkedImage>&)>& expand,
                   const Check& check) {
  Prompt out{std::move(ids), {}, std::move(encoders), 0};
  for (const MarkedImage& form : forms) out.skipped += std::max<int64_t>(0, form.span - form.tokens());
  if (!policy.entries().empty() && !out.encoders.empty()) {  // how many tokens an image has, only its pixels say
    out.skipped = 0;
    for (size_t i = 0; i < forms.size(); ++i) {
      check();
      ImagePtr image = out.encoders[i].encode();
      auto count = static_cast<int64_t>(image->rows.count());
      forms[i].spans = image->runs.empty() ? Ids{count} : image->runs;
      out.skipped += image->positions() - count;
    }
    out.skipped = std::max<int64_t>(0, out.skipped);  // rows and columns take fewer positions than tokens
    out.ids = expand(forms);
  }
  for (int64_t id : out.ids) out.is_vision.push_back(id == image_id);
  return out;
}

}  // namespace vtxcore
