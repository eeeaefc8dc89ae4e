#include "api/model.hpp"

#include <chrono>
#include <cmath>

#include "backends/engines.hpp"
#include "backends/tables.hpp"
#include "base/checks.hpp"
#include "bundle/card.hpp"
#include "bundle/releases.hpp"
#include "bundle/sha256.hpp"

namespace vtxcore {
namespace {

// The layout of each of so many images in one prompt.
LayoutPtr layout_of(const LayoutPtr& layout, size_t images) {
  LayoutPtr other = layout->among(images);
  return other ? other : layout;
}

std::optional<PublicKey> key_of(const LoadOptions& options) {
  if (!options.require_signature) return std::nullopt;
  return PublicKey(*options.require_signature);
}

}  // namespace

Model::Model(const std::string& bundle, const LoadOptions& options)
    : start_(std::chrono::steady_clock::now()), bundle_(bundle, key_of(options)), fit_(options.fit) {
  layout_ = read_layout(manifest().layout, manifest().model.tower);
  settings_for(*layout_, manifest().image, fit_);
  int64_t max_tiles = options.max_tiles, max_pixels = options.max_pixels;
  newline_ = layout_->newline() ? read_newline(bundle_) : Rows(0, static_cast<size_t>(manifest().model.hidden));
  if (options.threads != 0) check_whole("threads", options.threads, 1, names::kMostThreads);
  if (manifest().text.seg_token_id) final_norm_ = read_final_norm(bundle_);
  std::string device = options.device;
  BackendOptions how{options.threads, options.library, options.compute, 0};
  default_k_ = manifest().default_k;
  default_reduce_ = manifest().reductions.empty() ? "none" : manifest().reductions.front();
  if (std::optional<Card> card = read_card(bundle_)) {
    auto [name, gpu] = split_device(device);
    BackendOptions fitted{options.threads, options.library, card->compute, gpu};
    bool other = (name != "auto" && name != card->device) || (!how.compute.empty() && how.compute != card->compute);
    std::string reason = other ? "another device or arithmetic was asked for" : obstacle(bundle_, card->device, fitted);
    card_ = reason.empty() ? "used" : "ignored: " + reason;
    if (reason.empty())
      device = name == "auto" ? card->device : device, how = fitted, default_k_ = card->k, default_reduce_ = card->reduce;
    if (reason.empty() && max_tiles == 0 && fit_ != "released") max_tiles = card->max_tiles;
    if (reason.empty() && max_pixels == 0) max_pixels = card->max_pixels;
  }
  if (max_tiles != 0) layout_ = layout_->limited(max_tiles);
  if (max_pixels != 0) {
    check_whole("max_pixels", max_pixels, 1, names::kMostWhole);
    layout_ = layout_->within(max_pixels);
  }
  backend_ = open_backend(bundle_, device, how);
  try {
    text_.emplace(bundle_);
  } catch (const Error& error) {
    no_text_ = error.what();  // ids can still be asked about
  }
  if (manifest().text_tower) text_tower_ = std::make_unique<TextTower>(bundle_, *backend_);
  if (bundle_.key() && manifest().release) note_release(*manifest().release, *bundle_.key());
  std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start_;
  load_ms_ = took.count();
}

const Text& Model::text() const {
  if (!text_) throw Error(Kind::bundle, no_text_);
  return *text_;
}

PreparedImage Model::prepare(const Picture& picture, const std::string& fit, size_t among) const {
  ImageSettings settings = settings_for(*layout_, manifest().image, fit.empty() ? fit_ : fit);
  bool released = (fit.empty() ? fit_ : fit) == "released";
  LayoutPtr layout = released ? layout_->released() : layout_of(layout_, among);
  PreparedImage out{layout->views(picture, settings),
                    "",
                    0,
                    picture.width,
                    picture.height,
                    nullptr,
                    layout->placed(picture.width, picture.height)};
  Sha256 hash;
  for (const Pixels& view : out.views) hash.update(view.values.data(), view.values.size() * sizeof(float));
  out.key = hash.hex();
  // Tiles alone do not tell how much of them is padding, nor an image's sides from their product.
  if (out.views.size() > 1 || settings.own_size())
    out.key += cat(" of ", picture.width, "x", picture.height, released ? " released" : "");
  out.tokens = layout->count(picture.width, picture.height);
  out.arrange = [layout, width = out.width, height = out.height, newline = newline_](const Views& views) {
    return layout->arrange(views, width, height, newline);
  };
  return out;
}

void Model::check_room(const Ids& ids, const std::vector<PreparedImage>& images) const {
  auto count = static_cast<int64_t>(ids.size()), room = manifest().max_context - 1;
  if (count <= room || (layout_->max_views() == 1 && !layout_->min_tokens())) return;
  auto size = [this](const MarkedImage& image) {
    return image.has_text() ? static_cast<int64_t>(text().image_ids(image, 0).size()) : image.spans.front();
  };
  int64_t vision = 0, others = count;
  for (const PreparedImage& image : images) vision += image.tokens, others -= size(image.placed);
  std::string fix;
  std::vector<std::pair<int64_t, int64_t>> sizes;
  for (int64_t tiles = layout_->max_views() - 1; tiles > 0 && fix.empty(); --tiles) {
    LayoutPtr fewer = layout_of(layout_->limited(tiles), images.size());
    int64_t total = others;
    for (const PreparedImage& image : images) total += size(fewer->placed(image.width, image.height));
    if (total <= room) fix = cat("--max-tiles ", tiles, " (max_tiles=", tiles, ") fits");
  }
  for (const PreparedImage& image : images) sizes.emplace_back(image.width, image.height);
  if (std::optional<int64_t> pixels = layout_->fitting(sizes, room - others))
    fix = cat("--max-pixels ", *pixels, " (max_pixels=", *pixels, ") fits");
  fail(Kind::context, "the prompt takes ", count, " tokens, ", vision, " of them for images, and ", room,
       " fit into this bundle beside the answer; ", fix.empty() ? "shorten it" : fix, manifest().or_more_context());
}

Rows Model::embed_question(const std::vector<Message>& messages) const { return text_tower_->embed(asked_text(messages)); }

Floats Model::normed(const Floats& state) const {
  double squares = 0;
  for (float value : state) squares += static_cast<double>(value) * value;
  auto scale = static_cast<float>(std::sqrt(squares / static_cast<double>(state.size()) + manifest().model.eps));
  Floats out(state.size());
  for (size_t i = 0; i < state.size(); ++i) out[i] = state[i] / scale * final_norm_[i];
  return out;
}

GuidedAnswer Model::guided(const Guide& guide) const {
  {
    std::lock_guard<std::mutex> held(lock_);
    if (!grammars_)
      grammars_ = std::make_unique<Grammars>(bundle_.read(manifest().tokenizer, names::kMaxTokenizer),
                                             manifest().model.vocab, manifest().text.end_ids, text().may_begin_with_space());
  }
  return grammars_->start(guide);
}

Policy Model::policy(const Options& options) const {
  const Manifest& m = manifest();
  std::string k = options.k == "default" ? default_k_ : options.k;
  std::string reduce = options.reduce == "default" ? default_reduce_ : options.reduce;
  auto odds = [this](int64_t layer, const Rows& rows) { return backend_->gate(layer, rows); };
  auto norm = [this] { return read_final_norm(bundle_); };
  Policy policy = make_policy(k, reduce, m, backend_->dialect, odds, options.gate_threshold, norm);
  for (const MethodPtr& part : policy.reductions())
    if (layout_->has_marks() && part->entry())
      fail(Kind::request, part->name(), " drops tokens before the decoder, but this model has text between its tiles; ",
           "use fastv, dart after a layer, or mustdrop:...,tau=off,key=0");
  auto entries = policy.entries();
  if (options.about && std::none_of(entries.begin(), entries.end(), [](const auto& e) { return e->uses_question(); }))
    fail(Kind::request,
         "about is the text by which image tokens are chosen before the decoder, and reduce=", to_spec(policy.reductions()),
         " chooses none by a text; use cdpruner, or leave about out");
  return policy;
}

}  // namespace vtxcore
