// Boxes that an answer names, in the pixels of the picture as it was given, and not as the model sees it.
#pragma once

#include <string>
#include <vector>

#include "bundle/manifest.hpp"
#include "session/encoded_images.hpp"

namespace vtxcore {

// In pixels from the picture's left top corner on, and the words that the answer has for it.
struct Box {
  std::string label;
  double left, top, right, bottom;
};

// Throws Error(request) if the model has no stated form of boxes, or the images are not one picture.
void check_boxes(const Manifest& manifest, const std::vector<PreparedImage>& images);

// The boxes in the text of an answer about an image; what is not in the model's form is none.
std::vector<Box> read_boxes(const std::string& text, const BoxForm& form, const PreparedImage& image);

}  // namespace vtxcore
