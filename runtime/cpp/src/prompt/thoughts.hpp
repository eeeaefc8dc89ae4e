// Thoughts before an answer: the marks around them, and the text of an answer as it comes, divided at these.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace vtxcore {

// The texts that begin and end a thought.
struct ThoughtForm {
  std::string begin, end;
};

// The form whose end mark stands in the source of a chat template; null: the model has no thoughts.
const ThoughtForm* thought_form(const std::string& source);

// The most bytes at the end of a text with which one of these marks may begin.
size_t undecided(const std::string& text, const std::vector<std::string>& marks);

// An answer's text as it comes, divided into a thought and what follows it. A piece that may belong to a mark waits until
// that is known. `special`: marks that are special tokens, which are no text elsewhere.
class ThoughtDivider {
 public:
  ThoughtDivider(const ThoughtForm& form, std::vector<std::string> special, bool inside)
      : form_(form), special_(std::move(special)), inside_(inside), may_begin_(!inside) {
    if (inside) thought_.emplace();
  }
  // The text of the answer that is certain with this piece; `last`: none follows.
  std::string push(const std::string& piece, bool last);
  bool inside() const { return inside_; }
  // False once no mark can follow.
  bool reads_marks() const { return inside_ || may_begin_; }
  const std::optional<std::string>& thought() const { return thought_; }

 private:
  std::string divided(const std::string& text, bool last);

  ThoughtForm form_;
  std::vector<std::string> special_;
  bool inside_, may_begin_;
  std::string waiting_;
  std::optional<std::string> thought_;
};

}  // namespace vtxcore
