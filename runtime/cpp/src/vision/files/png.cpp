// PNG: its structure, read without decoding, and its pixels by libpng.
#include <algorithm>
#include <cstring>
#include <new>

#include "vision/files/container.hpp"

#ifdef VTX_HAS_PNG
#include <csetjmp>
#include <png.h>
#endif

namespace vtxcore {

Container read_png(std::string_view content, const std::string& name) {
  constexpr std::string_view kXmp("XML:com.adobe.xmp\0", 18), kPixels("IHDRPLTEtRNSIDATIEND");
  std::string kept(content.substr(0, 8));
  std::optional<int> exif, xmp;
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
    if (type == "iTXt" && data.substr(0, 18) == kXmp) xmp = xmp_orientation(data);
    size_t index = kPixels.find(type);
    if (index != std::string_view::npos && index % 4 == 0 && (at == 8 || type != "IHDR")) kept += whole;
    if (type == "IEND") break;
    at += 12 + length;
  }
  if (content.size() < 24) damaged(name, "it ends too early");
  uint32_t width = big(content, 16, 4), height = big(content, 20, 4);
  int orientation = exif && *exif ? *exif : xmp && *xmp ? *xmp : 1;
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
  if (png_get_bit_depth(png, info) == 16 && !(png_get_color_type(png, info) & PNG_COLOR_MASK_COLOR))
    png_error(png, "grey of 16 bits; save it with 8");
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
