// A loaded bundle. One model serves any number of conversations and threads.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/answer.hpp"
#include "backends/backend.hpp"
#include "bundle/bundle.hpp"
#include "prompt/text.hpp"
#include "session/encoded_images.hpp"
#include "vision/picture.hpp"

namespace vtxcore {

struct LoadOptions {
  std::string device = "auto";  // as for open_backend
  std::string library;          // a file or a directory; empty: searched for
  int threads = 0;              // 0: all cores
  std::string compute;          // the type of the arithmetic; empty: the engine's default
  std::string fit;              // what becomes of images of another shape: "crop", "pad", "squash", or as in training
};

class Model {
 public:
  Model(const std::string& bundle, const LoadOptions& options);

  const Manifest& manifest() const { return bundle_.manifest(); }
  const Bundle& bundle() const { return bundle_; }
  Backend& backend() const { return *backend_; }
  // Throws Error(bundle) where this library does not know the bundle's tokenizer.
  const Text& text() const;
  bool has_text() const { return text_.has_value(); }
  double load_ms() const { return load_ms_; }

  PreparedImage prepare(const Picture& picture, const std::string& fit) const;
  Policy policy(const Options& options) const;

 private:
  Bundle bundle_;
  std::string fit_;
  std::unique_ptr<Backend> backend_;
  std::optional<Text> text_;
  std::string no_text_;  // why there is none
  double load_ms_ = 0;
};

}  // namespace vtxcore
