// UTF-8 to code points and back.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace vtxcore {

using Codes = std::u32string;

// Appends the UTF-8 form of a code point.
void append_utf8(std::string& out, uint32_t code);

// The code points of sound UTF-8; what is unsound becomes U+FFFD, one for each longest sound beginning, as Rust does.
Codes decode_utf8(std::string_view text);

std::string encode_utf8(const std::u32string_view codes);

// The offset of the first byte that is not part of sound UTF-8; npos where all is.
size_t first_invalid_utf8(std::string_view text);

// The number of code points in sound UTF-8.
size_t length_utf8(std::string_view text);

// What Python's str.isspace says of one character.
bool is_python_space(uint32_t code);

// As str.strip of Python; the sides may be left alone.
std::string_view strip(std::string_view text, bool left, bool right);

}  // namespace vtxcore
