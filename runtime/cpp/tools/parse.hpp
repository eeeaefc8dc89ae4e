// Reading one untrusted file of a kind, as the library does: what vtx-cpp-probe and the fuzz targets run.
#pragma once

#include <stdexcept>
#include <string>

#include "bundle/manifest.hpp"
#include "bundle/safetensors.hpp"
#include "prompt/forms.hpp"
#include "prompt/tokenizer.hpp"
#include "vision/layout.hpp"
#include "vision/picture.hpp"

namespace vtxcore {

// Prompt forms and a conversation out of bytes: a byte says how long the next text is, or which choice is taken.
class FormsInput {
 public:
  explicit FormsInput(const std::string& content) : content_(content) {}

  PromptForms forms() {
    PromptForms out;
    for (int left = byte() % 4; left > 0; --left) {
      ContentForm form{text(), text(), std::nullopt, byte() % 2 == 0, side(), side(), byte() % 2 == 0};
      if (byte() % 2 == 0) form.image = text();
      out.contents[role()] = form;
    }
    for (int left = byte() % 12; left > 0; --left) {
      std::string before = byte() % 3 == 0 ? names::kFormStart : role();
      std::string after = byte() % 3 == 0 ? (byte() % 2 == 0 ? names::kFormReply : names::kFormEnd) : role();
      out.joins[before.append(">").append(after)] = text();
    }
    return out;
  }

  std::vector<Message> messages() {
    std::vector<Message> out;
    for (int left = byte() % 6; left > 0; --left) {
      out.push_back({role(), {}});
      for (int parts = byte() % 4; parts > 0; --parts) {
        bool image = byte() % 3 == 0;
        out.back().parts.push_back({image, image ? "" : text()});
      }
    }
    return out;
  }

 private:
  int byte() { return at_ < content_.size() ? static_cast<unsigned char>(content_[at_++]) : 0; }
  std::string text() {
    size_t length = std::min(static_cast<size_t>(byte()), content_.size() - at_);
    at_ += length;
    return content_.substr(at_ - length, length);
  }
  std::string role() {
    static const char* const kRoles[] = {"system", "user", "assistant"};
    int choice = byte() % 4;
    return choice < 3 ? kRoles[choice] : text();
  }
  std::string side() {
    static const char* const kSides[] = {"none", "left", "right", "both"};
    return kSides[byte() % 4];
  }

  const std::string& content_;
  size_t at_ = 0;
};

// Throws Error if the content is refused, and std::runtime_error where the kind is unknown.
inline void parse(const std::string& kind, const std::string& content) {
  if (kind == "manifest") {
    Manifest m = parse_manifest(content);
    read_layout(m.layout, m.model.tower);
  } else if (kind == "safetensors") {
    unpack(content, "the file");
  } else if (kind == "tokenizer") {
    Tokenizer tokenizer(content);
    Ids ids;
    for (const TokenAt& token : tokenizer.encode("A caf\xC3\xA9, <s> 12\n\xF0\x9F\x98\x80  it's")) ids.push_back(token.id);
    tokenizer.decode(ids);
  } else if (kind == "forms") {
    FormsInput input(content);
    PromptForms forms = input.forms();
    std::vector<Message> messages = input.messages();
    render_forms(forms, messages, true);
    render_forms(forms, messages, false);
    check_messages(messages);
  } else if (kind == "image") {
    decode_picture(content, "the image");
  } else {
    throw std::runtime_error("there is no kind " + kind);
  }
}

}  // namespace vtxcore
