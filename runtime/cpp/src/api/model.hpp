// A loaded bundle. One model serves any number of conversations and threads.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/answer.hpp"
#include "backends/backend.hpp"
#include "bundle/bundle.hpp"
#include "bundle/card.hpp"
#include "prompt/text.hpp"
#include "prompt/text_tower.hpp"
#include "session/encoded_images.hpp"
#include "vision/layout.hpp"
#include "vision/picture.hpp"
#include "vision/video.hpp"

namespace vtxcore {

struct LoadOptions {
  std::string device = "auto";  // as for open_backend
  std::string library;          // a file or a directory; empty: searched for
  int threads = 0;              // 0: all cores
  std::string compute;          // the type of the arithmetic; empty: the engine's default
  std::string fit;              // what becomes of images of another shape: "crop", "pad", "squash", or as in training
  int max_tiles = 0;            // most views of an image; 0: as many as the layout has
  int64_t max_pixels = 0;       // most pixels of an image at native resolution; 0: as many as the layout has
  std::optional<std::string> require_signature;  // the file of the public key that must have signed the bundle
};

class Model {
 public:
  Model(const std::string& bundle, const LoadOptions& options);

  const Manifest& manifest() const { return bundle_.manifest(); }
  const std::string& fit() const { return fit_; }  // of pictures, as it was loaded with; "" for as in training
  const Bundle& bundle() const { return bundle_; }
  Backend& backend() const { return *backend_; }
  // Throws Error(bundle) if this library does not know the bundle's tokenizer.
  const Text& text() const;
  bool has_text() const { return text_.has_value(); }
  double load_ms() const { return load_ms_; }
  // Of questions that name none: those of the bundle's card where it holds here, else those of its manifest.
  const std::string& default_k() const { return default_k_; }
  const std::string& default_reduce() const { return default_reduce_; }
  // "used", or why the bundle's card does not hold here; empty without one.
  const std::string& card() const { return card_; }

  // Throws Error(context) if a prompt of images does not fit, with the number of tiles, pixels or frames that would.
  void check_room(const Ids& ids, const std::vector<PreparedImage>& images) const;
  // CLIP's embeddings [segments, width] of what was asked about the last image. Only where there is a text tower.
  Rows embed_question(const std::vector<Message>& messages) const;

  // A hidden state [hidden] of the last layer behind the decoder's last norm. Only where there is a segmentation token.
  Floats normed(const Floats& state) const;

  // A picture that is one of `among` pictures in a prompt, of at most `image_tokens` tokens; 0: as the bundle says.
  PreparedImage prepare(const Picture& picture, const std::string& fit, size_t among = 1, int64_t image_tokens = 0) const;
  // The frames of a video that the model sees. Throws Error(request) if the model, or libvtx, takes no videos.
  PreparedImage prepare(const Video& video) const;
  // In the order in which the chat template prints images and videos.
  std::vector<PreparedImage> ordered(std::vector<PreparedImage> images) const;
  // The policy for a question about these images.
  Policy policy(const Options& options, const std::vector<PreparedImage>& images = {}) const;
  // A new answer in a form. Throws Error(device), Error(request).
  GuidedAnswer guided(const Guide& guide) const;
  // The probability from which on an answer is accepted: `accept` as a number, or "card" for that of the card in use.
  // Throws Error(request).
  double threshold(const std::string& accept) const;

 private:
  std::string fixes(int64_t text, const std::vector<PreparedImage>& images) const;
  int64_t size(const MarkedImage& image) const;

  std::chrono::steady_clock::time_point start_;
  Bundle bundle_;
  std::string default_k_, default_reduce_, card_;
  std::optional<std::string> default_rest_;  // goes with `default_k_`
  std::vector<KindDepth> kinds_;             // of the card in use
  std::optional<double> accept_;             // of the card in use
  std::string fit_;
  LayoutPtr layout_;
  VideoLayoutPtr video_layout_;  // null: the model, or libvtx, takes no videos
  Rows newline_;
  Floats final_norm_;  // its weight; empty without a segmentation token
  std::unique_ptr<Backend> backend_;
  std::optional<Text> text_;
  std::string no_text_;  // why there is none
  std::unique_ptr<TextTower> text_tower_;
  mutable std::mutex lock_;  // of the grammars, which are made when they are first used
  mutable std::unique_ptr<Grammars> grammars_;
  double load_ms_ = 0;
};

}  // namespace vtxcore
