#include "prompt/thoughts.hpp"

#include <algorithm>

#include "base/utf8.hpp"

namespace vtxcore {
namespace {

bool begins(const std::string& text, const std::string& beginning) {
  return text.compare(0, beginning.size(), beginning) == 0;
}

}  // namespace

const ThoughtForm* thought_form(const std::string& source) {
  // Qwen3.5's and MiniCPM-V's, then Gemma 4's.
  static const std::vector<ThoughtForm> kForms{{"<think>", "</think>"}, {"<|channel>thought\n", "<channel|>"}};
  for (const ThoughtForm& form : kForms)
    if (source.find(form.end) != std::string::npos) return &form;
  return nullptr;
}

size_t undecided(const std::string& text, const std::vector<std::string>& marks) {
  size_t most = 0;
  for (const std::string& mark : marks)
    for (size_t count = std::min(mark.size() - 1, text.size()); count > most; --count)
      if (text.compare(text.size() - count, count, mark, 0, count) == 0) most = count;
  return most;
}

std::string ThoughtDivider::push(const std::string& piece, bool last) {
  std::string text = waiting_ + piece;
  waiting_.clear();
  if (may_begin_) {
    std::string begun(strip(text, true, false));
    inside_ = begins(begun, form_.begin);
    if (!inside_ && !last && begins(form_.begin, begun)) {
      waiting_ = text;
      return "";
    }
    may_begin_ = false;
    if (inside_) {
      thought_.emplace();
      text = begun.substr(form_.begin.size());
    } else {
      for (const std::string& mark : special_)
        for (size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at)) text.erase(at, mark.size());
    }
  }
  return inside_ ? divided(text, last) : text;
}

// The part of a text in a thought that is behind it.
std::string ThoughtDivider::divided(const std::string& text, bool last) {
  size_t mark = text.find(form_.end);
  bool ends = mark != std::string::npos;
  std::string part = text.substr(0, mark);
  size_t open = ends || last ? 0 : undecided(part, {form_.end});
  std::string certain(strip(std::string_view(part).substr(0, part.size() - open), false, true));
  if (!ends && !last) waiting_ = part.substr(certain.size());
  *thought_ += thought_->empty() ? std::string(strip(certain, true, false)) : certain;
  inside_ = !ends;
  return ends ? text.substr(mark + form_.end.size()) : "";
}

}  // namespace vtxcore
