// Special tokens that a user types stay text.
//
// They are masked before the conversation is rendered: the first character of each becomes a private-use character that
// occurs nowhere else. So whatever is printed around them, the control tokens found in the prompt are its own. Text
// between those is unmasked and encoded without control tokens.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "prompt/template.hpp"
#include "prompt/tokenizer.hpp"

namespace vtxcore {

using Marks = std::map<char32_t, char32_t>;  // the masking character of each character masked

// The messages with control tokens masked; `printed` has every character that the template prints. Throws Error(request).
std::vector<Message> mask(const std::vector<Message>& messages, const Tokenizer& tokenizer, const TextSettings& settings,
                          const std::string& printed, Marks& marks);

// The ids of the prompt's own control tokens in `rendered`, and of the text between them as plain text.
Ids encode_masked(const std::string& rendered, const Marks& marks, const Tokenizer& tokenizer,
                  const std::set<int64_t>& control, const TextSettings& settings);

// The ids of `text` behind the rendered `before`; control tokens in `text` are text.
Ids continuation(const std::string& before, const std::string& text, const Tokenizer& tokenizer,
                 const std::set<int64_t>& control, const TextSettings& settings);

}  // namespace vtxcore
