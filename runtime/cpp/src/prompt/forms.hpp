// A conversation as text by the manifest's prompt forms.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bundle/manifest.hpp"

namespace vtxcore {

struct Part {
  bool image;
  std::string text;
};

// One turn: role "system", "user" or "assistant", parts in the order they are to be read.
struct Message {
  std::string role;
  std::vector<Part> parts;
  std::string text() const;
};

// The number of images. Throws Error(request) for what cannot be asked.
size_t check_messages(const std::vector<Message>& messages);

// The conversation as text; none where the forms do not cover it.
std::optional<std::string> render_forms(const PromptForms& forms, const std::vector<Message>& messages, bool reply);

}  // namespace vtxcore
