#include "prompt/bpe.hpp"

#include <cstdio>
#include <queue>

#include "prompt/pieces.hpp"

namespace vtxcore {
namespace {

std::string byte_token(unsigned char byte) {
  char text[8];
  std::snprintf(text, sizeof text, "<0x%02X>", byte);
  return text;
}

uint64_t pair_key(int64_t left, int64_t right) { return static_cast<uint64_t>(left) << 32 | static_cast<uint64_t>(right); }

size_t character_length(unsigned char lead) { return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4; }

}  // namespace

Bpe::Bpe(const Json& model) {
  const Json *vocab = model.find("vocab"), *merges = model.find("merges");
  if (model.text("type") != "BPE") unknown("a model other than BPE");
  if (!model.text("continuing_subword_prefix").empty()) unknown("BPE with a continuing_subword_prefix");
  suffix_ = model.text("end_of_word_suffix");
  if (const Json* dropout = model.find("dropout"); dropout && !dropout->is_null()) unknown("BPE with dropout");
  if (!vocab || !vocab->object() || !merges || !merges->array()) damaged("it has no vocabulary or no merges");
  for (const auto& [token, id] : *vocab->object()) {
    if (!id.integer() || *id.integer() < 0 || *id.integer() > INT32_MAX) damaged("a token has no id");
    ids_.emplace(token, *id.integer());
    tokens_.emplace(*id.integer(), token);
  }
  fuse_unk_ = model.flag("fuse_unk"), byte_fallback_ = model.flag("byte_fallback");
  ignore_merges_ = model.flag("ignore_merges");
  if (const Json* unk = model.find("unk_token"); unk && unk->string()) unk_ = *unk->string(), unk_id_ = id_of(unk_);
  for (int byte = 0; byte < 256; ++byte)
    if (int64_t id = id_of(byte_token(static_cast<unsigned char>(byte))); id >= 0) bytes_.insert(id);
  read_merges(*merges);
}

void Bpe::read_merges(const Json& merges) {
  uint32_t rank = 0;
  for (const Json& item : *merges.array()) {
    std::string left, right;
    const Json::Array* pair = item.array();
    if (item.string()) {
      size_t space = item.string()->find(' ');
      if (space != std::string::npos) left = item.string()->substr(0, space), right = item.string()->substr(space + 1);
    } else if (pair && pair->size() == 2 && (*pair)[0].string() && (*pair)[1].string()) {
      left = *(*pair)[0].string(), right = *(*pair)[1].string();
    }
    int64_t a = id_of(left), b = id_of(right), made = id_of(left + right);
    if (a < 0 || b < 0 || made < 0) damaged(cat("merge ", rank, " names a token that is not there"));
    merges_[pair_key(a, b)] = {rank++, made};
  }
}

int64_t Bpe::id_of(const std::string& token) const {
  auto found = ids_.find(token);
  return found == ids_.end() ? -1 : found->second;
}

const std::string& Bpe::token(int64_t id) const {
  static const std::string kNone;
  auto found = tokens_.find(id);
  return found == tokens_.end() ? kNone : found->second;
}

const Bpe::Merge* Bpe::merge_of(int64_t left, int64_t right) const {
  auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

// The ids of single characters, or of their bytes, or unknown.
Ids Bpe::symbols(const std::string& word, const std::set<int64_t>* banned) const {
  Ids out;
  bool unknown = false;  // the last symbol, which the next unknown one may join
  for (size_t at = 0; at < word.size();) {
    size_t length = character_length(static_cast<unsigned char>(word[at]));
    std::string character = word.substr(at, length);
    at += length;
    if (at >= word.size()) character += suffix_;
    int64_t id = id_of(character);
    if (id >= 0 && !(banned && banned->count(id))) {
      out.push_back(id);
      unknown = false;
      continue;
    }
    Ids bytes;
    if (byte_fallback_)
      for (char byte : character)
        if (int64_t found = id_of(byte_token(static_cast<unsigned char>(byte))); found >= 0) bytes.push_back(found);
    if (bytes.size() == character.size()) {
      out.insert(out.end(), bytes.begin(), bytes.end());
      unknown = false;
    } else if (unk_id_ >= 0) {
      if (!(unknown && fuse_unk_)) out.push_back(unk_id_);
      unknown = true;
    }
  }
  return out;
}

void Bpe::encode(const std::string& word, const std::set<int64_t>* banned, Ids& out) const {
  if (ignore_merges_)
    if (int64_t id = id_of(word); id >= 0 && !(banned && banned->count(id))) {
      out.push_back(id);
      return;
    }
  Ids ids = symbols(word, banned);
  struct Candidate {
    uint32_t rank;
    size_t left;
    int64_t id;
    bool operator>(const Candidate& o) const { return rank != o.rank ? rank > o.rank : left > o.left; }
  };
  // Symbols form a chain; the merge of the lowest rank is done first, of equal ones the leftmost.
  constexpr size_t kEnd = static_cast<size_t>(-1);
  std::vector<size_t> before(ids.size()), after(ids.size());
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  auto propose = [&](size_t left) {
    if (left == kEnd || after[left] == kEnd) return;
    const Merge* merge = merge_of(ids[left], ids[after[left]]);
    if (merge && !(banned && banned->count(merge->id))) queue.push({merge->rank, left, merge->id});
  };
  for (size_t i = 0; i < ids.size(); ++i) before[i] = i ? i - 1 : kEnd, after[i] = i + 1 < ids.size() ? i + 1 : kEnd;
  for (size_t i = 0; i < ids.size(); ++i) propose(i);
  while (!queue.empty()) {
    Candidate next = queue.top();
    queue.pop();
    size_t right = ids[next.left] < 0 ? kEnd : after[next.left];
    if (right == kEnd) continue;
    const Merge* merge = merge_of(ids[next.left], ids[right]);
    if (!merge || merge->id != next.id) continue;  // one of both has become another token since
    ids[next.left] = next.id;
    ids[right] = -1;
    after[next.left] = after[right];
    if (after[right] != kEnd) before[after[right]] = next.left;
    propose(before[next.left]);
    propose(next.left);
  }
  for (int64_t id : ids)
    if (id >= 0) out.push_back(id);
}

}  // namespace vtxcore
