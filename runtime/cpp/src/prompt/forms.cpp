#include "prompt/forms.hpp"

#include <algorithm>

#include "base/utf8.hpp"

namespace vtxcore {
namespace {

bool blank(const std::string& text) { return strip(text, true, true).empty(); }

std::string stripped(const std::string& text, const std::string& side) {
  return std::string(strip(text, side == "left" || side == "both", side == "right" || side == "both"));
}

std::optional<std::string> render_content(const ContentForm& form, const std::vector<Part>& parts) {
  bool all_blank = true, images = false, texts = false;
  for (const Part& part : parts) {
    images |= part.image;
    texts |= !part.image;
    all_blank = all_blank && (part.image || blank(part.text));
  }
  if (!texts || (images && !form.image) || (all_blank && !form.blank)) return std::nullopt;
  std::vector<Part> ordered = parts;
  if (form.images_first) std::stable_partition(ordered.begin(), ordered.end(), [](const Part& part) { return part.image; });
  std::string out;
  for (const Part& part : ordered)
    out += part.image ? *form.image : form.text_before + stripped(part.text, form.strip_text) + form.text_after;
  return stripped(out, form.strip_content);
}

}  // namespace

std::string Message::text() const {
  std::string out;
  for (const Part& part : parts)
    if (!part.image) out += part.text;
  return out;
}

size_t check_messages(const std::vector<Message>& messages) {
  if (messages.empty()) fail(Kind::request, "the conversation is empty; ask a question");
  size_t images = 0, length = 0;
  std::string question;
  for (const Message& message : messages) {
    std::string text = message.text();
    if (first_invalid_utf8(text) != std::string::npos || first_invalid_utf8(message.role) != std::string::npos)
      fail(Kind::request, "the text is not UTF-8; convert it");
    length += length_utf8(text);
    if (message.role == "user") question = text;
    for (const Part& part : message.parts) images += part.image;
  }
  if (length > static_cast<size_t>(names::kMaxText))
    fail(Kind::request, "the conversation has ", grouped(static_cast<long long>(length)), " characters, the limit is ",
         grouped(names::kMaxText), "; shorten it");
  if (blank(question)) fail(Kind::request, "the question is empty; write at least one word");
  return images;
}

std::optional<std::string> render_forms(const PromptForms& forms, const std::vector<Message>& messages, bool reply) {
  std::string out, before = names::kFormStart;
  for (const Message& message : messages) {
    auto join = forms.joins.find(before + ">" + message.role);
    auto form = forms.contents.find(message.role);
    if (join == forms.joins.end() || form == forms.contents.end()) return std::nullopt;
    std::optional<std::string> content = render_content(form->second, message.parts);
    if (!content) return std::nullopt;
    out += join->second + *content;
    before = message.role;
  }
  auto ending = forms.joins.find(before + ">" + (reply ? names::kFormReply : names::kFormEnd));
  if (ending == forms.joins.end()) return std::nullopt;
  return out + ending->second;
}

}  // namespace vtxcore
