#include "prompt/masking.hpp"

#include <algorithm>

namespace vtxcore {
namespace {

constexpr std::pair<char32_t, char32_t> kPrivateUse[] = {{0xE000, 0xF8FF}, {0xF0000, 0xFFFFD}, {0x100000, 0x10FFFD}};

// Private-use characters that occur in no message and in nothing that is printed around them.
class FreeCharacters {
 public:
  FreeCharacters(const std::vector<Message>& messages, const TextSettings& settings, const std::string& printed) {
    take(printed);
    for (const Message& message : messages) take(message.text());
    for (const auto& [token, id] : settings.control_tokens) take(token);
  }

  char32_t next() {
    for (auto [first, last] : kPrivateUse)
      for (char32_t code = std::max(first, next_); code <= last; ++code)
        if (taken_.count(code) == 0) {
          next_ = code + 1;
          return code;
        }
    return 0;
  }

 private:
  void take(const std::string& text) {
    for (char32_t code : decode_utf8(text)) taken_.insert(code);
  }
  std::set<char32_t> taken_;
  char32_t next_ = 0;
};

// The bytes of the longest control token that is written at byte `at` of `text`, or 0.
size_t control_at(const std::string& text, size_t at, const TextSettings& settings) {
  size_t longest = 0;
  for (const auto& [token, id] : settings.control_tokens)
    if (text.compare(at, token.size(), token) == 0) longest = std::max(longest, token.size());
  return longest;
}

// Where control tokens start in `text`, in characters: as written, or as the tokenizer's normalizer would make them.
std::vector<size_t> find_control(const std::string& text, const Tokenizer& tokenizer, const TextSettings& settings) {
  std::vector<size_t> spots;
  for (size_t at = 0; at < text.size();) {
    size_t longest = control_at(text, at, settings);
    if (longest > 0) spots.push_back(length_utf8(std::string_view(text).substr(0, at)));
    at += std::max<size_t>(1, longest);
  }
  if (!spots.empty() || !tokenizer.has_normalizer()) return spots;
  for (const TokenAt& token : tokenizer.encode(text)) {
    if (token.begin == token.end || settings.control_tokens.count(tokenizer.added(token.id)) == 0) continue;
    if (text.compare(token.begin, token.end - token.begin, tokenizer.added(token.id)) != 0)
      fail(Kind::request, "the text becomes the special token '", tokenizer.added(token.id), "' once it is normalized; ",
           "leave it out");
    spots.push_back(length_utf8(std::string_view(text).substr(0, token.begin)));
  }
  return spots;
}

Codes masked_text(const std::string& text, Marks& marks, FreeCharacters& free, const Tokenizer& tokenizer,
                  const TextSettings& settings) {
  Codes codes = decode_utf8(text);
  while (true) {
    std::vector<size_t> spots = find_control(encode_utf8(codes), tokenizer, settings);
    if (spots.empty()) return codes;
    for (size_t spot : spots) {
      char32_t& code = codes[spot];
      bool is_mark = std::any_of(marks.begin(), marks.end(), [&](const auto& pair) { return pair.second == code; });
      if (marks.count(code) == 0) marks[code] = is_mark ? 0 : free.next();
      if (marks[code] == 0)
        fail(Kind::request, "the special token at character ", spot, " cannot be kept as text; leave it out");
      code = marks[code];
    }
  }
}

}  // namespace

std::vector<Message> mask(const std::vector<Message>& messages, const Tokenizer& tokenizer, const TextSettings& settings,
                          const std::string& printed, Marks& marks) {
  FreeCharacters free(messages, settings, printed);
  std::vector<Message> out = messages;
  for (Message& message : out) {
    // A special token may stand across two parts, so a message is masked as one text and cut again.
    Codes text = masked_text(message.text(), marks, free, tokenizer, settings);
    size_t at = 0;
    for (Part& part : message.parts) {
      if (part.image) continue;
      size_t length = length_utf8(part.text);
      part.text = encode_utf8(text.substr(at, length));
      at += length;
    }
  }
  return out;
}

Ids encode_masked(const std::string& rendered, const Marks& marks, const Tokenizer& tokenizer,
                  const std::set<int64_t>& control, const TextSettings& settings) {
  Marks unmask;
  for (const auto& [code, mark] : marks) unmask[mark] = code;
  std::string unk = tokenizer.unk_token().empty() ? settings.unk_token.value_or("") : tokenizer.unk_token();
  int64_t unk_id = unk.empty() ? -1 : tokenizer.id_of(unk);
  Ids out;
  size_t position = 0;
  auto plain = [&](size_t end) {
    Codes piece = decode_utf8(std::string_view(rendered).substr(position, end - position));
    for (char32_t& code : piece)
      if (auto found = unmask.find(code); found != unmask.end()) code = found->second;
    if (piece.empty()) return;
    EncodeOptions options{&control, position == 0};
    for (const TokenAt& token : tokenizer.encode(encode_utf8(piece), options)) out.push_back(token.id);
  };
  for (const TokenAt& token : tokenizer.encode(rendered)) {
    if (token.begin == token.end || control.count(token.id) == 0) continue;
    std::string written = rendered.substr(token.begin, token.end - token.begin);
    if (token.id == unk_id && settings.control_tokens.count(written) == 0) continue;
    plain(token.begin);
    out.push_back(token.id);
    position = token.end;
  }
  plain(rendered.size());
  return out;
}

Ids continuation(const std::string& before, const std::string& text, const Tokenizer& tokenizer,
                 const std::set<int64_t>& control, const TextSettings& settings) {
  size_t start = 0;  // behind the last control token
  for (size_t at = 0; at < before.size();) {
    size_t length = control_at(before, at, settings);
    at += std::max<size_t>(1, length);
    if (length > 0) start = at;
  }
  auto encoded = [&](const std::string& piece, bool at_start) {
    Ids ids;
    for (const TokenAt& token : tokenizer.encode(piece, {&control, at_start})) ids.push_back(token.id);
    return ids;
  };
  std::string known = before.substr(start);
  Ids prefix = encoded(known, start == 0), ids = encoded(known + text, start == 0);
  if (prefix.size() > ids.size() || !std::equal(prefix.begin(), prefix.end(), ids.begin())) return encoded(text, false);
  return {ids.begin() + static_cast<std::ptrdiff_t>(prefix.size()), ids.end()};
}

}  // namespace vtxcore
