// Unicode as tokenizers need it: categories, lower case, and the normal forms NFC, NFD, NFKC and NFKD.
#pragma once

#include "base/utf8.hpp"

namespace vtxcore {

bool is_letter(char32_t code);       // \p{L}
bool is_number(char32_t code);       // \p{N}
bool is_mark(char32_t code);         // \p{M}
bool is_white_space(char32_t code);  // \s: the property White_Space

Codes lower_case(const Codes& text);
Codes normal_form(const Codes& text, bool compatible, bool composed);

}  // namespace vtxcore
