// A question as CLIP's text tower sees it: its own ids, in segments, to one vector a segment.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "backends/backend.hpp"
#include "bundle/bundle.hpp"
#include "prompt/template.hpp"
#include "prompt/tokenizer.hpp"

namespace vtxcore {

// The tokenizer and the graph of a bundle's text tower; safe for many threads.
class TextTower {
 public:
  // Throws Error(bundle) for a tokenizer of another kind than CLIP's.
  TextTower(const Bundle& bundle, Backend& backend);
  // One vector [width] for each segment of the text. Throws Error(bundle) for ids that the tower does not have.
  Rows embed(const std::string& text);

 private:
  std::vector<Ids> segments(const std::string& text) const;

  const TextTowerSpec spec_;
  Tokenizer tokenizer_;
  Backend& backend_;
  std::mutex lock_;
  std::optional<std::pair<std::string, Rows>> last_;  // a chat asks for its first question at every turn
};

// What was asked about the last image: the user's text in its message, else in the first one after it. It is the same at
// every turn of a chat. Empty where no image stands in the messages.
std::string asked_text(const std::vector<Message>& messages);

// The messages up to that question, with `about` in its place.
std::vector<Message> asking_about(std::vector<Message> messages, const std::string& about);

}  // namespace vtxcore
