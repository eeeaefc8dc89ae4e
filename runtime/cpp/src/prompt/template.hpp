// A conversation as text, by the bundle's own chat template.
#pragma once

#include <ctime>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bundle/manifest.hpp"

namespace vtxcore {

// A text, or in its place an image or a video.
struct Part {
  bool image;
  std::string text;
  bool video = false;
};

// One turn: role "system", "user" or "assistant", parts in the order they are to be read.
struct Message {
  std::string role;
  std::vector<Part> parts;
  std::string text() const;
};

// The number of images. Throws Error(request) for what cannot be asked.
size_t check_messages(const std::vector<Message>& messages);

// Renders conversations as Python does; safe for many threads. Compiled at the first one, when it also has to give the
// manifest's examples as the export recorded them. Throws Error(templates).
class ChatTemplate {
 public:
  ChatTemplate(std::string source, const TextSettings& settings);
  ~ChatTemplate();
  // `thinking`: the variable enable_thinking, where it is given.
  std::string render(const std::vector<Message>& messages, std::optional<bool> thinking = {}) const;
  const std::string& source() const { return source_; }

 private:
  struct Compiled;
  std::string shaped(const std::vector<Message>& messages, std::time_t now, std::optional<bool> thinking = {}) const;
  void compile() const;

  const std::string source_;
  const TextSettings& settings_;
  mutable std::once_flag once_;
  mutable std::unique_ptr<Compiled> compiled_;
  mutable std::string problem_;  // why it cannot be used
};

}  // namespace vtxcore
