// The steps of a tokenizer.json around its model: normalizer, pre-tokenizer, and decoder.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "base/utf8.hpp"

namespace vtxcore {

[[noreturn]] inline void damaged(const std::string& what) {
  fail(Kind::bundle, "tokenizer.json is damaged: ", what, "; export the bundle again");
}

[[noreturn]] inline void unknown(const std::string& what, const char* fix = "give token ids instead") {
  fail(Kind::bundle, "the tokenizer has ", what, ", which libvtx does not know: ", fix);
}

// The character that stands for each byte at byte level, as GPT-2 chose them.
const std::array<char32_t, 256>& byte_characters();

// A text of bytes or of code points with `to` for each `from`.
template <typename Text>
Text replaced(const Text& text, const Text& from, const Text& to) {
  Text out;
  size_t at = 0;
  for (size_t found; (found = text.find(from, at)) != Text::npos; at = found + from.size())
    out.append(text, at, found - at) += to;
  return out.append(text, at, Text::npos);
}

// One step of a normalizer.
struct Normalize {
  enum Type { form, lower, replace, runs, spaces, prepend, strip } type;
  bool compatible = false, composed = false;  // of `form`
  bool left = false, right = false;           // of `strip`
  Codes from, to;                             // of `replace`; of `runs`, from[0] repeated; `prepend` and `spaces` have `to`
  size_t least = 1;                           // of `runs`
};

class Normalizer {
 public:
  explicit Normalizer(const Json* spec);
  Codes operator()(Codes text) const;
  bool empty() const { return steps_.empty(); }

 private:
  void add(const Json& spec);
  std::vector<Normalize> steps_;
};

// Which regular expression cuts text into words; `spaces`: none does, and a word ends behind each space.
enum class Words { none, gpt2, qwen2, qwen35, llama3, clip, spaces };

class PreTokenizer {
 public:
  explicit PreTokenizer(const Json* spec);
  // The words of a normalised text; `start`: it stands at the prompt's start.
  std::vector<std::string> operator()(const Codes& text, bool start) const;

 private:
  void add(const Json& spec);
  Words words_ = Words::none;
  bool byte_level_ = false, space_before_ = false;
  bool metaspace_ = false, metaspace_split_ = false;
  char32_t replacement_ = 0x2581;
  enum { always, first, never } scheme_ = always;
};

class Decoder {
 public:
  explicit Decoder(const Json* spec);
  std::string operator()(std::vector<std::string> tokens) const;

 private:
  struct Step {
    enum Type { byte_level, replace, byte_fallback, fuse, strip, metaspace } type;
    std::string from, to;
    size_t left = 0, right = 0;
    bool keeps_first = false;
  };
  void add(const Json& spec);
  static std::vector<std::string> apply(const Step& step, std::vector<std::string> tokens);
  std::vector<Step> steps_;
  bool none_ = false;
};

}  // namespace vtxcore
