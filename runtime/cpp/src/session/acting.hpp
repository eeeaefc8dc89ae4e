// Actions: cameras and an instruction through the stages once, then the expert's steps over their K and V.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "bundle/bundle.hpp"
#include "session/encoded_images.hpp"

namespace vtxcore {

// Seconds of the parts of an answer: the tower, the prompt in the decoder, the expert.
struct ActionSeconds {
  double tower = 0, prompt = 0, expert = 0;
};

// Throws Error(bundle) unless all are finite.
void check_actions(const Floats& actions);

// The caches of a model that outputs actions. Not safe for two threads at once. A picture that was there last time,
// at whatever place, keeps its tokens; a prompt of the same pictures, words and K its K and V.
class Acting {
 public:
  Acting(Backend& backend, const Bundle& bundle);

  // Actions [horizon, width] for a normalised state, from noise [horizon, width]; image tokens leave before layer `k`.
  // `check` is called before the tower, every stage and every step, and after the last; it may throw, to stop there. Throws
  // Error(context); Error(bundle): the actions are not numbers.
  Floats act(const Ids& ids, const std::vector<PreparedImage>& images, const Floats& state, const Floats& noise,
             std::optional<int64_t> k, int64_t steps, const Check& check);

  // Of the last answer.
  ActionSeconds seconds;
  size_t encoded = 0;  // pictures that ran through the tower

 private:
  Rows features(const std::vector<PreparedImage>& images);
  void run_prompt(const Ids& ids, const Rows& features, std::optional<int64_t> k, const std::string& key,
                  const Check& check);
  std::vector<SavedSlots> with_state(int64_t length, const Floats& state);

  Backend& backend_;
  const Manifest& m_;
  std::map<std::string, Rows> pictures_;  // tokens by the hash of the pixels
  std::map<size_t, std::unique_ptr<StageCache>> stages_;
  std::string key_;                 // of what `prompt_` is of; empty: of nothing
  std::vector<SavedSlots> prompt_;  // K and V of each stage
  std::vector<size_t> counts_;      // of slots there
  std::optional<std::pair<Floats, Floats>> state_token_;
};

}  // namespace vtxcore
