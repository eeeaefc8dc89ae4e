#include "session/encoded_images.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/json.hpp"

namespace vtxcore {
namespace {

constexpr size_t kMaxSets = 4;  // of extra inputs, of which the image tokens are kept; beyond these the oldest go

ImagePtr enter(ImagePtr tokens, const Policy& policy, const PromptText* question) {
  for (const auto& entry : policy.entries())
    if (std::optional<Ids> selected = entry->select(*tokens, question))
      tokens = tokens->take(*selected, entry->keeps_positions());
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
                     *made = enter(encode(image, extras), policy, question.get());
                     std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
                     if (vision_ms) *vision_ms += took.count();
                     return *made;
                   }});
  }
  return out;
}

ImagePtr EncodedImages::encode(const PreparedImage& image, const Extras& extras) {
  std::string key = image.key;
  for (const auto& [name, value] : extras) key += cat(" ", name, "=", python_repr(double{value}));
  for (const auto& [known, tokens] : encoded_)
    if (known == key) return tokens;
  std::vector<ImagePtr> views;
  for (const Floats& view : image.views) views.push_back(backend_.vision(view, extras));
  ImagePtr tokens = image.arrange(views);
  tokens->key = image.key.substr(0, 64);  // of the pixels alone
  for (const auto& [name, signal] : tokens->patches.signals)
    if (!std::all_of(signal.begin(), signal.end(), [](float value) { return std::isfinite(value); }))
      fail(Kind::bundle, "what the tower says of an image is not a number; use --reduce none, or export at fp32");
  const Floats& clip = tokens->patches.clip.data;
  if (!std::all_of(clip.begin(), clip.end(), [](float value) { return std::isfinite(value); }))
    fail(Kind::bundle, "what the tower says of an image is not a number; use --reduce none, or export at fp32");
  if (encoded_.size() >= kMaxSets * std::max<size_t>(1, images_.size())) encoded_.erase(encoded_.begin());
  encoded_.emplace_back(key, tokens);
  return tokens;
}

}  // namespace vtxcore
