#include "api/answer.hpp"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "api/model.hpp"
#include "base/checks.hpp"
#include "base/utf8.hpp"
#include "bundle/names.hpp"

namespace vtxcore {
namespace {

constexpr int64_t kMaxAbout = 10'000;  // characters

Json numbers(const Ids& values) { return Json::Array(values.begin(), values.end()); }

Json number_or_null(int64_t value) { return value ? Json(value) : Json(); }

// The patch indices of each image's masked tokens, ascending.
Json patches_of(const Images& images, const Mask& mask) {
  Json::Array out;
  size_t at = 0;
  for (const ImagePtr& image : images) {
    Ids places;
    for (int64_t place : image->patches.places)
      if (mask[at++]) places.push_back(place);
    std::sort(places.begin(), places.end());
    out.push_back(numbers(places));
  }
  return out;
}

// What had no effect, and why.
Json notes_of(const std::vector<MethodPtr>& parts, const PrefillResult& done) {
  Json::Array notes;
  std::vector<std::string> names;
  for (const MethodPtr& part : parts) names.push_back(part->name());
  if (done.vision_tokens == 0) {
    notes.emplace_back("the prompt has no image: " + listed(names, " and ") + " had nothing to leave out");
    return notes;
  }
  if (done.k == 0 || done.rest > 0) return notes;
  const std::vector<std::string>& last = done.cuts.back().by;
  for (const MethodPtr& part : parts) {
    std::string idle;
    bool at_work = std::find(last.begin(), last.end(), part->name()) != last.end();
    for (int64_t cut : part->needs().cuts)
      if (cut > done.k || (cut == done.k && !at_work)) idle += (idle.empty() ? "" : ", ") + std::to_string(cut);
    if (!idle.empty())
      notes.emplace_back(
          cat("the image left before layer ", done.k, ": ", part->name(), " had nothing to leave out before ", idle));
  }
  return notes;
}

// What reductions did to the images.
void add_report(Json::Object& out, const std::vector<MethodPtr>& parts, const PrefillResult& done) {
  Mask all(static_cast<size_t>(done.vision_tokens), 1), merged, keys(all.size(), 0);
  std::vector<std::string> before;
  for (const ImagePtr& image : done.images)
    merged.insert(merged.end(), image->patches.merged.begin(), image->patches.merged.end());
  for (const MethodPtr& part : parts) {
    if (part->entry()) before.push_back(part->name());
    if (std::optional<Mask> marks = part->marks(done.images))
      for (size_t i = 0; i < keys.size(); ++i) keys[i] |= (*marks)[i];
  }
  auto kept = [&](int64_t layer, const std::vector<std::string>& by, const Mask& mask) {
    return Json(Json::Object{{"layer", layer}, {"by", listed(by, "+")}, {"patches", patches_of(done.images, mask)}});
  };
  Json::Array steps{kept(1, before, all)};
  for (const Cut& cut : done.cuts) steps.push_back(kept(cut.layer, cut.by, cut.kept));
  int64_t leaving = 0;
  for (size_t i = 1; i <= done.vision_kept.size(); ++i)
    leaving += done.vision_kept[std::min(i, done.vision_kept.size() - 1)];
  out.emplace_back("kept", steps);
  out.emplace_back("merged", patches_of(done.images, merged));
  out.emplace_back("keys", patches_of(done.images, keys));
  out.emplace_back("vision_tokens_mean",
                   rounded_to(static_cast<double>(leaving) / static_cast<double>(done.vision_kept.size()), 2));
  out.emplace_back("notes", notes_of(parts, done));
}

Json timings_of(const Timings& t) {
  return Json::Object{{"load", rounded_to(t.load, 3)},
                      {"vision", rounded_to(t.vision, 3)},
                      {"prefill", rounded_to(t.prefill, 3)},
                      {"first_token", rounded_to(t.first_token, 3)},
                      {"decode_per_token", rounded_to(t.decode_per_token, 3)}};
}

// How probable the model found the tokens that the form imposed.
Json imposed_of(const Doubles& logprobs) {
  Imposed imposed = Imposed::of(logprobs);
  bool any = imposed.tokens > 0;
  return Json::Object{{"tokens", imposed.tokens},
                      {"mean_logprob", any ? Json(imposed.mean) : Json()},
                      {"least_logprob", any ? Json(imposed.least) : Json()},
                      {"unlikely", any && imposed.mean < names::kUnlikely}};
}

// A number as Python's .3g writes it.
std::string three_digits(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

}  // namespace

Imposed Imposed::of(const Doubles& logprobs) {
  if (logprobs.empty()) return {};
  double sum = std::accumulate(logprobs.begin(), logprobs.end(), 0.0);
  return {static_cast<int64_t>(logprobs.size()), sum / static_cast<double>(logprobs.size()),
          *std::min_element(logprobs.begin(), logprobs.end())};
}

bool is_incomplete(const Answer& answer) { return answer.forced && answer.stopped != "end"; }

void judge(Answer& answer) {
  auto chosen = std::find_if(answer.choices.begin(), answer.choices.end(),
                             [&](const auto& choice) { return choice.first == answer.text; });
  if (chosen == answer.choices.end()) {
    answer.unsure = "the answer was cut before it was one of the choices; raise max_new_tokens";
    return;
  }
  double probability = chosen->second * answer.choices_mass;
  if (probability >= *answer.threshold) return;
  answer.unsure = cat("the model gives '", answer.text, "' a probability of ", three_digits(probability), " (",
                      three_digits(chosen->second), " among the choices, which together have ",
                      three_digits(answer.choices_mass), "); at least ", three_digits(*answer.threshold), " is accepted");
}

void check_stop_count(size_t count) {
  if (count > 16) fail(Kind::request, "stop holds ", count, " strings; at most 16 are allowed");
}

void Options::check() const {
  sampling.check();
  check_whole("max_new_tokens", max_new_tokens, 1, names::kMostWhole);
  check_whole("max_thinking_tokens", max_thinking_tokens, 0, names::kMostWhole);
  check_number("the gate threshold", gate_threshold, "a probability from 0 to 1", 0, 1);
  check_stop_count(stop.size());
  for (const std::string& text : stop) {
    if (text.empty()) fail(Kind::request, "stop is ''; it must be a string, or a list of strings, none of them empty");
    if (size_t at = first_invalid_utf8(text); at != std::string::npos)
      fail(Kind::request, "a stop string is not UTF-8 text (byte ", at, ")");
  }
  if (rest) read_rest(*rest);
  if (about) {
    if (size_t at = first_invalid_utf8(*about); at != std::string::npos)
      fail(Kind::request, "about is not UTF-8 text (byte ", at, ")");
    if (about->find_first_not_of(" \t\r\n") == std::string::npos)
      fail(Kind::request, "about is empty; give the text by which image tokens are chosen, or leave it out");
    if (size_t length = decode_utf8(*about).size(); length > kMaxAbout)
      fail(Kind::request, "about has ", grouped(static_cast<int64_t>(length)), " characters, the limit is ",
           grouped(kMaxAbout), "; shorten it");
  }
  if (guide) {
    guide->check();
    if (!stop.empty() || ignore_eos)
      fail(Kind::request, guide->kind, " determines where the answer ends; leave ", ignore_eos ? "ignore_eos" : "stop",
           " out");
  }
  if (accept) {
    size_t count = guide ? guide->choices().size() : 0;
    if (count == 0 || count > static_cast<size_t>(names::kMaxScored))
      fail(Kind::request, "accept judges the probability of a choice, and ", grouped(static_cast<int64_t>(count)),
           " choices are given; give 1 to ", names::kMaxScored, ", or leave accept out");
  }
  if (timeout != 0) check_number("timeout", timeout, "a number of seconds above 0 and at most 1e6", 1e-9, 1e6);
}

void describe(Answer& answer, const Model& model, const Policy& policy, bool logprobs) {
  const Manifest& m = model.manifest();
  static const PrefillResult kNone;
  const PrefillResult& done = answer.prefill ? *answer.prefill : kNone;
  int64_t slots = 0;
  for (int64_t count : done.slots) slots += count;
  std::vector<MethodPtr> reductions = policy.reductions();
  Json::Object out{{"text", answer.text},
                   {"token_ids", numbers(answer.token_ids)},
                   {"k", number_or_null(done.k)},
                   {"full_layers", done.k ? done.k - 1 : m.model.layers},
                   {"exit_layer", done.k ? Json(done.k - 1) : Json()},
                   {"prompt_tokens", answer.prompt_tokens},
                   {"vision_tokens", done.vision_tokens},
                   {"vision_tokens_kept", numbers(done.vision_kept)},
                   {"kv_slots", numbers(done.slots)},
                   {"kv_bytes", slots * model.backend().kv_slot_bytes},
                   {"reused_image", done.reused_image},
                   {"reused_layers", done.reused_layers},
                   {"reused_tokens", done.reused_tokens},
                   {"not_reused", done.not_reused.empty() ? Json() : Json(done.not_reused)},
                   {"device", model.backend().device},
                   {"compute", model.backend().compute},
                   {"precision", m.precision},
                   {"timings_ms", timings_of(answer.timings)}};
  if (policy.decisions) {
    Json::Array asked;
    for (const Decision& d : *policy.decisions)
      asked.push_back(Json::Object{{"k", d.k}, {"probability", d.probability}, {"ms", d.ms}});
    out.emplace_back("gate", asked);
  }
  out.emplace_back("rest", done.rest);
  out.emplace_back("reduce", to_spec(reductions));
  if (answer.prefill && (!reductions.empty() || done.rest > 0)) add_report(out, reductions, done);
  if (m.text.seg_token_id) {
    Json::Array states;
    for (size_t i = 0; i < answer.seg_states.count(); ++i) {
      const float* state = answer.seg_states.row(i);
      states.emplace_back(Json::Array(state, state + answer.seg_states.width));
    }
    out.emplace_back("seg_states", std::move(states));
  }
  if (answer.forced) out.emplace_back("forced", *answer.forced);
  if (answer.imposed) out.emplace_back("imposed", imposed_of(*answer.imposed));
  if (!answer.choices.empty()) {
    out.emplace_back("choices", Json::Object(answer.choices.begin(), answer.choices.end()));
    out.emplace_back("choices_mass", answer.choices_mass);
  }
  if (answer.threshold) out.emplace_back("unsure", answer.unsure ? Json(*answer.unsure) : Json());
  if (answer.boxes) {
    Json::Array boxes;
    for (const Box& box : *answer.boxes)
      boxes.push_back(Json::Object{
          {"label", box.label}, {"left", box.left}, {"top", box.top}, {"right", box.right}, {"bottom", box.bottom}});
    out.emplace_back("boxes", std::move(boxes));
  }
  if (answer.thought) {
    out.emplace_back("thought", *answer.thought);
    out.emplace_back("thought_tokens", answer.thought_tokens);
  }
  if (is_incomplete(answer)) out.emplace_back("incomplete", true);
  if (logprobs) out.emplace_back("logprobs", Json::Array(answer.logprobs.begin(), answer.logprobs.end()));
  answer.json = out;
}

}  // namespace vtxcore
