#include "prompt/unicode.hpp"

#include <algorithm>
#include <iterator>

namespace vtxcore {
namespace {

#include "prompt/unicode_tables.inc"

constexpr uint32_t kCanonical = 1u << 24;
constexpr uint32_t kHangul = 0xAC00, kLead = 0x1100, kVowel = 0x1161, kTail = 0x11A7;
constexpr uint32_t kVowels = 21, kTails = 28, kSyllables = 19 * kVowels * kTails;

// Whether `code` is in a list of first and last ones.
template <size_t N>
bool within(const uint32_t (&ranges)[N], uint32_t code) {
  const uint32_t* after = std::upper_bound(std::begin(ranges), std::end(ranges), code);
  auto index = after - std::begin(ranges);
  return index % 2 == 1 || (index > 0 && ranges[index - 1] == code);
}

// The entry of `code` in a table of records of `width` that rises by the first member; null where there is none.
template <size_t N>
const uint32_t* entry(const uint32_t (&table)[N], size_t width, uint32_t code) {
  size_t low = 0, high = N / width;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (table[middle * width] < code)
      low = middle + 1;
    else
      high = middle;
  }
  return low < N / width && table[low * width] == code ? &table[low * width] : nullptr;
}

uint32_t combining_class(uint32_t code) {
  const uint32_t* found = code < 0x300 ? nullptr : entry(kCombining, 2, code);
  return found ? found[1] : 0;
}

void decompose(uint32_t code, bool compatible, Codes& out) {
  if (code >= kHangul && code < kHangul + kSyllables) {
    uint32_t index = code - kHangul, tail = index % kTails;
    out += kLead + index / (kVowels * kTails);
    out += kVowel + index % (kVowels * kTails) / kTails;
    if (tail) out += kTail + tail;
    return;
  }
  const uint32_t* found = code < 0x80 ? nullptr : entry(kDecompositions, 2, compatible ? code : code | kCanonical);
  if (!found) {
    out += code;
    return;
  }
  for (uint32_t i = 0; i < (found[1] & 31); ++i) out += kDecomposed[(found[1] >> 5) + i];
}

// Puts marks in the order of their combining classes.
void reorder(Codes& text) {
  auto start = text.begin();
  while (start != text.end()) {
    if (combining_class(*start) == 0) {
      ++start;
      continue;
    }
    auto end = std::find_if(start, text.end(), [](char32_t code) { return combining_class(code) == 0; });
    std::stable_sort(start, end, [](char32_t a, char32_t b) { return combining_class(a) < combining_class(b); });
    start = end;
  }
}

uint32_t composed_of(uint32_t first, uint32_t second) {
  if (first - kLead < 19 && second - kVowel < kVowels)
    return kHangul + ((first - kLead) * kVowels + (second - kVowel)) * kTails;
  if (first - kHangul < kSyllables && (first - kHangul) % kTails == 0 && second - kTail - 1 < kTails - 1)
    return first + (second - kTail);
  size_t low = 0, count = std::size(kCompositions) / 3, high = count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    const uint32_t* at = &kCompositions[middle * 3];
    if (at[0] < first || (at[0] == first && at[1] < second))
      low = middle + 1;
    else
      high = middle;
  }
  const uint32_t* at = &kCompositions[low * 3];
  return low < count && at[0] == first && at[1] == second ? at[2] : 0;
}

Codes compose(const Codes& text) {
  Codes out;
  size_t starter = std::u32string::npos;
  uint32_t last_class = 0;
  for (char32_t code : text) {
    uint32_t kind = combining_class(code);
    bool blocked = starter == std::u32string::npos || (starter + 1 < out.size() && last_class >= kind);
    if (uint32_t made = blocked ? 0 : composed_of(out[starter], code)) {
      out[starter] = made;
      continue;
    }
    if (kind == 0) starter = out.size();
    last_class = kind;
    out += code;
  }
  return out;
}

}  // namespace

bool is_letter(char32_t code) { return within(kLetters, code); }
bool is_number(char32_t code) { return within(kNumbers, code); }
bool is_mark(char32_t code) { return within(kMarks, code); }
bool is_white_space(char32_t code) { return is_python_space(code) && !(code >= 0x1C && code <= 0x1F); }

Codes lower_case(const Codes& text) {
  Codes out;
  for (char32_t code : text) {
    const uint32_t* found = entry(kLower, 3, code);
    out += found ? found[1] : code;
    if (found && found[2]) out += found[2];
  }
  return out;
}

Codes normal_form(const Codes& text, bool compatible, bool composed) {
  if (std::all_of(text.begin(), text.end(), [](char32_t code) { return code < 0x80; })) return text;
  Codes out;
  for (char32_t code : text) decompose(code, compatible, out);
  reorder(out);
  return composed ? compose(out) : out;
}

}  // namespace vtxcore
