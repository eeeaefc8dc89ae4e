// Byte-pair encoding: the vocabulary, the merges, and the ids of one word.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/json.hpp"
#include "base/tensors.hpp"

namespace vtxcore {

class Bpe {
 public:
  // `model` of a tokenizer.json. Throws Error(bundle) for another kind or damaged tables.
  explicit Bpe(const Json& model);

  // Appends the ids of a word of UTF-8. `banned` tokens do not arise.
  void encode(const std::string& word, const std::set<int64_t>* banned, Ids& out) const;

  int64_t id_of(const std::string& token) const;
  const std::string& token(int64_t id) const;  // empty where unknown
  bool known(int64_t id) const { return tokens_.count(id) > 0; }
  bool is_byte(int64_t id) const { return bytes_.count(id) > 0; }
  const std::string& unk_token() const { return unk_; }

 private:
  struct Merge {
    uint32_t rank;
    int64_t id;
  };
  void read_merges(const Json& merges);
  Ids symbols(const std::string& word, const std::set<int64_t>* banned) const;
  const Merge* merge_of(int64_t left, int64_t right) const;

  std::unordered_map<std::string, int64_t> ids_;
  std::unordered_map<int64_t, std::string> tokens_;
  std::unordered_map<uint64_t, Merge> merges_;
  std::set<int64_t> bytes_;
  std::string unk_, suffix_;  // `suffix_` marks the last character of a word
  int64_t unk_id_ = -1;
  bool fuse_unk_ = false, byte_fallback_ = false, ignore_merges_ = false;
};

}  // namespace vtxcore
