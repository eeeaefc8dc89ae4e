#include "prompt/tokenizer.hpp"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "prompt/bpe.hpp"
#include "prompt/pieces.hpp"
#include "prompt/unicode.hpp"

namespace vtxcore {
namespace {

struct Added {
  int64_t id;
  std::string content;
  bool special, normalized, lstrip, rstrip;
};

const Json& need(const Json& spec, const char* key) {
  const Json* found = spec.find(key);
  if (!found) damaged(cat(key, " is missing"));
  return *found;
}

// Added tokens by their first byte, the longest first.
class Matcher {
 public:
  void add(const std::string& text, const Added* token) {
    if (text.empty()) return;
    auto& list = by_byte_[static_cast<unsigned char>(text[0])];
    list.emplace_back(text, token);
    std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
  }

  const Added* at(std::string_view text, size_t where, const std::set<int64_t>* banned, size_t& length) const {
    auto found = by_byte_.find(static_cast<unsigned char>(text[where]));
    if (found == by_byte_.end()) return nullptr;
    for (const auto& [content, token] : found->second) {
      if (text.compare(where, content.size(), content) != 0 || (banned && banned->count(token->id))) continue;
      length = content.size();
      return token;
    }
    return nullptr;
  }

 private:
  std::map<unsigned char, std::vector<std::pair<std::string, const Added*>>> by_byte_;
};

// A stretch of text: an added token, or what stands between.
struct Stretch {
  size_t begin, end;
  const Added* token;
};

std::vector<Stretch> cut(std::string_view text, const Matcher& matcher, const std::set<int64_t>* banned) {
  std::vector<Stretch> out;
  size_t start = 0, at = 0;
  while (at < text.size()) {
    size_t length = 0;
    const Added* token = matcher.at(text, at, banned, length);
    if (!token) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + length;
    if (token->lstrip) begin = start + strip(text.substr(start, at - start), false, true).size();
    if (token->rstrip) end = text.size() - strip(text.substr(end), true, false).size();
    if (begin > start) out.push_back({start, begin, nullptr});
    out.push_back({begin, end, token});
    start = at = end;
  }
  if (start < text.size()) out.push_back({start, text.size(), nullptr});
  return out;
}

}  // namespace

struct Tokenizer::Data {
  explicit Data(const Json& spec)
      : bpe(need(spec, "model")), normalizer(spec.find("normalizer")), pre_tokenizer(spec.find("pre_tokenizer")),
        decoder(spec.find("decoder")) {
    const Json* list = spec.find("added_tokens");
    if (list && list->array())
      for (const Json& item : *list->array()) add(item);
    read_wrapping(spec.find("post_processor"));
    for (const auto& [id, token] : added) {
      bool apart = token.normalized && !normalizer.empty();
      (apart ? normalized : raw).add(apart ? encode_utf8(normalizer(decode_utf8(token.content))) : token.content, &token);
    }
  }

  // CLIP's post-processor; others are the prompt's business, which the manifest describes.
  void read_wrapping(const Json* spec) {
    if (!spec || spec->text("type") != "RobertaProcessing") return;
    for (const char* side : {"cls", "sep"}) {
      const Json::Array* pair = need(*spec, side).array();
      if (!pair || pair->size() != 2 || !(*pair)[1].integer()) damaged(cat(side, " is not a token and its id"));
      wrapping.push_back(*(*pair)[1].integer());
    }
  }

  void add(const Json& item) {
    const Json &id = need(item, "id"), &content = need(item, "content");
    if (!id.integer() || *id.integer() < 0 || !content.string()) damaged("an added token has no id or text");
    if (item.flag("single_word")) unknown("the added token '" + content.string()->substr(0, 40) + "' as a single word");
    added[*id.integer()] = {*id.integer(),           *content.string(),   item.flag("special"),
                            item.flag("normalized"), item.flag("lstrip"), item.flag("rstrip")};
    by_content[*content.string()] = *id.integer();
  }

  // The ids of a stretch without non-normalized added tokens.
  void encode_plain(std::string_view text, size_t at, const EncodeOptions& options, std::vector<TokenAt>& out) const {
    std::string normal = normalizer.empty() ? std::string(text) : encode_utf8(normalizer(decode_utf8(text)));
    for (const Stretch& stretch : cut(normal, normalized, options.banned)) {
      if (stretch.token) {
        // Offsets into the original text are known only where normalizing changed nothing.
        bool same = normal == text;
        out.push_back({stretch.token->id, at + (same ? stretch.begin : 0), at + (same ? stretch.end : text.size())});
        continue;
      }
      Ids ids;
      bool start = options.at_start && at == 0 && stretch.begin == 0;
      Codes codes = decode_utf8(std::string_view(normal).substr(stretch.begin, stretch.end - stretch.begin));
      for (const std::string& word : pre_tokenizer(codes, start)) bpe.encode(word, options.banned, ids);
      for (int64_t id : ids) out.push_back({id, at, at});
    }
  }

  Bpe bpe;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Decoder decoder;
  std::map<int64_t, Added> added;
  std::unordered_map<std::string, int64_t> by_content;
  Matcher raw, normalized;
  Ids wrapping;  // the ids before and after a text, where there is a post-processor that puts them
};

Tokenizer::Tokenizer(const std::string& json)
    : data_(std::make_unique<Data>(parse_json(json, "tokenizer.json", Kind::bundle))) {}

Tokenizer::~Tokenizer() = default;

std::vector<TokenAt> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::vector<TokenAt> out;
  for (const Stretch& stretch : cut(text, data_->raw, options.banned)) {
    if (stretch.token)
      out.push_back({stretch.token->id, stretch.begin, stretch.end});
    else
      data_->encode_plain(text.substr(stretch.begin, stretch.end - stretch.begin), stretch.begin, options, out);
  }
  return out;
}

Ids Tokenizer::encode_wrapped(std::string_view text) const {
  check_wrapped();
  Ids out{data_->wrapping.front()};
  for (const TokenAt& token : encode(text)) out.push_back(token.id);
  out.push_back(data_->wrapping.back());
  return out;
}

void Tokenizer::check_wrapped() const {
  if (data_->wrapping.empty()) unknown("no post-processor as CLIP's", "export the bundle without --text-tower");
}

std::string Tokenizer::decode(const Ids& ids) const {
  std::vector<std::string> tokens;
  for (int64_t id : ids)
    if (known(id) && !special(id)) tokens.push_back(token(id));
  return data_->decoder(std::move(tokens));
}

std::string Tokenizer::normalized(std::string_view text) const { return encode_utf8(data_->normalizer(decode_utf8(text))); }

bool Tokenizer::has_normalizer() const { return !data_->normalizer.empty(); }

bool Tokenizer::known(int64_t id) const { return data_->added.count(id) > 0 || data_->bpe.known(id); }

bool Tokenizer::special(int64_t id) const {
  auto found = data_->added.find(id);
  return found != data_->added.end() && found->second.special;
}

bool Tokenizer::is_byte(int64_t id) const { return data_->bpe.is_byte(id); }

const std::string& Tokenizer::token(int64_t id) const {
  const std::string& content = added(id);
  return content.empty() ? data_->bpe.token(id) : content;
}

int64_t Tokenizer::id_of(const std::string& token) const {
  auto found = data_->by_content.find(token);
  return found == data_->by_content.end() ? data_->bpe.id_of(token) : found->second;
}

const std::string& Tokenizer::added(int64_t id) const {
  static const std::string kNone;
  auto found = data_->added.find(id);
  return found == data_->added.end() ? kNone : found->second.content;
}

std::string Tokenizer::unk_token() const { return data_->bpe.unk_token(); }

}  // namespace vtxcore
