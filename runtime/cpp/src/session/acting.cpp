#include "session/acting.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "backends/tables.hpp"

namespace vtxcore {

void check_actions(const Floats& actions) {
  if (!std::all_of(actions.begin(), actions.end(), [](float value) { return std::isfinite(value); }))
    fail(Kind::bundle, "the actions are not numbers, so they are withheld; export with --precision fp32, or leave out ",
         "--compute");
}

Acting::Acting(Backend& backend, const Bundle& bundle) : backend_(backend), m_(bundle.manifest()) {
  if (m_.action->state_in == "prompt") state_token_ = read_state_projection(bundle);
}

// The tokens of all pictures; new ones run through the tower in one pass.
Rows Acting::features(const std::vector<PreparedImage>& images) {
  std::map<std::string, const Pixels*> fresh;
  for (const PreparedImage& image : images)
    if (pictures_.count(image.key) == 0) fresh.emplace(image.key, &image.views.front());
  std::map<std::string, Rows> known;
  if (!fresh.empty()) {
    std::vector<const Pixels*> views;
    for (const auto& [key, view] : fresh) views.push_back(view);
    Rows tokens = backend_.views(views);
    int64_t each = static_cast<int64_t>(tokens.count() / fresh.size()), first = 0;
    for (const auto& [key, view] : fresh) {
      known[key] = take(tokens, count_up(first, static_cast<size_t>(each)));
      first += each;
    }
  }
  for (const PreparedImage& image : images)
    if (auto old = pictures_.find(image.key); old != pictures_.end()) known.emplace(*old);
  encoded = fresh.size();
  pictures_ = std::move(known);
  Rows out(0, static_cast<size_t>(m_.model.hidden));
  for (const PreparedImage& image : images) append(out, pictures_.at(image.key));
  return out;
}

// K and V of a prompt's tokens in every stage. Equal keys mean equal images.
void Acting::run_prompt(const Ids& ids, const Rows& features, std::optional<int64_t> k, const std::string& images,
                        const Check& check) {
  int64_t taken = static_cast<int64_t>(ids.size()) + m_.action->horizon + (m_.action->state_in != "text");
  if (taken > m_.max_context)
    fail(Kind::context, "the prompt and the actions take ", taken, " tokens, ", features.count(),
         " of them for images, and ", m_.max_context, " fit into this bundle; give fewer cameras or a shorter instruction",
         m_.or_more_context());
  std::string key = cat(k.value_or(0), " ", images, " ");
  key.append(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int64_t));
  if (key == key_) return;
  key_.clear();
  prompt_.clear();
  counts_.clear();
  Ids words, text;
  Mask is_image;
  for (int64_t id : ids) is_image.push_back(id == m_.text.image_token_id);
  text = indices_of(is_image, false);
  Rows embedded = backend_.embed(take(ids, text)).hidden;
  TokenStates tokens{Rows(ids.size(), static_cast<size_t>(m_.model.hidden))};
  size_t word = 0, image = 0;
  for (size_t i = 0; i < ids.size(); ++i)
    std::copy_n(is_image[i] ? features.row(image++) : embedded.row(word++), tokens.hidden.width, tokens.hidden.row(i));
  Positions positions = text_positions(0, ids.size());
  for (size_t number = 0; number < m_.stages.size(); ++number) {
    check();
    if (m_.stages[number].first == k) tokens.hidden = take(tokens.hidden, text), positions = take(positions, text);
    tokens.inputs[names::kGroup] = Rows(positions.size(), 1);  // all see each other
    std::unique_ptr<StageCache>& cache = stages_[number];
    if (!cache) cache = backend_.stage(number, m_.max_context);
    cache->keep(0);
    tokens.hidden = cache->append(tokens, positions);
    prompt_.push_back(cache->read(count_up(0, positions.size())));
    counts_.push_back(positions.size());
  }
  key_ = std::move(key);
}

// K and V of a prompt of `length` positions, with the state as its last token where the model reads it there.
std::vector<SavedSlots> Acting::with_state(int64_t length, const Floats& state) {
  if (!state_token_) return prompt_;
  const auto& [weight, bias] = *state_token_;
  TokenStates token{Rows(1, bias.size())};
  for (size_t row = 0; row < bias.size(); ++row) {
    float sum = 0;
    for (size_t i = 0; i < state.size(); ++i) sum += weight[row * state.size() + i] * state[i];
    token.hidden.row(0)[row] = sum + bias[row];
  }
  std::vector<SavedSlots> out;
  for (size_t number = 0; number < counts_.size(); ++number) {
    StageCache& cache = *stages_.at(number);
    cache.keep(static_cast<int64_t>(counts_[number]));
    token.inputs[names::kGroup] = Rows(1, 1);
    token.hidden = cache.append(token, text_positions(length, 1));
    out.push_back(cache.read(count_up(0, counts_[number] + 1)));
  }
  return out;
}

Floats Acting::act(const Ids& ids, const std::vector<PreparedImage>& images, const Floats& state, const Floats& noise,
                   std::optional<int64_t> k, int64_t steps, const Check& check) {
  using Clock = std::chrono::steady_clock;
  auto between = [](Clock::time_point a, Clock::time_point b) { return std::chrono::duration<double>(b - a).count(); };
  Clock::time_point start = Clock::now();
  check();
  Rows tokens = features(images);
  std::string keys;
  for (const PreparedImage& image : images) keys += image.key;
  Clock::time_point seen = Clock::now();
  run_prompt(ids, tokens, k, keys, check);
  std::vector<SavedSlots> prompt = with_state(static_cast<int64_t>(ids.size()), state);
  Clock::time_point read = Clock::now();
  int64_t first = static_cast<int64_t>(ids.size()) + (state_token_ ? 1 : 0);
  ExpertStep step = backend_.expert(prompt, state, count_up(first, static_cast<size_t>(m_.action->rows())));
  Floats actions = noise;
  auto change = static_cast<float>(-1.0 / static_cast<double>(steps));
  for (int64_t number = 0; number < steps; ++number) {
    check();
    Floats velocity = step(actions, static_cast<float>(1 - static_cast<double>(number) / static_cast<double>(steps)));
    for (size_t i = 0; i < actions.size(); ++i) actions[i] += change * velocity[i];
  }
  check();
  check_actions(actions);
  seconds = {between(start, seen), between(seen, read), between(read, Clock::now())};
  return actions;
}

}  // namespace vtxcore
