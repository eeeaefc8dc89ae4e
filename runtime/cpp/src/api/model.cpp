#include "api/model.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <tuple>

#include "api/kinds.hpp"
#include "backends/engines.hpp"
#include "backends/tables.hpp"
#include "base/checks.hpp"
#include "bundle/releases.hpp"
#include "api/boxes.hpp"
#include "bundle/sha256.hpp"

namespace vtxcore {
namespace {

// The layout of each of so many images in one prompt.
LayoutPtr layout_of(const LayoutPtr& layout, size_t images) {
  LayoutPtr other = layout->among(images);
  return other ? other : layout;
}

// Throws Error(request) for reductions that videos cannot have: the graph of frames lacks outputs that they need, or text
// stands between the frames.
void check_videos(const std::vector<MethodPtr>& reductions, const std::vector<PreparedImage>& images) {
  bool videos = false, between = false;
  for (const PreparedImage& image : images)
    if (image.video) videos = true, between |= !image.video->counted && image.placed.has_text();
  for (const MethodPtr& part : reductions) {
    Needs needs = part->needs();
    if (videos && (needs.of_patches() || needs.projector))
      fail(Kind::request, part->name(), " reads the patches of images and does not support video frames; use fastv, ",
           "cdpruner, dart, or mustdrop:...,tau=off,key=0");
    if (between && part->entry())
      fail(Kind::request, part->name(), " drops tokens before the decoder, but this model's videos have text between ",
           "frames; use fastv, dart after a layer, or mustdrop:...,tau=off,key=0");
  }
}

std::optional<PublicKey> key_of(const LoadOptions& options) {
  if (!options.require_signature) return std::nullopt;
  return PublicKey(*options.require_signature);
}

}  // namespace

Model::Model(const std::string& bundle, const LoadOptions& options)
    : start_(std::chrono::steady_clock::now()), bundle_(bundle, key_of(options)), fit_(options.fit) {
  layout_ = read_layout(manifest().layout, manifest().model.tower);
  if (manifest().video) video_layout_ = read_video_layout(manifest().video->layout);
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
      device = name == "auto" ? card->device : device, how = fitted, default_k_ = card->k, default_reduce_ = card->reduce,
      default_rest_ = card->rest, kinds_ = card->kinds, accept_ = card->accept;
    if (reason.empty() && max_tiles == 0 && fit_ != "released") max_tiles = card->max_tiles;
    if (reason.empty() && max_pixels == 0) max_pixels = card->max_pixels;
  }
  if (max_tiles != 0) {
    check_whole("max_tiles", max_tiles, 1, names::kMostWhole);
    layout_ = layout_->limited(max_tiles);
  }
  if (max_pixels != 0) {
    check_whole("max_pixels", max_pixels, 1, names::kMostWhole);
    layout_ = layout_->within(max_pixels);
    VideoLayoutPtr smaller = video_layout_ ? video_layout_->within(max_pixels) : nullptr;
    if (smaller) video_layout_ = smaller;
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

PreparedImage Model::prepare(const Picture& picture, const std::string& fit, size_t among, int64_t image_tokens) const {
  if (image_tokens != 0) check_image_tokens(*layout_, image_tokens);
  ImageSettings settings = settings_for(*layout_, manifest().image, fit.empty() ? fit_ : fit);
  bool released = (fit.empty() ? fit_ : fit) == "released" && !(settings.within && !settings.interpolated);
  LayoutPtr layout = released ? layout_->released() : layout_of(layout_, among);
  if (image_tokens != 0) layout = sized_layout(layout, image_tokens, picture.width, picture.height);
  const ImagePlan plan = layout->plan(picture.width, picture.height);
  PreparedImage out{
      plan.pixels(picture, settings), "", plan.tokens(), picture.width, picture.height, nullptr, plan.in_prompt(), nullptr};
  Sha256 hash;
  for (const Pixels& view : out.views) hash.update(view.values.data(), view.values.size() * sizeof(float));
  out.key = hash.hex();
  // Tiles alone do not tell how much of them is padding, nor an image's sides from their product.
  if (out.views.size() > 1 || settings.own_size())
    out.key += cat(" of ", picture.width, "x", picture.height, released ? " released" : "");
  out.region = {0, 0, static_cast<double>(picture.width), static_cast<double>(picture.height)};
  if (layout->max_views() == 1 && !settings.own_size() && !settings.within) out.region = shown_region(picture, settings);
  out.arrange = [plan, newline = newline_](const Views& views) { return plan.arrange(views, newline); };
  return out;
}

PreparedImage Model::prepare(const Video& video) const {
  const Manifest& m = manifest();
  if (!m.video) fail(Kind::request, m.model.name, " takes no videos; give frames of it as images");
  if (!video_layout_)
    fail(Kind::request, "videos in the layout '", m.video->layout.name.substr(0, 40),
         "' are not built into libvtx; give frames of it as images, or ask Python");
  const bool own = m.video->image.own_size();
  ImageSettings settings = own ? settings_for(*layout_, m.video->image, fit_) : fitted(m.video->image, fit_);
  PreparedFrames frames = prepare_frames(video, *video_layout_, settings);
  VideoLayoutPtr layout = video_layout_;
  PreparedImage out{std::move(frames.views), "", 0, frames.width, frames.height, nullptr, {}, nullptr};
  Sha256 hash;
  for (const Pixels& view : out.views) hash.update(view.values.data(), view.values.size() * sizeof(float));
  out.key = hash.hex() + " of a video";
  Clip clip = std::move(frames.clip);
  if (own) {  // a shape and times are not in the pixels
    out.key += cat(" ", out.width, "x", out.height, " ", clip.count, " ", python_repr(clip.rate));
    for (int64_t number : clip.numbers) out.key += cat(" ", number);
  }
  out.placed = layout->placed(clip, out.width, out.height);
  out.tokens = out.placed.tokens();
  out.arrange = [layout, clip, width = out.width, height = out.height, newline = newline_](const Views& views) {
    return layout->arrange(views, clip, width, height, newline);
  };
  auto count = static_cast<int64_t>(clip.numbers.size());
  auto refitted = [layout, clip, count, width = out.width, height = out.height](int64_t seen, int64_t max_pixels) {
    VideoLayoutPtr smaller = max_pixels ? layout->within(max_pixels) : nullptr;
    Clip other = seen == 0 || seen == count ? clip : layout->sample(clip.count, clip.rate, seen);
    return (smaller ? smaller : layout)->placed(other, width, height);
  };
  out.video = std::make_shared<VideoForm>(VideoForm{count, layout->counted(), refitted});
  return out;
}

std::vector<PreparedImage> Model::ordered(std::vector<PreparedImage> images) const {
  auto videos = std::count_if(images.begin(), images.end(), [](const PreparedImage& image) { return bool(image.video); });
  if (videos == 0 || static_cast<size_t>(videos) == images.size() || !has_text()) return images;
  Message question{"user", {}};
  for (const PreparedImage& image : images) question.parts.push_back({true, "", image.video != nullptr});
  question.parts.push_back({false, "?"});
  return take(images, text().order({question}));
}

// Tokens of an image in a prompt, those of its text too.
int64_t Model::size(const MarkedImage& image) const {
  return image.has_text() ? static_cast<int64_t>(text().image_ids(image, 0).size()) : image.tokens();
}

void Model::check_room(const Ids& ids, const std::vector<PreparedImage>& images) const {
  auto count = static_cast<int64_t>(ids.size()), room = manifest().max_context - 1;
  bool videos = std::any_of(images.begin(), images.end(), [](const PreparedImage& image) { return bool(image.video); });
  if (count <= room || (layout_->max_views() == 1 && !layout_->min_tokens() && !videos)) return;
  int64_t vision = 0, others = count;
  for (const PreparedImage& image : images) vision += image.tokens, others -= size(image.placed);
  std::string fix = fixes(others, images);
  fail(Kind::context, "the prompt takes ", count, " tokens, ", vision, " of them for images, and ", room,
       " fit into this bundle beside the answer; ", fix.empty() ? "shorten it" : fix, manifest().or_more_context());
}

// The options with which images fit beside `text` tokens, in words; empty: none do.
std::string Model::fixes(int64_t text, const std::vector<PreparedImage>& images) const {
  const int64_t room = manifest().max_context - 1;
  std::vector<std::string> found;
  std::vector<const PreparedImage*> videos;
  std::vector<std::pair<int64_t, int64_t>> sizes;  // of images
  for (const PreparedImage& image : images) {
    if (image.video)
      videos.push_back(&image);
    else
      sizes.emplace_back(image.width, image.height);
  }
  for (int64_t tiles = layout_->max_views() - 1; tiles > 0 && found.empty(); --tiles) {
    LayoutPtr fewer = layout_of(layout_->limited(tiles), sizes.size());
    int64_t total = text;
    for (auto [width, height] : sizes) total += size(fewer->placed(width, height));
    for (const PreparedImage* video : videos) total += size(video->placed);
    if (total <= room) found.push_back(cat("--max-tiles ", tiles, " (max_tiles=", tiles, ") fits"));
  }
  for (int64_t tokens : layout_->budgets()) {
    int64_t total = text;
    layout_->choices(tokens, [&](const LayoutPtr& choice) {
      for (auto [width, height] : sizes) total += choice->count(width, height);
      return true;
    });
    if (total > room) continue;
    found.push_back(cat("--image-tokens ", tokens, " (image_tokens=", tokens, ") fits"));
    break;
  }
  std::optional<int64_t> pixels;
  if (videos.empty() && layout_->budgets().empty()) pixels = layout_->fitting(sizes, room - text);
  if (std::optional<int64_t> area = videos.empty() ? std::nullopt : video_layout_->area()) {
    int64_t most = 0, marks = 0;
    for (const PreparedImage* video : videos)
      most = std::max(most, video->tokens), marks += size(video->placed) - video->tokens;
    for (int64_t each = most; each > 0 && !pixels; --each) {
      LayoutPtr smaller = layout_->within(each * *area);
      int64_t total = text + marks;
      for (auto [width, height] : sizes) total += smaller->count(width, height);
      for (const PreparedImage* video : videos) total += video->video->refitted(0, each * *area).tokens();
      if (total <= room) pixels = each * *area;
    }
  }
  if (pixels) found.push_back(cat("--max-pixels ", *pixels, " (max_pixels=", *pixels, ") fits"));
  int64_t most = 1, others = text;
  for (const PreparedImage& image : images)
    if (!image.video) others += size(image.placed);
  for (const PreparedImage* video : videos) most = std::max(most, video->video->frames);
  for (int64_t frames = most - 1; frames > 0; --frames) {
    int64_t total = others;
    for (const PreparedImage* video : videos) total += size(video->video->refitted(frames, 0));
    if (total > room) continue;
    found.push_back(cat("--frames ", frames, " (frames=", frames, ") of each video fits"));
    break;
  }
  std::string out;
  for (const std::string& fix : found) out += (out.empty() ? "" : ", or ") + fix;
  return out;
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

double Model::threshold(const std::string& accept) const {
  static constexpr char kAllowed[] = "; it must be a probability from 0 to 1, or card";
  if (accept == "card") {
    if (accept_) return *accept_;
    fail(Kind::request, "accept is card, and ", card_ == "used" ? "the card has no threshold" : "no card is in use",
         "; run vtx-eval --coverage, or give a probability");
  }
  char* end = nullptr;
  double value = std::strtod(accept.c_str(), &end);
  if (accept.empty() || *end != 0) fail(Kind::request, "accept is '", accept.substr(0, 40), "'", kAllowed);
  if (!(value >= 0 && value <= 1)) fail(Kind::request, "accept is ", accept.substr(0, 40), kAllowed);
  return value;
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

Policy Model::policy(const Options& options, const std::vector<PreparedImage>& images) const {
  const Manifest& m = manifest();
  std::string k = options.k == "default" ? default_k_ : options.k;
  std::optional<std::string> named = options.k == "default" && !options.rest ? default_rest_ : options.rest;
  std::optional<Rest> rest;
  if (named) rest = read_rest(*named);
  if (k == "card" && !rest) {
    if (kinds_.empty())
      fail(Kind::request, "K is card, and ", card_ == "used" ? "the card has no K by kind of answer" : "no card is in use",
           "; run vtx-fit, or give K as a number, or none");
    std::tie(k, rest) = card_depth(kinds_, options.guide, m.model);
  }
  std::string reduce = options.reduce == "default" ? default_reduce_ : options.reduce;
  auto odds = [this](int64_t layer, const Rows& rows) { return backend_->gate(layer, rows); };
  auto norm = [this] { return read_final_norm(bundle_); };
  Policy policy = make_policy(k, rest, reduce, m, backend_->dialect, odds, options.gate_threshold, norm);
  for (const MethodPtr& part : policy.reductions())
    if (layout_->has_marks() && part->entry())
      fail(Kind::request, part->name(), " drops tokens before the decoder, but this model has text between its tiles; ",
           "use fastv, dart after a layer, or mustdrop:...,tau=off,key=0");
  check_videos(policy.reductions(), images);
  if (options.boxes) check_boxes(m, images);
  auto entries = policy.entries();
  if (options.about && std::none_of(entries.begin(), entries.end(), [](const auto& e) { return e->uses_question(); }))
    fail(Kind::request,
         "about is the text by which image tokens are chosen before the decoder, and reduce=", to_spec(policy.reductions()),
         " chooses none by a text; use cdpruner, or leave about out");
  return policy;
}

}  // namespace vtxcore
