// PNG: its structure, read without decoding, and its pixels by libpng.
#include <algorithm>
#include <cstring>
#include <new>

#include "vision/files/container.hpp"

#ifdef VTX_HAS_PNG
#include <csetjmp>
#include <png.h>
#include <zlib.h>
#endif

namespace vtxcore {
namespace {

struct Text {
  std::string_view keyword;
  std::string content;
};

// The first bytes of a compressed text; empty if it is damaged.
std::string inflated([[maybe_unused]] std::string_view text) {
  std::string out;
#ifdef VTX_HAS_PNG
  constexpr size_t kTextBytes = 256 << 10;
  z_stream stream{};
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  if (inflateInit(&stream) != Z_OK) return out;
  out.resize(kTextBytes);
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  int end = inflate(&stream, Z_SYNC_FLUSH);
  out.resize(end == Z_OK || end == Z_STREAM_END || end == Z_BUF_ERROR ? stream.total_out : 0);
  inflateEnd(&stream);
#endif
  return out;
}

// The text of a chunk tEXt, zTXt or iTXt.
Text read_text(std::string_view type, std::string_view data) {
  constexpr auto npos = std::string_view::npos;
  size_t end = data.find('\0');
  if (end == npos) return {data, ""};
  std::string_view keyword = data.substr(0, end), text = data.substr(end + 1);
  bool compressed = type == "zTXt";
  if (type == "iTXt") {  // the flag, the method, the language and the translated keyword come first
    compressed = text.substr(0, 1) == std::string_view("\1");
    text.remove_prefix(std::min<size_t>(2, text.size()));
    for (int i = 0; i < 2; ++i)
      if (size_t name = text.find('\0'); name != npos) text.remove_prefix(name + 1);
  } else if (compressed) {
    text.remove_prefix(std::min<size_t>(1, text.size()));
  }
  return {keyword, compressed ? inflated(text) : std::string(text)};
}

// The orientation in ImageMagick's form of EXIF: "\nexif\n", a length, and lines of hexadecimal digits.
std::optional<int> profile_orientation(std::string_view text) {
  constexpr std::string_view kStart = "\nexif\n", kDigits = "0123456789abcdefABCDEF";
  if (text.substr(0, kStart.size()) != kStart) return std::nullopt;
  text.remove_prefix(kStart.size());
  size_t length = text.find_first_not_of(' '), end = text.find('\n');
  if (end == std::string_view::npos || length >= end || text.find_first_not_of("0123456789", length) != end)
    return std::nullopt;
  std::string block;
  int digits = 0, value = 0;
  for (char letter : text.substr(end + 1)) {
    if (letter == '\n') continue;
    size_t digit = kDigits.find(letter);
    if (digit == std::string_view::npos) break;
    value = value << 4 | static_cast<int>(digit < 16 ? digit : digit - 6);
    if (++digits % 2 == 0) block += static_cast<char>(value & 255);
  }
  return exif_orientation(block);
}

}  // namespace

Container read_png(std::string_view content, const std::string& name) {
  constexpr std::string_view kPixels("IHDRPLTEtRNSIDATIEND");
  std::string kept(content.substr(0, 8));
  std::optional<int> exif, raw, xmp;
  int64_t parts = 0;
  for (size_t at = 8; at + 8 <= content.size();) {
    if (++parts > names::kMaxParts)
      fail(Kind::image, name, " has over ", grouped(names::kMaxParts),
           " chunks, the limit; open it in an image editor and save it again");
    size_t length = big(content, at, 4);
    std::string_view type = content.substr(at + 4, 4), data = content.substr(at + 8, length);
    std::string_view whole = content.substr(at, 12 + length);
    if (at == 8 && type != "IHDR") damaged(name, "its header is not its first chunk");
    if (type == "eXIf" && !exif) exif = exif_orientation(data);
    if (type == "tEXt" || type == "zTXt" || type == "iTXt") {
      Text text = read_text(type, data);
      if (text.keyword == "XML:com.adobe.xmp") xmp = xmp_orientation(text.content);
      if (text.keyword == "Raw profile type exif") raw = profile_orientation(text.content);
    }
    size_t index = kPixels.find(type);
    if (index != std::string_view::npos && index % 4 == 0 && (at == 8 || type != "IHDR")) kept += whole;
    if (type == "IEND") break;
    at += 12 + length;
  }
  if (content.size() < 24) damaged(name, "it ends too early");
  uint32_t width = big(content, 16, 4), height = big(content, 20, 4);
  int orientation = 1;
  for (const std::optional<int>& stated : {xmp, raw, exif})
    if (stated && *stated) orientation = *stated;
  check_size(name, width, height);
  return {Container::png, static_cast<int>(width), static_cast<int>(height), std::move(kept), orientation};
}

#ifdef VTX_HAS_PNG
namespace {

struct Source {
  const std::string& content;
  size_t at;
  bool out_of_memory;
  char message[200];
};

// libpng reports a lack of memory as it does damage, hence allocations go by here.
png_voidp on_allocate(png_structp png, png_alloc_size_t bytes) {
  void* memory = ::operator new(bytes, std::nothrow);
  if (!memory) static_cast<Source*>(png_get_mem_ptr(png))->out_of_memory = true;
  return memory;
}

void on_free(png_structp, png_voidp memory) { ::operator delete(memory); }

void on_read(png_structp png, png_bytep into, size_t count) {
  auto* source = static_cast<Source*>(png_get_io_ptr(png));
  if (source->content.size() - source->at < count) png_error(png, "it ends too early");
  std::memcpy(into, source->content.data() + source->at, count);
  source->at += count;
}

[[noreturn]] void on_error(png_structp png, png_const_charp message) {
  auto* source = static_cast<Source*>(png_get_error_ptr(png));
  std::strncpy(source->message, message, sizeof source->message - 1);
  png_longjmp(png, 1);
}

void on_warning(png_structp, png_const_charp) {}

// The four channels over white, as Pillow composes them.
void over_white(const std::vector<uint8_t>& rgba, Picture& out) {
  for (size_t i = 0; i < rgba.size() / 4; ++i)
    for (size_t c = 0; c < 3; ++c) {
      uint32_t alpha = rgba[4 * i + 3];
      uint32_t sum = (rgba[4 * i + c] * alpha + 255 * (255 - alpha)) * 128 + (0x80 << 7);
      out.data[3 * i + c] = static_cast<uint8_t>(((sum >> 8) + sum) >> 8 >> 7);
    }
}

// Decodes into `rows` of RGBA; false with a message where libpng gives up. Nothing with a destructor is
// made between its jumps.
bool decode(Source& source, int width, int height, std::vector<png_bytep>& rows) {
  png_structp png =
      png_create_read_struct_2(PNG_LIBPNG_VER_STRING, &source, on_error, on_warning, &source, on_allocate, on_free);
  png_infop info = png ? png_create_info_struct(png) : nullptr;
  if (!info) {
    png_destroy_read_struct(&png, nullptr, nullptr);
    return false;
  }
  if (setjmp(png_jmpbuf(png))) {
    png_destroy_read_struct(&png, &info, nullptr);
    return false;
  }
  png_set_read_fn(png, &source, on_read);
  png_set_user_limits(png, static_cast<png_uint_32>(width), static_cast<png_uint_32>(height));
  png_read_info(png, info);
  png_set_strip_16(png);
  png_set_expand(png);
  png_set_gray_to_rgb(png);
  png_set_add_alpha(png, 255, PNG_FILLER_AFTER);
  png_set_interlace_handling(png);
  png_read_update_info(png, info);
  if (png_get_rowbytes(png, info) != 4 * static_cast<size_t>(width)) png_error(png, "it states two sizes");
  png_read_image(png, rows.data());
  png_destroy_read_struct(&png, &info, nullptr);
  return true;
}

}  // namespace

Picture decode_png(const Container& container, const std::string& name) {
  Picture out(container.width, container.height);
  size_t row = 4 * static_cast<size_t>(container.width);
  std::vector<uint8_t> rgba(row * static_cast<size_t>(container.height));
  std::vector<png_bytep> rows;
  for (size_t y = 0; y < static_cast<size_t>(container.height); ++y) rows.push_back(rgba.data() + y * row);
  Source source{container.content, 0, false, ""};
  if (!decode(source, container.width, container.height, rows)) {
    if (source.out_of_memory) throw std::bad_alloc();
    damaged(name, source.message);
  }
  over_white(rgba, out);
  return out;
}
#else
Picture decode_png(const Container&, const std::string& name) { not_built(name, "libpng"); }
#endif

}  // namespace vtxcore
