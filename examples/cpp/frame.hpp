// One frame of a camera, as whoever took it hands it over.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <vtx/vtx.hpp>

struct Frame {
  std::string name;            // of its file, where it has one
  std::vector<uint8_t> bytes;  // else its content
  int width = 0, height = 0;
  size_t stride = 0;  // bytes from one row to the next
  vtx_pixel_format format = VTX_FILE;

  bool shows_same(const Frame& other) const {
    return format == other.format && width == other.width && height == other.height && stride == other.stride &&
           bytes == other.bytes;
  }

  vtx::Image image() const {
    if (bytes.empty()) return vtx::Image::file(name);
    if (format == VTX_FILE) return vtx::Image::bytes(bytes.data(), bytes.size());
    const uint8_t* second = bytes.data() + stride * static_cast<size_t>(height);  // of NV12
    return vtx::Image::pixels(bytes.data(), width, height, stride, format, format == VTX_NV12 ? second : nullptr);
  }
};
