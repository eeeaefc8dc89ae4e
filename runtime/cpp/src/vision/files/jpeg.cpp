// JPEG: its structure, read without decoding, and its pixels by libjpeg.
//
// A progressive JPEG repeats its blocks of 8x8 pixels in scan after scan, and a scan that changes nothing takes some 30
// bytes. Hence scans are counted, and the blocks that all of them visit.
#include <algorithm>
#include <map>
#include <new>

#include "vision/files/container.hpp"

#ifdef VTX_HAS_JPEG
#include <csetjmp>
#include <cstdio>
#include <jpeglib.h>

#include <jerror.h>
#endif

namespace vtxcore {
namespace {

struct Frame {
  int width = 0, height = 0;
  std::map<int, int64_t> blocks;  // of 8x8, by component
};

bool is_frame(int code) { return code >= 0xC0 && code <= 0xCF && code != 0xC4 && code != 0xC8 && code != 0xCC; }

// All but JFIF and Adobe, which tell the colours.
bool is_metadata(int code) { return (code >= 0xE1 && code <= 0xEF && code != 0xEE) || code == 0xFE; }

// The next marker from `at` on that is not part of a scan's data: the place of its code, or npos.
size_t next_marker(std::string_view content, size_t at) {
  while (true) {
    at = content.find('\xFF', at);
    if (at == std::string_view::npos) return at;
    while (at < content.size() && content[at] == '\xFF') ++at;
    if (at >= content.size()) return std::string_view::npos;
    auto code = static_cast<unsigned char>(content[at]);
    if (code != 0 && !(code >= 0xD0 && code <= 0xD7)) return at;
  }
}

Frame read_frame(std::string_view segment, const std::string& name) {
  size_t count = big(segment, 5, 1);
  if (segment.size() != 6 + 3 * count || count < 1 || count > 4) damaged(name, "its header names no components");
  Frame frame;
  frame.height = static_cast<int>(big(segment, 1, 2)), frame.width = static_cast<int>(big(segment, 3, 2));
  int64_t most_h = 1, most_v = 1;
  for (size_t i = 0; i < count; ++i) {
    int64_t h = big(segment, 7 + 3 * i, 1) >> 4, v = big(segment, 7 + 3 * i, 1) & 15;
    if (h < 1 || h > 4 || v < 1 || v > 4) damaged(name, "a component's sampling factor is not from 1 to 4");
    most_h = std::max(most_h, h), most_v = std::max(most_v, v);
  }
  int64_t across = (frame.width + 8 * most_h - 1) / (8 * most_h), rows = (frame.height + 8 * most_v - 1) / (8 * most_v);
  for (size_t i = 0; i < count; ++i) {
    int64_t h = big(segment, 7 + 3 * i, 1) >> 4, v = big(segment, 7 + 3 * i, 1) & 15;
    frame.blocks[static_cast<int>(big(segment, 6 + 3 * i, 1))] = across * h * rows * v;
  }
  return frame;
}

// Counts a scan with this header, and the blocks that it visits.
void count_scan(const Frame& frame, std::string_view segment, int64_t& scans, int64_t& visited, const std::string& name) {
  for (size_t i = 0; i < big(segment, 0, 1); ++i) {
    auto found = frame.blocks.find(static_cast<int>(big(segment, 1 + 2 * i, 1)));
    if (found != frame.blocks.end()) visited += found->second;
  }
  if (++scans > names::kMaxScans)
    fail(Kind::image, name, " has over ", names::kMaxScans,
         " scans, the limit; open it in an image editor and save it again");
  if (visited > names::kMaxScanBlocks)
    fail(Kind::image, "the scans of ", name, " pass over more than ", grouped(names::kMaxScanBlocks),
         " blocks of 8x8 pixels, the limit; save it as a baseline JPEG, or shrink it");
}

}  // namespace

Container read_jpeg(std::string_view content, const std::string& name) {
  constexpr std::string_view kExif("Exif\0\0", 6), kXmp("http://ns.adobe.com/xap/1.0/\0", 29);
  std::optional<Frame> frame;
  std::optional<int> exif, xmp;
  int64_t scans = 0, visited = 0, parts = 0;
  std::string kept;
  size_t end = 0;
  while (true) {
    if (++parts > names::kMaxParts)
      fail(Kind::image, name, " has over ", grouped(names::kMaxParts),
           " segments, the limit; open it in an image editor and save it again");
    size_t at = next_marker(content, end);
    if (at == std::string_view::npos) break;
    int code = static_cast<unsigned char>(content[at]);
    size_t start = at - 1;
    if (code == 0xD9) {
      kept += "\xFF\xD9";
      break;
    }
    bool alone = code == 0x01 || code == 0xD8;
    size_t length = alone ? 0 : big(content, at + 1, 2);
    if (!alone && length < 2) damaged(name, "a segment has no length");
    end = std::min(content.size(), at + 1 + length);
    std::string_view segment = alone || at + 3 > end ? std::string_view() : content.substr(at + 3, end - at - 3);
    if (is_metadata(code)) {
      if (code == 0xE1 && !exif && segment.substr(0, 6) == kExif) exif = exif_orientation(segment);
      if (code == 0xE1 && !xmp && segment.substr(0, kXmp.size()) == kXmp) xmp = xmp_orientation(segment);
      continue;
    }
    if (is_frame(code)) {
      if (frame) damaged(name, "it has two frame headers");
      frame = read_frame(segment, name);
    } else if (code == 0xDA) {
      if (!frame || segment.empty()) damaged(name, "a scan comes before the frame header");
      count_scan(*frame, segment, scans, visited, name);
      size_t next = next_marker(content, end);
      end = next == std::string_view::npos ? content.size() : content.find_last_not_of('\xFF', next - 1) + 1;
    } else if (code == 0xDC) {
      damaged(name, "its height is not in its header");
    }
    kept += content.substr(start, end - start);
  }
  if (!frame) damaged(name, "it has no frame header");
  int orientation = exif && *exif ? *exif : xmp && *xmp ? *xmp : 1;
  return {Container::jpeg, frame->width, frame->height, std::move(kept), orientation};
}

#ifdef VTX_HAS_JPEG
namespace {

struct Failure {
  jpeg_error_mgr manager;
  std::jmp_buf back;
  bool cut, out_of_memory;
  char message[JMSG_LENGTH_MAX];
};

[[noreturn]] void on_error(j_common_ptr info) {
  auto* failure = reinterpret_cast<Failure*>(info->err);
  failure->out_of_memory = failure->manager.msg_code == JERR_OUT_OF_MEMORY;
  failure->manager.format_message(info, failure->message);
  std::longjmp(failure->back, 1);
}

// Of warnings only the end of the file counts: what else is odd in a file Pillow shows as well as it can.
void on_warning(j_common_ptr info, int level) {
  auto* failure = reinterpret_cast<Failure*>(info->err);
  if (level < 0 && failure->manager.msg_code == JWRN_JPEG_EOF) failure->cut = true;
}

// A row of inks, which Adobe stores inverted, as Pillow shows it.
void from_inks(const uint8_t* inks, int width, uint8_t* to) {
  for (int x = 0; x < width; ++x, inks += 4)
    for (int c = 0; c < 3; ++c) {
      int light = inks[3], sum = (255 - inks[c]) * light + 128;
      *to++ = static_cast<uint8_t>(std::max(0, light - (((sum >> 8) + sum) >> 8)));
    }
}

// Decodes into `out`; false with a message where libjpeg gives up. Nothing with a destructor lives across its jumps.
// `inks` is a row of four bytes a pixel.
bool decode(const std::string& content, std::vector<uint8_t>& inks, Picture& out, Failure& failure) {
  jpeg_decompress_struct info;
  info.err = jpeg_std_error(&failure.manager);
  failure.manager.error_exit = on_error;
  failure.manager.emit_message = on_warning;
  if (setjmp(failure.back)) {
    jpeg_destroy_decompress(&info);
    return false;
  }
  jpeg_create_decompress(&info);
  jpeg_mem_src(&info, reinterpret_cast<const unsigned char*>(content.data()), static_cast<unsigned long>(content.size()));
  jpeg_read_header(&info, TRUE);
  const bool four = info.num_components == 4;
  info.out_color_space = four ? JCS_CMYK : JCS_RGB;
  jpeg_start_decompress(&info);
  if (static_cast<int>(info.output_width) != out.width || static_cast<int>(info.output_height) != out.height ||
      info.output_components != (four ? 4 : 3)) {
    std::snprintf(failure.message, sizeof failure.message, "it states two sizes");
    jpeg_destroy_decompress(&info);
    return false;
  }
  while (info.output_scanline < info.output_height) {
    uint8_t* pixels = out.pixel(0, static_cast<int>(info.output_scanline));
    JSAMPROW row = four ? inks.data() : pixels;
    jpeg_read_scanlines(&info, &row, 1);
    if (four) from_inks(inks.data(), out.width, pixels);
  }
  jpeg_finish_decompress(&info);
  jpeg_destroy_decompress(&info);
  if (failure.cut) std::snprintf(failure.message, sizeof failure.message, "it ends too early");
  return !failure.cut;
}

}  // namespace

Picture decode_jpeg(const Container& container, const std::string& name) {
  Picture out(container.width, container.height);
  std::vector<uint8_t> inks(4 * static_cast<size_t>(container.width));
  Failure failure{};
  if (!decode(container.content, inks, out, failure)) {
    if (failure.out_of_memory) throw std::bad_alloc();
    damaged(name, failure.message);
  }
  return out;
}
#else
Picture decode_jpeg(const Container&, const std::string& name) { not_built(name, "libjpeg"); }
#endif

}  // namespace vtxcore
