// The images of a conversation, encoded once for each set of extra inputs, and which of their tokens enter.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "session/prefix.hpp"
#include "session/session.hpp"
#include "vision/picture.hpp"

namespace vtxcore {

// Of a video, the number of its sampled frames, and what stands for it in a prompt with another number of them, or at most
// so many pixels each; 0: as they are. `counted`: tokens are counted between texts, so that some may leave before the
// decoder.
struct VideoForm {
  int64_t frames;
  bool counted;
  std::function<MarkedImage(int64_t frames, int64_t max_pixels)> refitted;
};

// One preprocessed image: its views, a hash of them, and how many tokens they give. `width` and `height` are its own, before
// that. A video is one too, with the size of a frame.
struct PreparedImage {
  std::vector<Pixels> views;
  std::string key;
  int64_t tokens, width, height;
  std::function<ImagePtr(const std::vector<ImagePtr>&)> arrange;  // the image's tokens of those of its views
  MarkedImage placed;                                             // what stands for it in a prompt
  std::shared_ptr<const VideoForm> video = {};                    // null: it is an image
  Region region = {};                                             // of an image, what its first view shows of it
};

// What stands for images in a prompt.
inline std::vector<MarkedImage> placed(const std::vector<PreparedImage>& images) {
  std::vector<MarkedImage> out;
  for (const PreparedImage& image : images) out.push_back(image.placed);
  return out;
}

class EncodedImages {
 public:
  EncodedImages(Backend& backend, const std::vector<PreparedImage>& images) : backend_(backend), images_(images) {}
  // For each image a key that stands for its tokens, and the call that gives them. `question`: what entries that use it
  // select by; null if none does. `vision_ms` grows by the time of the calls.
  std::vector<Encoder> encoders(const Policy& policy, const std::shared_ptr<const PromptText>& question, double* vision_ms);
  // The images are others now than those `before`, which it takes over unless it throws. Those that are among both stay
  // encoded. From then on the tiles of an image are kept, so that those of the next one that are equal in pixels are not run
  // again.
  void replaced(std::vector<PreparedImage>& before);
  // Has what others of the same images have encoded.
  void share(const EncodedImages& other) { encoded_ = other.encoded_; }

 private:
  struct Encoded {
    std::string image, extras;  // keys
    ImagePtr tokens;
    std::vector<ImagePtr> views;  // of an image in tiles, where they are kept
  };
  ImagePtr encode(const PreparedImage& image, const Extras& extras);
  ImagePtr encoded_view(const Pixels& view, bool of_video, const std::string& extras) const;
  Backend& backend_;
  const std::vector<PreparedImage>& images_;
  std::vector<Encoded> encoded_;         // the oldest first
  std::vector<PreparedImage> gone_;      // images before these
  std::vector<Encoded> encoded_before_;  // of these
  bool keeps_views_ = false;
};

// The text by which a policy's entries select image tokens, in a chat that of the first turn, `after`; null if none of
// them looks at it. `ids` are the prompt's. `embeddings` gives the question's by the bundle's text tower; it is called where
// the policy needs that.
std::shared_ptr<const PromptText> selecting_text(Backend& backend, const Ids& ids, int64_t image_id, const Policy& policy,
                                                 const Selection* after, const std::function<Rows()>& embeddings);

// The prompt of `ids`, which hold all tokens of every image, as `forms` say, or of those ids that the policy's entries
// leave: `expand` gives the ids for other forms. `check` is called before every image and may throw, to stop there.
Prompt make_prompt(Ids ids, int64_t image_id, std::vector<Encoder> encoders, std::vector<MarkedImage> forms,
                   const Policy& policy, const std::function<Ids(const std::vector<MarkedImage>&)>& expand,
                   const Check& check);

}  // namespace vtxcore
