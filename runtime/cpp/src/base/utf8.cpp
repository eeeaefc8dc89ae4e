#include "base/utf8.hpp"

#include <algorithm>

namespace vtxcore {
namespace {

struct Step {
  uint32_t code;
  size_t length;  // of the character, or of the unsound bytes that one U+FFFD stands for
  bool sound;
};

// The next character of `text`, which is not empty (Unicode, table 3-7).
Step step(std::string_view text) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};
  size_t length = lead >= 0xC2 && lead <= 0xDF ? 2 : lead >= 0xE0 && lead <= 0xEF ? 3 : lead >= 0xF0 && lead <= 0xF4 ? 4 : 0;
  if (length == 0) return {0xFFFD, 1, false};
  uint32_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint32_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  uint32_t code = lead & (0x7Fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if (i >= text.size() || byte(i) < low || byte(i) > high) return {0xFFFD, i, false};
    code = code << 6 | (byte(i) & 0x3Fu);
    low = 0x80;
    high = 0xBF;
  }
  return {code, length, true};
}

}  // namespace

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | code >> 6);
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | code >> 12);
    out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | code >> 18);
    out += static_cast<char>(0x80 | (code >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

Codes decode_utf8(std::string_view text) {
  Codes out;
  out.reserve(text.size());
  while (!text.empty()) {
    Step next = step(text);
    out += static_cast<char32_t>(next.code);
    text.remove_prefix(next.length);
  }
  return out;
}

std::string encode_utf8(const std::u32string_view codes) {
  std::string out;
  out.reserve(codes.size());
  for (char32_t code : codes) append_utf8(out, code);
  return out;
}

size_t first_invalid_utf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    Step next = step(text.substr(at));
    if (!next.sound) return at;
    at += next.length;
  }
  return std::string_view::npos;
}

size_t length_utf8(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

bool is_python_space(uint32_t code) {
  return (code >= 0x09 && code <= 0x0D) || (code >= 0x1C && code <= 0x20) || code == 0x85 || code == 0xA0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F ||
         code == 0x205F || code == 0x3000;
}

std::string_view strip(std::string_view text, bool left, bool right) {
  while (left && !text.empty()) {
    Step next = step(text);
    if (!is_python_space(next.code)) break;
    text.remove_prefix(next.length);
  }
  while (right && !text.empty()) {
    size_t start = text.size() - 1;
    while (start > 0 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
    if (!is_python_space(step(text.substr(start)).code)) break;
    text.remove_suffix(text.size() - start);
  }
  return text;
}

}  // namespace vtxcore
