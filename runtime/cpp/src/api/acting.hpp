// Actions of a loaded bundle: what the caller gives, checked, and actions in the robot's units.
#pragma once

#include <memory>
#include <mutex>
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
};

// Rows [horizon, width], and what vtx-run --act prints of them.
struct Actions {
  Rows values;
  Json json;
};

// Actions for one robot at a time: pictures and prompts of the last answer are kept. Safe for many threads.
class Actor {
 public:
  explicit Actor(std::shared_ptr<const Model> model);
  Actions act(const std::vector<Picture>& pictures, const std::string& instruction, const Floats& state,
              const ActOptions& options);

 private:
  std::vector<size_t> order(size_t count, const std::optional<std::vector<std::string>>& named) const;
  Floats normalised(const Floats& state, bool already) const;
  [[noreturn]] void no_statistics(const char* what) const;

  std::shared_ptr<const Model> model_;
  const ActionSpec& spec_;
  std::mutex lock_;
  Acting acting_;
};

}  // namespace vtxcore
