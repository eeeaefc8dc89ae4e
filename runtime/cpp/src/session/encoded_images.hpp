// The images of a conversation, encoded once for each set of extra inputs, and which of their tokens enter.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "session/prefix.hpp"

namespace vtxcore {

// One preprocessed image: [3, height, width] float32, the hash of these pixels, and how many tokens they give.
struct PreparedImage {
  Floats pixels;
  std::string key;
  int64_t tokens;
};

class EncodedImages {
 public:
  EncodedImages(Backend& backend, const std::vector<PreparedImage>& images) : backend_(backend), images_(images) {}
  // For each image a key that stands for its tokens, and the call that gives them. `question`: what entries that use it
  // select by; null where none does. `vision_ms` grows by the time of the calls.
  std::vector<Encoder> encoders(const Policy& policy, const std::shared_ptr<const PromptText>& question,
                                double* vision_ms);

 private:
  ImagePtr encode(const PreparedImage& image, const Extras& extras);
  Backend& backend_;
  const std::vector<PreparedImage>& images_;
  std::vector<std::pair<std::string, ImagePtr>> encoded_;  // the oldest first
};

}  // namespace vtxcore
