// Text cut into words, each of which is encoded by itself: by one of the known regular expressions, or at spaces.
#include <algorithm>
#include <array>
#include <map>

#include "prompt/pieces.hpp"
#include "prompt/unicode.hpp"

namespace vtxcore {
namespace {

constexpr char kQwen2[] =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// Qwen3.5's, whose words have marks as letters.
constexpr char kQwen35[] =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr char kLlama3[] =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr char kGpt2[] = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// CLIP's, before and since its special tokens stand in it; what matches is kept, all else dropped. Special tokens never
// come here but in capitals, which are lower case by then; the rest of the expression cuts them as byte level does.
constexpr char kClip[] = R"('s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+)";
constexpr char kClipSpecial[] =
    R"(<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+)";

// Where matches of the expressions end, all by hand: what a regular expression engine would find.
class Cutter {
 public:
  Cutter(const Codes& text, Words words) : text_(text), words_(words) {}

  size_t end_of(size_t at) const {
    bool gpt2 = words_ == Words::gpt2, clip = words_ == Words::clip;
    if (words_ == Words::spaces) return behind_space(at);
    if (size_t end = contraction(at, !gpt2 && !clip); end > at) return end;
    if (clip) return letter(at) ? run(at, &Cutter::letter) : number(at) ? at + 1 : run(at, &Cutter::other);
    if (gpt2) {
      size_t from = at + (text_[at] == ' ' && at + 1 < text_.size() ? 1 : 0);
      if (letter(from)) return run(from, &Cutter::letter);
      if (number(from)) return run(from, &Cutter::number);
      if (other(from)) return run(from, &Cutter::other);
      return spaces(at);
    }
    if (letter(at)) return run(at, &Cutter::letter);
    if (!line(at) && !number(at) && letter(at + 1)) return run(at + 1, &Cutter::letter);
    if (number(at)) {
      size_t end = at + 1, most = at + (words_ == Words::llama3 ? 3 : 1);
      while (end < most && number(end)) ++end;
      return end;
    }
    size_t from = at + (text_[at] == ' ' ? 1 : 0);
    if (other(from)) return run(run(from, &Cutter::other), &Cutter::line);
    size_t end = run(at, &Cutter::space), last = end;
    while (last > at && !line(last - 1)) --last;
    return last > at ? last : spaces(at);
  }

 private:
  bool letter(size_t i) const {
    return i < text_.size() && (is_letter(text_[i]) || (words_ == Words::qwen35 && is_mark(text_[i])));
  }
  bool number(size_t i) const { return i < text_.size() && is_number(text_[i]); }
  bool space(size_t i) const { return i < text_.size() && is_white_space(text_[i]); }
  bool line(size_t i) const { return i < text_.size() && (text_[i] == '\r' || text_[i] == '\n'); }
  bool other(size_t i) const { return i < text_.size() && !space(i) && !letter(i) && !number(i); }

  size_t run(size_t at, bool (Cutter::*is)(size_t) const) const {
    while ((this->*is)(at)) ++at;
    return at;
  }

  // Up to the next space, and with it; a space behind another one is a word by itself.
  size_t behind_space(size_t at) const {
    const size_t space = std::min(text_.find(U' ', at), text_.size());
    return space == text_.size() ? space : space + 1;
  }

  // \s+(?!\S)|\s+: all spaces, but for the last one where something follows; one alone stays.
  size_t spaces(size_t at) const {
    size_t end = run(at, &Cutter::space);
    return end < text_.size() && end - at > 1 ? end - 1 : std::max(end, at + 1);
  }

  char32_t folded(size_t i, bool any_case) const {
    char32_t code = i < text_.size() ? text_[i] : 0;
    if (!any_case) return code;
    if (code == 0x17F) return 's';  // the long s, which folds to s
    return code >= 'A' && code <= 'Z' ? code + 32 : code;
  }

  size_t contraction(size_t at, bool any_case) const {
    if (text_[at] != '\'') return at;
    char32_t first = folded(at + 1, any_case), second = folded(at + 2, any_case);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l')) return at + 3;
    return at;
  }

  const Codes& text_;
  Words words_;
};

}  // namespace

const std::array<char32_t, 256>& byte_characters() {
  static const std::array<char32_t, 256> kTable = [] {
    std::array<char32_t, 256> table{};
    char32_t next = 256;
    for (char32_t byte = 0; byte < 256; ++byte) {
      bool shown = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      table[byte] = shown ? byte : next++;
    }
    return table;
  }();
  return kTable;
}

namespace {

std::string byte_level(const std::string& word) {
  std::string out;
  for (char byte : word) append_utf8(out, byte_characters()[static_cast<unsigned char>(byte)]);
  return out;
}

}  // namespace

PreTokenizer::PreTokenizer(const Json* spec) {
  if (spec && !spec->is_null()) add(*spec);
}

void PreTokenizer::add(const Json& spec) {
  std::string type = spec.text("type");
  if (metaspace_ || byte_level_) unknown("words cut by several steps in an order");
  if (type == "Sequence") {
    const Json* list = spec.find("pretokenizers");
    if (!list || !list->array()) unknown("words cut by a Sequence of nothing");
    for (const Json& item : *list->array()) add(item);
  } else if (type == "ByteLevel") {
    byte_level_ = true;
    space_before_ = spec.flag("add_prefix_space", true);
    if (words_ == Words::clip && space_before_) unknown("words cut by a space before each word");
    if (spec.flag("use_regex", true) && words_ != Words::clip) {  // of CLIP's words it leaves each as it is
      if (words_ != Words::none) unknown("words cut by two regular expressions");
      words_ = Words::gpt2;
    } else if (space_before_ && words_ != Words::none) {
      unknown("words cut by a space before each word");
    }
  } else if (type == "Split" && words_ == Words::none) {
    const Json* pattern = spec.find("pattern");
    std::string regex = pattern ? pattern->text("Regex") : "";
    if (spec.text("behavior") == "Removed" && spec.flag("invert") && (regex == kClip || regex == kClipSpecial)) {
      words_ = Words::clip;
      return;
    }
    if (spec.text("behavior") == "MergedWithPrevious" && !spec.flag("invert") && pattern && pattern->text("String") == " ") {
      words_ = Words::spaces;  // Gemma's, whose normalizer leaves no space
      return;
    }
    if (spec.text("behavior") != "Isolated" || spec.flag("invert")) unknown("words cut by a Split that drops or joins");
    static const std::map<std::string, Words> kKnown{
        {kQwen2, Words::qwen2}, {kQwen35, Words::qwen35}, {kLlama3, Words::llama3}, {kGpt2, Words::gpt2}};
    auto known = kKnown.find(regex);
    words_ = known == kKnown.end() ? Words::none : known->second;
    if (words_ == Words::none) unknown("words cut by the expression " + regex.substr(0, 200));
  } else if (type == "Metaspace" && words_ == Words::none) {
    metaspace_ = true;
    Codes mark = decode_utf8(spec.text("replacement"));
    if (mark.size() != 1) unknown("words cut by a Metaspace without a character");
    replacement_ = mark[0];
    std::string scheme = spec.text("prepend_scheme");
    if (scheme.empty()) scheme = spec.flag("add_prefix_space", true) ? "always" : "never";
    scheme_ = scheme == "first" ? first : scheme == "never" ? never : always;
    metaspace_split_ = spec.flag("split", true);
  } else {
    unknown("words cut by the step " + type.substr(0, 40));
  }
}

std::vector<std::string> PreTokenizer::operator()(const Codes& text, bool start) const {
  std::vector<std::string> out;
  if (text.empty()) return out;
  if (metaspace_) {
    Codes marked = text;
    for (char32_t& code : marked)
      if (code == ' ') code = replacement_;
    bool prepend = scheme_ == always || (scheme_ == first && start);
    if (prepend && marked[0] != replacement_) marked.insert(marked.begin(), replacement_);
    size_t begin = 0;
    for (size_t i = 1; metaspace_split_ && i < marked.size(); ++i)
      if (marked[i] == replacement_) {
        out.push_back(encode_utf8(marked.substr(begin, i - begin)));
        begin = i;
      }
    out.push_back(encode_utf8(marked.substr(begin)));
    return out;
  }
  Codes spaced = space_before_ && text[0] != ' ' ? U' ' + text : text;
  Cutter cutter(spaced, words_);
  for (size_t at = 0; at < spaced.size();) {
    if (words_ == Words::clip && is_white_space(spaced[at])) {
      ++at;
      continue;
    }
    size_t end = words_ == Words::none ? spaced.size() : cutter.end_of(at);
    std::string word = encode_utf8(spaced.substr(at, end - at));
    out.push_back(byte_level_ ? byte_level(word) : word);
    at = end;
  }
  return out;
}

}  // namespace vtxcore
