#include <cstdlib>
#include <map>

#include "prompt/pieces.hpp"

namespace vtxcore {
namespace {

size_t number_of(const Json& spec, const char* key) {
  const Json* found = spec.find(key);
  return found && found->integer() && *found->integer() >= 0 ? static_cast<size_t>(*found->integer()) : 0;
}

const std::map<char32_t, char>& bytes_of_characters() {
  static const std::map<char32_t, char> kTable = [] {
    std::map<char32_t, char> table;
    for (size_t byte = 0; byte < 256; ++byte) table[byte_characters()[byte]] = static_cast<char>(byte);
    return table;
  }();
  return kTable;
}

// The bytes of a token at byte level; of one that has another character, its own.
std::string bytes_of(const std::string& token) {
  std::string out;
  for (char32_t code : decode_utf8(token)) {
    auto found = bytes_of_characters().find(code);
    if (found == bytes_of_characters().end()) return token;
    out += found->second;
  }
  return out;
}

// What is unsound becomes U+FFFD.
std::string sound(const std::string& bytes) {
  return first_invalid_utf8(bytes) == std::string::npos ? bytes : encode_utf8(decode_utf8(bytes));
}

// Up to `left` and `right` times the character `mark` is taken off.
std::string cut(std::string text, const std::string& mark, size_t left, size_t right) {
  for (; left > 0 && text.compare(0, mark.size(), mark) == 0 && !text.empty(); --left) text.erase(0, mark.size());
  for (; right > 0 && text.size() >= mark.size() && text.compare(text.size() - mark.size(), mark.size(), mark) == 0; --right)
    text.erase(text.size() - mark.size());
  return text;
}

// The value of <0xAB>, or -1.
int byte_of(const std::string& token) {
  if (token.size() != 6 || token.compare(0, 3, "<0x") != 0 || token[5] != '>') return -1;
  char* end = nullptr;
  std::string digits = token.substr(3, 2);
  long value = std::strtol(digits.c_str(), &end, 16);
  return *end == '\0' && digits[0] != '-' && digits[0] != '+' && digits[0] != ' ' ? static_cast<int>(value) : -1;
}

// Runs of byte tokens as text; of a run that is not sound, each byte as U+FFFD.
std::vector<std::string> joined_bytes(const std::vector<std::string>& tokens) {
  std::vector<std::string> out;
  std::string run;
  auto flush = [&] {
    if (run.empty()) return;
    if (first_invalid_utf8(run) == std::string::npos)
      out.push_back(run);
    else
      out.insert(out.end(), run.size(), "\xEF\xBF\xBD");
    run.clear();
  };
  for (const std::string& token : tokens) {
    int byte = byte_of(token);
    if (byte >= 0) {
      run += static_cast<char>(byte);
      continue;
    }
    flush();
    out.push_back(token);
  }
  flush();
  return out;
}

}  // namespace

Decoder::Decoder(const Json* spec) : none_(!spec || spec->is_null()) {
  if (!none_) add(*spec);
}

void Decoder::add(const Json& spec) {
  std::string type = spec.text("type");
  Step step{Step::fuse, "", "", 0, 0, false};
  if (type == "Sequence") {
    const Json* list = spec.find("decoders");
    if (!list || !list->array()) unknown("a decoder with a Sequence of nothing");
    for (const Json& item : *list->array()) add(item);
    return;
  }
  if (type == "ByteLevel") {
    step.type = Step::byte_level;
  } else if (type == "ByteFallback") {
    step.type = Step::byte_fallback;
  } else if (type == "Fuse") {
    step.type = Step::fuse;
  } else if (type == "Replace") {
    step.type = Step::replace;
    const Json* pattern = spec.find("pattern");
    step.from = pattern ? pattern->text("String") : "", step.to = spec.text("content");
    if (step.from.empty()) unknown("a decoder with a Replace by an unknown pattern");
  } else if (type == "Strip") {
    step.type = Step::strip;
    step.from = spec.text("content"), step.left = number_of(spec, "start"), step.right = number_of(spec, "stop");
    if (step.from.empty()) unknown("a decoder with a Strip of nothing");
  } else if (type == "Metaspace") {
    step.type = Step::metaspace;
    step.from = spec.text("replacement");
    std::string scheme = spec.text("prepend_scheme");
    step.keeps_first = scheme == "never" || (scheme.empty() && !spec.flag("add_prefix_space", true));
    if (step.from.empty()) unknown("a decoder with a Metaspace without a character");
  } else {
    unknown("a decoder with the step " + type.substr(0, 40));
  }
  steps_.push_back(std::move(step));
}

std::vector<std::string> Decoder::apply(const Step& step, std::vector<std::string> tokens) {
  std::string all;
  switch (step.type) {
    case Step::byte_level:
      for (const std::string& token : tokens) all += bytes_of(token);
      return {sound(all)};
    case Step::fuse:
      for (const std::string& token : tokens) all += token;
      return {all};
    case Step::byte_fallback: return joined_bytes(tokens);
    case Step::replace:
      for (std::string& token : tokens) token = replaced(token, step.from, step.to);
      return tokens;
    case Step::strip:
      for (std::string& token : tokens) token = cut(token, step.from, step.left, step.right);
      return tokens;
    case Step::metaspace:
      for (size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = replaced<std::string>(tokens[i], step.from, i == 0 && !step.keeps_first ? "" : " ");
      return tokens;
  }
  return tokens;
}

std::string Decoder::operator()(std::vector<std::string> tokens) const {
  std::string out;
  for (const Step& step : steps_) tokens = apply(step, std::move(tokens));
  for (size_t i = 0; i < tokens.size(); ++i) out += (none_ && i ? " " : "") + tokens[i];
  return out;
}

}  // namespace vtxcore
