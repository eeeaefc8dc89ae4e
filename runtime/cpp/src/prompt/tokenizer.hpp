// tokenizer.json of the kinds that LLaVA-type models use: BPE, SentencePiece style with byte fallback, or byte level with
// its regular expression. Anything else is refused by name.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/tensors.hpp"
#include "base/utf8.hpp"
#include "base/json.hpp"

namespace vtxcore {

// An id, and the bytes of the text it was made of where it is an added token; else begin == end.
struct TokenAt {
  int64_t id;
  size_t begin, end;
};

// Which tokens cannot arise, and where a piece of text stands.
struct EncodeOptions {
  const std::set<int64_t>* banned = nullptr;  // control tokens that are to stay text
  bool at_start = true;                       // of the prompt: where "first" prepends a space
};

// Safe for many threads. Throws Error(bundle).
class Tokenizer {
 public:
  explicit Tokenizer(const std::string& json);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Ids of UTF-8 text without what a post-processor adds.
  std::vector<TokenAt> encode(std::string_view text, const EncodeOptions& options = {}) const;
  // Ids of a text with the two tokens that CLIP's post-processor puts around it.
  Ids encode_wrapped(std::string_view text) const;
  // Throws Error(bundle) where there is no such post-processor.
  void check_wrapped() const;
  // Text of ids without special tokens.
  std::string decode(const Ids& ids) const;
  // The normalizer's output, for a bound on the length.
  std::string normalized(std::string_view text) const;

  bool has_normalizer() const;
  bool known(int64_t id) const;
  bool special(int64_t id) const;
  bool is_byte(int64_t id) const;                 // one of <0x00> to <0xFF>
  const std::string& token(int64_t id) const;     // empty where unknown
  int64_t id_of(const std::string& token) const;  // -1 where unknown
  const std::string& added(int64_t id) const;     // the added token's text, empty where it is none
  std::string unk_token() const;

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

}  // namespace vtxcore
