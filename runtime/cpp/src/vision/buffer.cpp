// Camera frames and other buffers as RGB.
#include <algorithm>

#include "vision/picture.hpp"

namespace vtxcore {
namespace {

// So that a negative number that became a size_t is none, and no offset wraps around.
constexpr size_t kMaxStride = size_t{1} << 30;

uint8_t clip(int value) { return static_cast<uint8_t>(std::clamp(value, 0, 255)); }

// BT.601, limited range, in fixed point of 8 bits.
void from_yuv(int luma, int blue, int red, uint8_t* out) {
  int c = 298 * (luma - 16) + 128, d = blue - 128, e = red - 128;
  out[0] = clip((c + 409 * e) >> 8);
  out[1] = clip((c - 100 * d - 208 * e) >> 8);
  out[2] = clip((c + 516 * d) >> 8);
}

uint8_t over_white(int value, int alpha) {
  uint32_t sum = static_cast<uint32_t>(value * alpha + 255 * (255 - alpha)) * 128 + (0x80 << 7);
  return static_cast<uint8_t>(((sum >> 8) + sum) >> 8 >> 7);
}

size_t channels(PixelFormat format) {
  switch (format) {
    case PixelFormat::rgba8:
    case PixelFormat::bgra8: return 4;
    case PixelFormat::rgb8:
    case PixelFormat::bgr8: return 3;
    case PixelFormat::yuyv: return 2;
    default: return 1;
  }
}

}  // namespace

Picture from_buffer(const uint8_t* data, const uint8_t* second, int width, int height, size_t stride, PixelFormat format) {
  check_size("the buffer", width, height);
  size_t each = channels(format);
  if (size_t least = each * static_cast<size_t>(width); stride < least || stride > kMaxStride)
    fail(Kind::image, "the buffer's rows are ", stride, " bytes apart; give the stride in bytes, ", least, " to ",
         kMaxStride);
  bool nv12 = format == PixelFormat::nv12, yuyv = format == PixelFormat::yuyv;
  if (((nv12 || yuyv) && width % 2) || (nv12 && height % 2))
    fail(Kind::image, nv12 ? "an NV12" : "a YUYV", " frame of ", width, "x", height,
         " has an odd side; crop it to even ones");
  Picture out(width, height);
  bool swapped = format == PixelFormat::bgr8 || format == PixelFormat::bgra8;
  for (int y = 0; y < height; ++y) {
    const uint8_t* row = data + static_cast<size_t>(y) * stride;
    const uint8_t* chroma = second ? second + static_cast<size_t>(y / 2) * stride : nullptr;
    for (int x = 0; x < width; ++x) {
      const uint8_t* from = row + each * static_cast<size_t>(x);
      uint8_t* to = out.pixel(x, y);
      if (format == PixelFormat::nv12) {
        const uint8_t* pair = chroma + static_cast<size_t>(x / 2) * 2;
        from_yuv(*from, pair[0], pair[1], to);
        continue;
      }
      if (format == PixelFormat::yuyv) {  // Y of the one, U of both, Y of the other, V of both
        const uint8_t* two = row + static_cast<size_t>(x / 2) * 4;
        from_yuv(*from, two[1], two[3], to);
        continue;
      }
      for (size_t c = 0; c < 3; ++c) {
        uint8_t value = each == 1 ? *from : from[swapped ? 2 - c : c];
        to[c] = each == 4 ? over_white(value, from[3]) : value;
      }
    }
  }
  return out;
}

}  // namespace vtxcore
