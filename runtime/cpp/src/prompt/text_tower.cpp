#include "prompt/text_tower.hpp"

#include <algorithm>

namespace vtxcore {
namespace {

// Which of `ids` stands for them all: the first end token, else the first token; without one the highest id.
size_t pooled(const Ids& ids, const std::optional<int64_t>& end_id) {
  auto found = end_id ? std::find(ids.begin(), ids.end(), *end_id) : std::max_element(ids.begin(), ids.end());
  return found == ids.end() ? 0 : static_cast<size_t>(found - ids.begin());
}

bool has_image(const Message& message) {
  return std::any_of(message.parts.begin(), message.parts.end(), [](const Part& part) { return part.image; });
}

// The number of the message that asks about the last image, and its text; as many as there are where none does.
std::pair<size_t, std::string> asking(const std::vector<Message>& messages) {
  auto last = std::find_if(messages.rbegin(), messages.rend(), has_image);
  auto number = static_cast<size_t>(messages.rend() - last);
  for (number = number ? number - 1 : messages.size(); number < messages.size(); ++number) {
    if (messages[number].role != "user") continue;
    std::string text;
    bool first = true;
    for (const Part& part : messages[number].parts) {
      if (part.image) continue;
      text += (first ? "" : " ") + part.text;
      first = false;
    }
    if (!strip(text, true, true).empty()) return {number, text};
  }
  return {number, ""};
}

}  // namespace

TextTower::TextTower(const Bundle& bundle, Backend& backend)
    : spec_(bundle.manifest().text_tower.value()), tokenizer_(bundle.read(spec_.tokenizer, names::kMaxTokenizer)),
      backend_(backend) {
  tokenizer_.check_wrapped();
}

Rows TextTower::embed(const std::string& text) {
  std::lock_guard<std::mutex> lock(lock_);
  if (!last_ || last_->first != text) {
    Rows out;
    out.width = static_cast<size_t>(spec_.width);
    for (const Ids& segment : segments(text)) {
      Floats vector = backend_.text_tower(segment);
      out.data.insert(out.data.end(), vector.begin(), vector.end());
    }
    last_.emplace(text, std::move(out));
  }
  return last_->second;
}

// The ids of each segment up to the one that stands for it; later ones are hidden from it anyway.
std::vector<Ids> TextTower::segments(const std::string& text) const {
  Ids ids = tokenizer_.encode_wrapped(text);
  auto most = std::max_element(ids.begin(), ids.end());
  if (most == ids.end() || *most >= spec_.vocab)
    fail(Kind::bundle, spec_.tokenizer, " gives token ", most == ids.end() ? -1 : *most, ", the text tower has ",
         grouped(spec_.vocab), " tokens, numbered from 0; export again with the tokenizer that belongs to it");
  std::vector<Ids> out;
  auto step = static_cast<size_t>(spec_.max_tokens);
  for (size_t start = 0; start < ids.size(); start += step) {
    Ids part(ids.begin() + static_cast<std::ptrdiff_t>(start),
             ids.begin() + static_cast<std::ptrdiff_t>(std::min(ids.size(), start + step)));
    part.resize(pooled(part, spec_.end_id) + 1);
    out.push_back(std::move(part));
  }
  return out;
}

std::string asked_text(const std::vector<Message>& messages) { return asking(messages).second; }

std::vector<Message> asking_about(std::vector<Message> messages, const std::string& about) {
  size_t number = asking(messages).first;
  if (number == messages.size()) return messages;
  messages.resize(number + 1);
  std::vector<Part> parts;
  bool first = true;
  for (const Part& part : messages.back().parts) {
    if (part.image || first) parts.push_back(part.image ? part : Part{false, about});
    first &= part.image;
  }
  messages.back().parts = std::move(parts);
  return messages;
}

}  // namespace vtxcore
