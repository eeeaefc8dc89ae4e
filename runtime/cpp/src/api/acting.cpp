#include "api/acting.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>

#include "base/checks.hpp"
#include "base/random.hpp"
#include "base/utf8.hpp"

namespace vtxcore {
namespace {

// Is added to each deviation, and stands for a range of 0, as in the checkpoint's processor.
constexpr float kSmallest = 1e-8f;
constexpr int kStateBins = 256;

void check_numbers(const char* what, const Floats& given, const Ids& shape) {
  size_t count = 1;
  for (int64_t size : shape) count *= static_cast<size_t>(size);
  if (given.size() != count) fail(Kind::request, what, " has the shape [", given.size(), "], this model's is ", shape);
  auto wrong = std::count_if(given.begin(), given.end(), [](float value) { return !std::isfinite(value); });
  if (wrong > 0) fail(Kind::request, what, " holds ", wrong, " values that are not numbers");
}

// The instruction as openpi's tokenizer has it.
std::string cleaned(const std::string& instruction) {
  std::string out(strip(instruction, true, true));
  std::replace(out.begin(), out.end(), '_', ' ');
  std::replace(out.begin(), out.end(), '\n', ' ');
  return out;
}

float range_of(const Statistics& s, size_t i) { return s.second[i] == s.first[i] ? kSmallest : s.second[i] - s.first[i]; }

// The bins of a normalised state, from 0 on; -1 is a number below -1.
std::string as_text(const Floats& state) {
  std::string out;
  for (float number : state) {
    int bin = -1;
    while (bin + 1 < kStateBins && -1 + (bin + 1) * 2.0 / kStateBins <= number) ++bin;
    out += (out.empty() ? "" : " ") + std::to_string(bin);
  }
  return out;
}

[[noreturn]] void no_statistics(const char* what) {
  fail(Kind::request, "this bundle has no means and deviations of ", what,
       ", as the checkpoint's processor_config.json has ",
       "none (of LeRobot: its processor's files); add them there and export again, or give a normalised state and take normalised actions (normalized)");
}

class ExpertActor final : public Actor {
 public:
  explicit ExpertActor(std::shared_ptr<const Model> model)
      : model_(std::move(model)), spec_(*model_->manifest().action), acting_(model_->backend(), model_->bundle()) {}
  Actions act(const std::vector<Picture>& pictures, const std::string& instruction, const Floats& state,
              const ActOptions& options) override;

 private:
  std::vector<size_t> order(size_t count, const std::optional<std::vector<std::string>>& named) const;
  Floats normalised(const Floats& state, bool already) const;

  std::shared_ptr<const Model> model_;
  const ActionSpec& spec_;
  std::mutex lock_;
  Acting acting_;
};

// Which picture each of the bundle's cameras has.
std::vector<size_t> ExpertActor::order(size_t count, const std::optional<std::vector<std::string>>& named) const {
  const std::vector<std::string>& names = spec_.cameras;
  std::vector<size_t> out;
  if (!named) {
    if (count == 0 || (!names.empty() && count != names.size()))
      fail(Kind::request, count, " pictures are given, and this bundle has ",
           names.empty() ? "at least one camera" : cat(names.size(), " cameras: ", listed(names)));
    for (size_t i = 0; i < count; ++i) out.push_back(i);
    return out;
  }
  if (names.empty())
    fail(Kind::request, "this bundle names no cameras; give a list of pictures, or export with --cameras NAME,NAME");
  std::vector<std::string> missing, unknown;
  for (const std::string& name : names) {
    auto at = std::find(named->begin(), named->end(), name);
    if (at == named->end()) missing.push_back(name);
    if (at == named->end()) continue;
    out.push_back(static_cast<size_t>(at - named->begin()));
  }
  for (size_t i = 0; i < named->size(); ++i) {
    auto before = named->begin() + static_cast<std::ptrdiff_t>(i);
    bool again = std::find(named->begin(), before, (*named)[i]) != before;
    if (again || std::find(names.begin(), names.end(), (*named)[i]) == names.end()) unknown.push_back((*named)[i]);
  }
  if (spec_.absent_cameras && !out.empty()) missing.clear();
  if (!missing.empty() || !unknown.empty())
    fail(Kind::request, "the pictures ", missing.empty() ? "hold " : "lack ", listed(missing.empty() ? unknown : missing),
         "; this bundle's cameras are ", listed(names));
  return out;
}

// The state [size] as the expert takes it.
Floats ExpertActor::normalised(const Floats& state, bool already) const {
  const std::optional<Statistics>& known = spec_.of_states;
  check_numbers("state", state, {already || !known ? spec_.state : static_cast<int64_t>(known->first.size())});
  Floats out = state;
  if (!already) {
    if (!known) no_statistics("states");
    for (size_t i = 0; i < out.size(); ++i)
      out[i] = known->ranges ? 2 * (out[i] - known->first[i]) / range_of(*known, i) - 1
                             : (out[i] - known->first[i]) / (known->second[i] + kSmallest);
  }
  out.resize(static_cast<size_t>(spec_.state));
  return out;
}

Actions ExpertActor::act(const std::vector<Picture>& pictures, const std::string& instruction, const Floats& state,
                         const ActOptions& options) {
  Deadline deadline(options.deadline_ms, "fewer steps or a smaller K");
  if (options.unnorm_key) fail(Kind::request, "unnorm_key: this model has the statistics of one robot; leave it out");
  if (options.reduce != "default" && options.reduce != "none")
    fail(Kind::request, "reduce='", options.reduce.substr(0, 38), "': models with an action expert support K, but no ",
         "reductions; leave it out");
  std::vector<size_t> order = this->order(pictures.size(), options.cameras);
  Floats given = normalised(state, options.normalized), noise;
  if (options.noise) {
    if (options.seed)
      fail(Kind::request, "noise and seed are both given; the noise is all that a seed decides, so leave one out");
    check_numbers("noise", *options.noise, {spec_.horizon, spec_.width});
    noise = *options.noise;
  } else {
    noise = Random(options.seed).normals(static_cast<size_t>(spec_.horizon * spec_.width));
  }
  check_instruction(instruction);
  int64_t steps = options.steps.value_or(spec_.steps);
  check_whole("steps", steps, 1, names::kMaxSteps);
  Options chosen;
  chosen.k = options.k, chosen.reduce = "none";
  std::optional<int64_t> k = model_->policy(chosen).exit();
  if (!options.normalized && !spec_.of_actions) no_statistics("actions");
  std::vector<PreparedImage> images;
  for (size_t number : order) images.push_back(model_->prepare(pictures[number], "", pictures.size()));
  std::vector<Part> parts(images.size(), {true, ""});
  parts.push_back({false, model_->fit() == "released" ? cleaned(instruction) : instruction});
  if (spec_.state_in == "text") parts.push_back({false, as_text(given)});
  Ids ids = model_->text().prompt({{"user", parts}}, placed(images));
  auto words = static_cast<int64_t>(ids.size()) - std::count(ids.begin(), ids.end(), model_->manifest().text.image_token_id);
  if (spec_.instruction_tokens && words > *spec_.instruction_tokens)
    fail(Kind::request, "the instruction takes ", words, " tokens, and the model was trained with ", *spec_.instruction_tokens,
         " at most; shorten it");
  auto check = [&] { deadline.left(); };
  Actions out;
  std::lock_guard<std::mutex> held(lock_);
  out.values.width = static_cast<size_t>(spec_.width);
  out.values.data = acting_.act(ids, images, given, noise, k, steps, check);
  if (!options.normalized) {
    const Statistics& own = *spec_.of_actions;
    Rows scaled(out.values.count(), own.first.size());
    for (size_t row = 0; row < scaled.count(); ++row)
      for (size_t i = 0; i < scaled.width; ++i) {
        float number = out.values.row(row)[i];
        scaled.row(row)[i] = own.ranges ? (number + 1) * range_of(own, i) / 2 + own.first[i]
                                        : number * (own.second[i] + kSmallest) + own.first[i];
      }
    check_actions(scaled.data);
    out.values = std::move(scaled);
  }
  out.json = facts_of(out.values, acting_.seconds, acting_.encoded);
  return out;
}

}  // namespace

Deadline::Deadline(double milliseconds, const char* cure) : ms_(milliseconds), cure_(cure) {
  if (ms_ != 0) check_number("deadline_ms", ms_, "milliseconds above 0, at most 1e9", 1e-6, 1e9);
}

double Deadline::left() const {
  if (ms_ == 0) return 0;
  std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - begun_;
  if (passed.count() < ms_) return (ms_ - passed.count()) / 1000;
  char within[30], taken[30];
  std::snprintf(within, sizeof within, "%g", ms_);
  std::snprintf(taken, sizeof taken, "%.0f", passed.count());
  fail(Kind::late, "no actions within ", within, " ms, ", taken, " ms have passed, so none are given; raise deadline_ms, ",
       "or take ", cure_);
}

void check_instruction(const std::string& instruction) {
  if (instruction.find_first_not_of(" \t\r\n\f\v") == std::string::npos)
    fail(Kind::request, "the instruction is '", instruction.substr(0, 38), "'; say in words what to do");
}

Json::Object facts_of(const Rows& actions, const ActionSeconds& seconds, size_t encoded) {
  Json::Array moments;
  for (size_t row = 0; row < actions.count(); ++row)
    moments.emplace_back(Json::Array(actions.row(row), actions.row(row) + actions.width));
  return {{"actions", moments},
          {"seconds", Json::Object{{"tower", seconds.tower}, {"prompt", seconds.prompt}, {"expert", seconds.expert}}},
          {"encoded", encoded}};
}

std::unique_ptr<Actor> make_actor(std::shared_ptr<const Model> model) {
  const Manifest& m = model->manifest();
  if (m.bins) return make_token_actor(std::move(model));
  if (!m.action) fail(Kind::request, m.model.name, " answers in words, not with actions; use ask");
  return std::make_unique<ExpertActor>(std::move(model));
}

}  // namespace vtxcore
