// From a conversation to token ids as the model's own processor makes them, and from ids back to text.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"
#include "prompt/template.hpp"
#include "prompt/thoughts.hpp"
#include "prompt/tokenizer.hpp"
#include "vision/tokens.hpp"

namespace vtxcore {

// Safe for many threads. Throws Error(bundle) where tokenizer and settings do not fit together.
class Text {
 public:
  explicit Text(const Bundle& bundle);

  // Token ids of the conversation with `images` in their places, one image token for each that is not among them. Special
  // tokens that stand in the messages are text. Throws Error(request), Error(context), Error(templates), Error(bundle).
  // `thinking`: with or without a thought before the answer.
  Ids prompt(const std::vector<Message>& messages, std::vector<MarkedImage> images, std::optional<bool> thinking = {}) const;
  // The order in which the template prints the images and videos of messages: their numbers there, from 0.
  Ids order(const std::vector<Message>& messages) const;
  // The ids that stand for image `at` of a prompt, those of text among its tokens too.
  Ids image_ids(const MarkedImage& image, size_t at) const;
  std::string decode(const Ids& ids) const { return tokenizer_.decode(ids); }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  // Whether an id is a special token, which has no text.
  bool hidden(int64_t id) const { return tokenizer_.special(id); }
  // True if answers usually begin with a space, which the template prints or the tokenizer adds.
  bool may_begin_with_space() const;
  // Token ids of each of these answers behind a prompt, as the template prints earlier ones, without an end token.
  std::vector<Ids> answer_ids(const std::vector<std::string>& answers) const;
  // Throws Error(request) for a thought that is switched on or off, or limited, where the template has no way to.
  void check_thinking(std::optional<bool> thinking, bool limited) const;
  // The divider of an answer behind the prompt `ids`; none where it can have no thought of its own.
  std::optional<ThoughtDivider> thoughts(const Ids& ids) const;
  // The ids of the mark that ends a thought; only where there are thoughts.
  Ids thought_end() const;
  // Special tokens that are marks of thoughts, and their texts.
  const std::map<int64_t, std::string>& marks() const { return marks_; }

 private:
  // The end of a prompt as text, and whether the template prints a space between it and an answer.
  std::pair<std::string, bool> before_answer() const;
  Ids expanded(const Ids& ids, const Ids& spans) const;
  std::string with_marks(const std::string& rendered, const std::vector<MarkedImage>& images) const;
  Ids printed_ids(const std::vector<Message>& messages, const std::vector<MarkedImage>& images,
                  std::optional<bool> thinking = {}) const;
  bool is_picture(int64_t id) const { return id == m_.text.image_token_id || id == m_.text.video_token_id; }
  void check_printed(const Ids& ids, const std::vector<Message>& messages) const;
  void check_length(const std::vector<Message>& messages, std::optional<bool> thinking) const;

  const Manifest& m_;
  Tokenizer tokenizer_;
  ChatTemplate template_;
  std::set<int64_t> control_;
  const ThoughtForm* thought_form_;  // null: answers have no thoughts of their own
  std::map<int64_t, std::string> marks_;
};

// Text of one answer, token by token: never half a character, and together what `Text::decode` gives.
class Detokenizer {
 public:
  explicit Detokenizer(const Text& text) : text_(text) {}
  // Marks of thoughts have a text, or, as other special tokens, none.
  void show_marks(bool shown) { shows_marks_ = shown; }
  std::string push(int64_t id);  // the text that is certain with one more token, maybe none
  std::string finish();          // the rest, with U+FFFD where a character stayed incomplete

 private:
  const Text& text_;
  Ids window_;  // ids since the last but one piece: the older ones give the decoder its context
  size_t context_ = 0;
  std::string shown_;  // the text of the context
  bool shows_marks_ = false;
};

// The text of an answer as it is shown: no leading space, nothing of a stop string. A piece that may begin a stop string
// waits until that is settled. `divider` takes a thought out of it.
class TextOutput {
 public:
  TextOutput(const Text& text, std::vector<std::string> stops, std::optional<ThoughtDivider> divider = {})
      : detokenizer_(text), stops_(std::move(stops)), divider_(std::move(divider)) {
    detokenizer_.show_marks(divider_.has_value());
  }
  std::string push(int64_t id) { return show(divided(detokenizer_.push(id), false), false); }
  std::string finish() { return show(divided(detokenizer_.finish(), true), true); }
  // Null: there is none.
  const ThoughtDivider* divider() const { return divider_ ? &*divider_ : nullptr; }
  const std::string& text() const { return shown_; }
  bool stopped() const { return stopped_; }

 private:
  std::string divided(const std::string& piece, bool last);
  std::string show(const std::string& piece, bool last);
  Detokenizer detokenizer_;
  std::vector<std::string> stops_;
  std::optional<ThoughtDivider> divider_;
  std::string waiting_, shown_;
  bool begun_ = false, stopped_ = false;
};

}  // namespace vtxcore
