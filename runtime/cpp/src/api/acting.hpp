// Actions of a loaded bundle: what the caller gives, checked, and actions in the robot's units.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/model.hpp"
#include "session/acting.hpp"

namespace vtxcore {

struct ActOptions {
  std::string k = "default";
  std::optional<int64_t> steps;  // none: the checkpoint's
  bool normalized = false;       // the state is normalised, and so are the actions, at the model's full widths
  std::optional<Floats> noise;   // [horizon, width]; none: drawn
  std::optional<uint64_t> seed;  // of the noise
  double deadline_ms = 0;        // 0: none
  std::optional<std::vector<std::string>> cameras;  // names of the pictures; none: in the bundle's order
  std::optional<std::string> unnorm_key;            // the data set whose units the actions have
  std::string reduce = "default";
};

// Rows [horizon, width], and what vtx-run --act prints of them.
struct Actions {
  Rows values;
  Json json;
};

// Actions for one robot at a time: pictures and prompts of the last answer are kept. Safe for many threads.
class Actor {
 public:
  virtual ~Actor() = default;
  virtual Actions act(const std::vector<Picture>& pictures, const std::string& instruction, const Floats& state,
                      const ActOptions& options) = 0;
};

// An actor of a model with an expert, or of one whose tokens are actions. Throws Error(request): it answers in words.
std::unique_ptr<Actor> make_actor(std::shared_ptr<const Model> model);
std::unique_ptr<Actor> make_token_actor(std::shared_ptr<const Model> model);

// A time from now on by which actions must be there.
class Deadline {
 public:
  // 0: whenever. `cure`: what makes actions faster. Throws Error(request).
  Deadline(double milliseconds, const char* cure);
  // Seconds up to it, 0 where there is none. Throws Error(late): it has passed.
  double left() const;

 private:
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  double ms_;
  const char* cure_;
};

// Throws Error(request) unless it says something.
void check_instruction(const std::string& instruction);

// What vtx-run --act prints of actions.
Json::Object facts_of(const Rows& actions, const ActionSeconds& seconds, size_t encoded);

}  // namespace vtxcore
