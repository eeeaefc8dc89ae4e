// An image file before it is decoded: its format, its size, and which way up it is.
//
// Only what makes the picture reaches a decoder: metadata and junk are left out, and parts are counted, because decoders
// spend time on each.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "vision/picture.hpp"

namespace vtxcore {

struct Container {
  enum Type { jpeg, png } type;
  int width, height;    // as stored
  std::string content;  // a file of the parts that make pixels
  int orientation;      // EXIF's, 1 for upright
};

// Throws Error(image) if the file is of another format, damaged, or beyond a limit. `name` is for messages.
Container read_container(const std::string& content, const std::string& name);
Container read_jpeg(std::string_view content, const std::string& name);
Container read_png(std::string_view content, const std::string& name);

// The orientation in the first directory of an EXIF block, or in an XMP packet; none if there is none.
std::optional<int> exif_orientation(std::string_view block);
std::optional<int> xmp_orientation(std::string_view packet);

// The pixels of a container. Throws Error(image).
Picture decode_jpeg(const Container& container, const std::string& name);
Picture decode_png(const Container& container, const std::string& name);

[[noreturn]] void damaged(const std::string& name, const std::string& why);
[[noreturn]] void not_built(const std::string& name, const char* library);

// A big-endian number of two or four bytes at `at`; 0 beyond the end.
inline uint32_t big(std::string_view bytes, size_t at, size_t count) {
  uint32_t value = 0;
  for (size_t i = 0; i < count; ++i)
    value = value << 8 | (at + i < bytes.size() ? static_cast<unsigned char>(bytes[at + i]) : 0u);
  return value;
}

}  // namespace vtxcore
