// Questions about the same images, whose part of the caches is computed once and reused.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/model.hpp"

namespace vtxcore {

// `ask` puts independent questions, `chat` turns that build on each other. One answer is computed at a time; a second
// thread is told Error(busy). `cancel` may be called from any thread.
class Conversation {
 public:
  Conversation(std::shared_ptr<const Model> model, std::vector<PreparedImage> images, std::optional<std::string> system);
  // About the same images, beginning with what the other one has of them.
  explicit Conversation(Conversation& other);

  Answer ask(const std::string& question, const Options& options);
  Answer chat(const std::string& question, const Options& options);
  void restart_chat();
  // A prompt in token ids, each image standing as one image token and each video as one video token. `after`: as in `chat`.
  Answer ask_ids(const Ids& ids, const Options& options);
  // Asks about other images from now on, such as the next frame of a camera; chats begin anew. False, and nothing is done,
  // if they are equal to those before in pixels after preprocessing, or if no mean colour of 64 x 64 cells differs from
  // theirs by more than `near`, a share of the range of colours.
  bool replace(std::vector<PreparedImage> images, double near);
  // What the caches hold of the prompt before the last image, from a file and into it; see session/prefix_file.hpp.
  void load_prefix(const std::string& path);
  void save_prefix(const std::string& path);
  // Ends the answer that is being computed: within one token, or before the prompt's next stage.
  void cancel() { cancelled_ = true; }
  // For its owner's last word: as `cancel`, and so ends whatever answer is yet to begin.
  void close() { closed_ = true; }

  const Model& model() const { return *model_; }

 private:
  struct Turn {                            // what is asked
    const std::vector<Message>* messages;  // null where only ids are given
    Ids ids;                               // image tokens expanded
    const Selection* after;
    std::optional<bool> thinking = {};
  };
  class Running;
  Conversation(Conversation& other, const Running&);

  Ids prompt_ids(const std::vector<Message>& messages, const Options& options) const;
  void check_form(const Options& options, const ThoughtDivider& divider) const;
  void check_prefix_file() const;
  std::vector<Message> opening(const std::string& question) const;
  bool is_picture(int64_t id) const;
  Ids expanded(const Ids& ids, const std::vector<MarkedImage>& images) const;
  Answer answer(const Turn& turn, const Options& options);
  Prompt prompt(const Turn& turn, const Policy& policy, const std::optional<std::string>& about, Timings& timings);
  void score_choices(Answer& answer, const std::vector<std::string>& choices);
  void generate(Answer& answer, const Options& options, const Prompt& prompt, GuidedAnswer* guided,
                std::optional<ThoughtDivider> divider);

  std::shared_ptr<const Model> model_;
  std::vector<PreparedImage> images_;
  const std::optional<std::string> system_;
  EncodedImages encoded_;
  Session session_;
  std::vector<Message> turns_;          // of the chat
  std::optional<Selection> selection_;  // the question that selected the chat's image tokens
  std::optional<std::string> about_;    // the text that did in its place
  std::atomic<bool> busy_{false}, cancelled_{false}, closed_{false};
  std::chrono::steady_clock::time_point start_;
  double timeout_ = 0;
  void check_ended() const;
};

}  // namespace vtxcore
