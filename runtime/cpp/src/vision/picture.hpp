// A picture as RGB bytes, and what becomes of it on its way to the vision graph.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/tensors.hpp"
#include "bundle/manifest.hpp"

namespace vtxcore {

// RGB, 8 bits, rows without gaps.
struct Picture {
  int width = 0, height = 0;
  std::vector<uint8_t> data;

  Picture() = default;
  Picture(int wide, int high) : width(wide), height(high), data(3 * static_cast<size_t>(wide) * static_cast<size_t>(high)) {}
  const uint8_t* pixel(int x, int y) const {
    return data.data() + 3 * (static_cast<size_t>(y) * static_cast<size_t>(width) + static_cast<size_t>(x));
  }
  uint8_t* pixel(int x, int y) {
    return data.data() + 3 * (static_cast<size_t>(y) * static_cast<size_t>(width) + static_cast<size_t>(x));
  }
};

// Throws Error(image) for a picture without pixels, or with too many; before any work.
void check_size(const std::string& name, int64_t width, int64_t height);

// Layouts of camera frames and buffers.
enum class PixelFormat { rgb8, bgr8, rgba8, bgra8, gray8, nv12, yuyv };

// A picture of the bytes at `data`, rows `stride` bytes apart. NV12: a plane of Y, then at `second` one of U and V in
// pairs, rows equally far apart. YUYV: two pixels in four bytes. Both: BT.601, limited range. Alpha is shown over white.
// Throws Error(image).
Picture from_buffer(const uint8_t* data, const uint8_t* second, int width, int height, size_t stride, PixelFormat format);

// A PNG or JPEG file, upright by its EXIF tag, transparency over white. Limits are checked before anything is decoded.
// Throws Error(image).
Picture read_picture(const std::string& path);
Picture decode_picture(const std::string& content, const std::string& name);

// The settings that treat pictures of another shape by `fit`: "crop", "pad", "squash", or "" for as in training.
// Throws Error(request).
ImageSettings fitted(const ImageSettings& settings, const std::string& fit);

// The settings by which LLaVA-OneVision squares one of several pictures: bars of int(255 * mean). Throws Error(request)
// where that is not a colour, or the processor does not normalise.
ImageSettings among_several(const ImageSettings& settings);

// The part of this size at x, y, which lies inside of the picture.
Picture cut(const Picture& picture, int x, int y, int width, int height);

// As Pillow's Image.resize with this filter.
Picture resized(const Picture& picture, int width, int height, const std::string& filter);

// The vision graph's input of a picture that already has its size.
Pixels normalised(const Picture& picture, const ImageSettings& settings);

// A part of a picture, in its pixels.
struct Region {
  double left, top, right, bottom;
};

// The part of a picture that the vision graph's input shows; with bars it is larger than the picture.
Region shown_region(const Picture& picture, const ImageSettings& settings);

// The vision graph's input. Throws Error(image) if the padded or resized picture would not fit the limits.
Pixels preprocess(const Picture& picture, const ImageSettings& settings);

}  // namespace vtxcore
