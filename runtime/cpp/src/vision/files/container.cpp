#include "vision/files/container.hpp"

#include <algorithm>

#include "bundle/files.hpp"

namespace vtxcore {
namespace {

// A picture turned as EXIF's orientation says.
Picture upright(const Picture& in, int orientation) {
  if (orientation < 2 || orientation > 8) return in;
  bool turned = orientation >= 5;
  Picture out(turned ? in.height : in.width, turned ? in.width : in.height);
  for (int y = 0; y < in.height; ++y)
    for (int x = 0; x < in.width; ++x) {
      int right = in.width - 1 - x, below = in.height - 1 - y;
      int to_x = x, to_y = y;
      switch (orientation) {
        case 2: to_x = right; break;
        case 3: to_x = right, to_y = below; break;
        case 4: to_y = below; break;
        case 5: to_x = y, to_y = x; break;
        case 6: to_x = below, to_y = x; break;
        case 7: to_x = below, to_y = right; break;
        default: to_x = y, to_y = right; break;
      }
      const uint8_t* from = in.pixel(x, y);
      std::copy(from, from + 3, out.pixel(to_x, to_y));
    }
  return out;
}

// A number of TIFF's byte order at `at`; none beyond the block.
std::optional<uint32_t> number(std::string_view block, size_t at, size_t count, bool little) {
  if (at > block.size() || block.size() - at < count) return std::nullopt;
  uint32_t value = 0;
  for (size_t i = 0; i < count; ++i) {
    auto byte = static_cast<unsigned char>(block[at + (little ? count - 1 - i : i)]);
    value = value << 8 | byte;
  }
  return value;
}

}  // namespace

void damaged(const std::string& name, const std::string& why) {
  fail(Kind::image, name, " is damaged and cannot be decoded (", why, "); save or copy it again");
}

void not_built(const std::string& name, const char* library) {
  fail(Kind::image, name, " needs ", library, ", which this libvtx was built without; install its headers and build again, ",
       "or give the pixels");
}

std::optional<int> exif_orientation(std::string_view block) {
  constexpr std::string_view kStart("Exif\0\0", 6);
  if (block.substr(0, 6) == kStart) block.remove_prefix(6);
  bool little = block.substr(0, 2) == "II";
  if (!little && block.substr(0, 2) != "MM") return std::nullopt;
  std::optional<uint32_t> start = number(block, 4, 4, little);
  std::optional<uint32_t> entries = start ? number(block, *start, 2, little) : std::nullopt;
  for (uint32_t i = 0; entries && i < *entries; ++i) {
    size_t at = size_t{*start} + 2 + 12 * size_t{i};
    auto tag = number(block, at, 2, little), kind = number(block, at + 2, 2, little),
         count = number(block, at + 4, 4, little);
    if (!count) return std::nullopt;
    if (*tag != 0x0112 || *count != 1) continue;
    size_t bytes = *kind == 1 ? 1 : *kind == 3 ? 2 : *kind == 4 ? 4 : 0;
    std::optional<uint32_t> value = bytes ? number(block, at + 8, bytes, little) : std::nullopt;
    if (value) return static_cast<int>(std::min<uint32_t>(*value, 9));
  }
  return std::nullopt;
}

std::optional<int> xmp_orientation(std::string_view packet) {
  constexpr std::string_view kName = "tiff:Orientation";
  for (size_t at = packet.find(kName); at != std::string_view::npos; at = packet.find(kName, at + 1)) {
    std::string_view rest = packet.substr(at + kName.size());
    size_t skip = rest.substr(0, 2) == "=\"" ? 2 : rest.substr(0, 1) == ">" ? 1 : 0;
    if (skip && rest.size() > skip && rest[skip] >= '0' && rest[skip] <= '9') return rest[skip] - '0';
  }
  return std::nullopt;
}

Container read_container(const std::string& content, const std::string& name) {
  std::string_view view(content);
  bool jpeg = view.substr(0, 3) == "\xFF\xD8\xFF", png = view.substr(0, 8) == "\x89PNG\r\n\x1A\n";
  if (!jpeg && !png)
    fail(Kind::image, name, " is not an image that vtx reads; it reads JPEG, PNG: convert it, or give its pixels");
  Container container = jpeg ? read_jpeg(view, name) : read_png(view, name);
  check_size(name, container.width, container.height);
  return container;
}

Picture decode_picture(const std::string& content, const std::string& name) {
  Container container = read_container(content, name);
  Picture picture = container.type == Container::jpeg ? decode_jpeg(container, name) : decode_png(container, name);
  return upright(picture, container.orientation);
}

Picture read_picture(const std::string& path) {
  return decode_picture(read_named(path, names::kMaxFileBytes, Kind::image), path);
}

}  // namespace vtxcore
