#include "api/conversation.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checks.hpp"
#include "session/encoded_images.hpp"
#include "session/prefix_file.hpp"

namespace vtxcore {
namespace {

// Refuses an option that needs the text of the question.
void check_without_text(bool given, const char* name) {
  if (given) fail(Kind::request, name, " is given with token ids instead of text; ask by text, or leave ", name, " out");
}


// The question was cancelled or ran out of time; caught where an answer is put together.
struct Ended {
  const char* stopped;
};

double ms_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// The largest difference, from 0 to 1, between the mean colours of 64 x 64 cells of two images as the model sees them, or of
// each two frames of two videos. Videos whose prompts differ in text are as different as can be.
double change_between(const PreparedImage& image, const PreparedImage& other, const ImageSettings& settings) {
  constexpr size_t kCells = 64;
  if (image.views.size() != other.views.size() || image.width != other.width || image.height != other.height) return 1;
  if (bool(image.video) != bool(other.video) || image.placed.span != other.placed.span) return 1;
  if (image.placed.marks != other.placed.marks) return 1;
  double most = 0;
  for (size_t view = 0; view < image.views.size(); ++view) {
    const Floats &mine = image.views[view].values, &theirs = other.views[view].values;
    auto rows = static_cast<size_t>(image.views[view].height), columns = static_cast<size_t>(image.views[view].width);
    size_t down = std::min(kCells, rows), across = std::min(kCells, columns);
    for (size_t channel = 0; channel < 3 * static_cast<size_t>(image.views[view].pictures); ++channel) {
      double share = settings.std[channel % 3] / (255 * settings.rescale);
      for (size_t cell = 0; cell < down * across; ++cell) {
        size_t top = cell / across * rows / down, bottom = (cell / across + 1) * rows / down;
        size_t left = cell % across * columns / across, right = (cell % across + 1) * columns / across;
        double sum = 0;
        for (size_t y = top; y < bottom; ++y)
          for (size_t at = (channel * rows + y) * columns + left; at < (channel * rows + y) * columns + right; ++at)
            sum += static_cast<double>(mine[at]) - static_cast<double>(theirs[at]);
        most = std::max(most, std::abs(sum) * share / static_cast<double>((bottom - top) * (right - left)));
      }
    }
  }
  return most;
}

}  // namespace

// Holds the conversation for one answer.
class Conversation::Running {
 public:
  explicit Running(Conversation& conversation) : conversation_(conversation) {
    if (conversation_.busy_.exchange(true))
      fail(Kind::busy,
           "another thread reads an answer of this conversation; let it end, cancel it, or open the image again ",
           "for a conversation of your own");
    conversation_.cancelled_ = false;
  }
  ~Running() { conversation_.busy_ = false; }

 private:
  Conversation& conversation_;
};

Conversation::Conversation(std::shared_ptr<const Model> model, std::vector<PreparedImage> images,
                           std::optional<std::string> system)
    : model_(std::move(model)), images_(std::move(images)), system_(std::move(system)), encoded_(model_->backend(), images_),
      session_(model_->backend(), model_->manifest()) {
  if (!system_) return;
  std::vector<Message> with = opening("?"), without(with.begin() + 1, with.end());
  if (model_->text().prompt(with, placed(images_)) == model_->text().prompt(without, placed(images_)))
    fail(Kind::request, "this model's chat template has no place for a system prompt; leave it out, or export with a ",
         "--chat-template that prints it");
}

Conversation::Conversation(Conversation& other) : Conversation(other, Running(other)) {}

Conversation::Conversation(Conversation& other, const Running&)
    : model_(other.model_), images_(other.images_), system_(other.system_), encoded_(model_->backend(), images_),
      session_(model_->backend(), model_->manifest()) {
  encoded_.share(other.encoded_);
  session_.copy_prefix(other.session_);
}

std::vector<Message> Conversation::opening(const std::string& question) const {
  std::vector<Message> out;
  if (system_) out.push_back({"system", {{false, *system_}}});
  out.push_back({"user", {}});
  for (const PreparedImage& image : images_) out.back().parts.push_back({true, "", image.video != nullptr});
  out.back().parts.push_back({false, question});
  return out;
}

// The ids of messages to be answered so. Throws Error(request), Error(templates), Error(context), Error(bundle).
Ids Conversation::prompt_ids(const std::vector<Message>& messages, const Options& options) const {
  model_->text().check_thinking(options.thinking, options.max_thinking_tokens > 0);
  return model_->text().prompt(messages, placed(images_), options.thinking);
}

Answer Conversation::ask(const std::string& question, const Options& options) {
  Running running(*this);
  std::vector<Message> messages = opening(question);
  return answer({&messages, prompt_ids(messages, options), nullptr, options.thinking}, options);
}

Answer Conversation::chat(const std::string& question, const Options& given) {
  Running running(*this);
  Options options = given;
  if (!turns_.empty()) {
    if (given.about && given.about != about_)
      fail(Kind::request, "about is the first turn's, whose image tokens stay; leave it out, or start another chat");
    options.about = about_;
  }
  std::vector<Message> messages = turns_;
  if (messages.empty())
    messages = opening(question);
  else
    messages.push_back({"user", {{false, question}}});
  Ids ids = prompt_ids(messages, options);
  Answer found = answer({&messages, ids, selection_ ? &*selection_ : nullptr, options.thinking}, options);
  if (found.stopped == "cancelled" || found.stopped == "timeout") return found;  // this turn does not count
  messages.push_back({"assistant", {{false, found.text}}});
  turns_ = std::move(messages);
  selection_ = found.prefill->selection;
  about_ = options.about;
  return found;
}

void Conversation::restart_chat() {
  Running running(*this);
  turns_.clear();
  selection_.reset();
}

Answer Conversation::ask_ids(const Ids& ids, const Options& options) {
  Running running(*this);
  const Manifest& m = model_->manifest();
  check_without_text(options.thinking || options.max_thinking_tokens > 0, "thinking");
  check_without_text(options.about.has_value(), "about");
  for (int64_t id : ids) check_whole("token id", id, 0, m.model.vocab - 1);
  size_t images = 0, wrong = 0;
  for (int64_t id : ids) {
    if (!is_picture(id)) continue;
    bool video = images < images_.size() && images_[images].video;
    wrong += id != (video ? *m.text.video_token_id : m.text.image_token_id);
    ++images;
  }
  if (ids.empty() || images != images_.size() || wrong > 0)
    fail(Kind::request, "the prompt has ", ids.size(), " token ids and ", images, " image tokens for ", images_.size(),
         " images; give at least one id, and one image token for each image and one video token for each video, in their ",
         "order");
  return answer({nullptr, ids, nullptr}, options);
}

bool Conversation::replace(std::vector<PreparedImage> images, double near) {
  Running running(*this);
  check_number("near", near, "a share from 0 to 1", 0, 1);
  const Manifest& m = model_->manifest();
  auto stays = [&](const PreparedImage& image, const PreparedImage& other) {
    const ImageSettings& settings = image.video ? m.video->image : m.image;
    return image.key == other.key || (near > 0 && change_between(image, other, settings) <= near);
  };
  if (std::equal(images.begin(), images.end(), images_.begin(), images_.end(), stays)) return false;
  images_.swap(images);
  try {
    encoded_.replaced(images);
  } catch (...) {
    images_.swap(images);
    throw;
  }
  turns_.clear();
  selection_.reset();
  return true;
}

void Conversation::check_prefix_file() const {
  const ModelSpec& model = model_->manifest().model;
  if (model.two_way == TwoWay::prompt || !model.conv_layers.empty())
    fail(Kind::request, "a prompt of this model cannot be continued from some token on, since tokens see those behind ",
         "them, or layers keep a state; leave the prefix file out");
}

void Conversation::load_prefix(const std::string& path) {
  Running running(*this);
  check_prefix_file();
  if (session_.has_run())
    fail(Kind::request, "a question has been asked already; load a prefix file right after the images are opened");
  vtxcore::load_prefix(path, model_->bundle(), model_->backend(), session_);
}

void Conversation::save_prefix(const std::string& path) {
  Running running(*this);
  check_prefix_file();
  vtxcore::save_prefix(path, model_->bundle(), model_->backend(), session_);
}

bool Conversation::is_picture(int64_t id) const {
  const TextSettings& text = model_->manifest().text;
  return id == text.image_token_id || id == text.video_token_id;
}

Ids Conversation::expanded(const Ids& ids, const std::vector<MarkedImage>& images) const {
  Ids out;
  size_t number = 0;
  for (int64_t id : ids) {
    bool is_image = is_picture(id);
    Ids own{id};
    if (is_image && images[number].has_text())
      own = model_->text().image_ids(images[number], number);
    else if (is_image)
      own.assign(static_cast<size_t>(images[number].tokens()), model_->manifest().text.image_token_id);
    out.insert(out.end(), own.begin(), own.end());
    number += is_image;
  }
  return out;
}

Prompt Conversation::prompt(const Turn& turn, const Policy& policy, const std::optional<std::string>& about,
                            Timings& timings) {
  int64_t image_id = model_->manifest().text.image_token_id;
  auto expand = [&](const std::vector<MarkedImage>& images) {
    return turn.messages ? model_->text().prompt(*turn.messages, images, turn.thinking) : expanded(turn.ids, images);
  };
  Ids ids = turn.messages ? turn.ids : expanded(turn.ids, placed(images_));
  std::vector<Message> asked;
  Ids chosen_by = ids;
  if (about) {
    asked = asking_about(*turn.messages, *about);
    try {
      std::vector<MarkedImage> marks(images_.size(), MarkedImage::plain(1));
      chosen_by = model_->text().prompt(asked, marks, turn.thinking);
    } catch (const Error& error) {
      if (error.kind() != Kind::context) throw;
      fail(Kind::context, "with about in place of the question, ", error.what());
    }
  }
  auto embeddings = [&] {
    if (!turn.messages)
      fail(Kind::request,
           "the reduction looks at the question's text by CLIP's text tower, and only token ids are given; ask ",
           "by text, or use another reduction");
    return model_->embed_question(about ? asked : *turn.messages);
  };
  if (policy.entries().empty()) model_->check_room(ids, images_);  // entries leave out tokens before the decoder
  auto text = selecting_text(model_->backend(), chosen_by, image_id, policy, about ? nullptr : turn.after, embeddings);
  auto encoders = encoded_.encoders(policy, text, &timings.vision);
  return make_prompt(std::move(ids), image_id, std::move(encoders), placed(images_), policy, expand,
                     [this] { check_ended(); });
}

void Conversation::check_ended() const {
  if (cancelled_ || closed_) throw Ended{"cancelled"};
  if (timeout_ > 0 && ms_since(start_) >= 1000 * timeout_) throw Ended{"timeout"};
}

Answer Conversation::answer(const Turn& turn, const Options& options) {
  options.check();
  Policy policy = model_->policy(options, images_);
  std::optional<GuidedAnswer> guided;
  if (options.guide) guided.emplace(model_->guided(*options.guide));
  std::optional<ThoughtDivider> divider;
  if (turn.messages) divider = model_->text().thoughts(turn.ids);
  if (guided && divider) check_form(options, *divider);
  Answer out;
  if (options.accept) out.threshold = model_->threshold(*options.accept);
  if (guided) out.imposed.emplace();
  out.timings.load = model_->load_ms();
  out.prompt_tokens = static_cast<int64_t>(turn.ids.size());
  start_ = std::chrono::steady_clock::now();
  timeout_ = options.timeout;
  try {
    Prompt asked = prompt(turn, policy, options.about, out.timings);
    out.prompt_tokens = static_cast<int64_t>(asked.ids.size());
    out.prefill = session_.prefill(asked, policy, turn.after, [this] { check_ended(); });
    out.timings.prefill = std::max(0.0, ms_since(start_) - out.timings.vision);
    if (options.guide) score_choices(out, options.guide->choices());
    generate(out, options, asked, guided ? &*guided : nullptr, std::move(divider));
  } catch (const Ended& ended) {
    out.stopped = ended.stopped;
  }
  if (guided) out.forced = guided->forced();
  if (out.threshold) judge(out);
  if (options.boxes) out.boxes = read_boxes(out.text, *model_->manifest().text.boxes, images_.front());
  describe(out, *model_, policy, options.logprobs);
  return out;
}

// Throws Error(request) for a form that cannot begin behind the thought.
void Conversation::check_form(const Options& options, const ThoughtDivider& divider) const {
  size_t choices = options.guide->choices().size();
  if (divider.inside() && choices > 0 && choices <= static_cast<size_t>(names::kMaxScored))
    fail(Kind::request, "choices are scored right behind the prompt, where a thought begins; leave choices or thoughts out");
  if (options.thinking.value_or(false) && !divider.inside())
    fail(Kind::request, "this model begins its thoughts itself, and ", options.guide->kind,
         " would leave none; leave thinking out");
}

// Finds the probability that the answer is a choice, up to its end token, for each; one pass a choice.
void Conversation::score_choices(Answer& answer, const std::vector<std::string>& choices) {
  if (choices.empty() || choices.size() > static_cast<size_t>(names::kMaxScored)) return;
  const Ids& ends = model_->manifest().text.end_ids;
  Doubles scores;
  for (const Ids& ids : model_->text().answer_ids(choices)) {
    check_ended();
    Rows rows = ids.empty() ? Rows() : session_.try_tokens(ids);
    Floats logits = answer.prefill->logits;
    double score = 0, end = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      score += log_probability(logits, ids[i]);
      logits.assign(rows.row(i), rows.row(i) + rows.width);
    }
    double most = -std::numeric_limits<double>::infinity();
    for (int64_t id : ends) most = std::max(most, log_probability(logits, id));
    for (int64_t id : ends) end += std::exp(log_probability(logits, id) - most);
    scores.push_back(score + most + std::log(end));
  }
  double best = *std::max_element(scores.begin(), scores.end()), total = 0;
  for (double& score : scores) total += score = std::exp(score - best);
  answer.choices_mass = std::min(1.0, total * std::exp(best));
  for (size_t i = 0; i < choices.size(); ++i) answer.choices.emplace_back(choices[i], scores[i] / total);
}

void Conversation::generate(Answer& answer, const Options& options, const Prompt& prompt, GuidedAnswer* guided,
                            std::optional<ThoughtDivider> divider) {
  const Ids& ends = model_->manifest().text.end_ids;
  bool limits = divider && options.max_thinking_tokens > 0;
  Ids mark = limits ? model_->text().thought_end() : Ids{};  // what is left of it, once the thought is at its limit
  Sampler sample(options.sampling, prompt.ids);
  std::optional<TextOutput> output;
  if (model_->has_text()) output.emplace(model_->text(), options.stop, std::move(divider));
  const ThoughtDivider* thoughts = output ? output->divider() : nullptr;
  Rows run;  // the logits after each token of the last pass; forced tokens ran in it with the one before them
  run.width = answer.prefill->logits.size(), run.data = std::move(answer.prefill->logits);
  size_t at = 0;
  std::optional<int64_t> chosen;  // the next token, where the device chose it and kept the logits
  bool reads_logits = guided || limits || options.logprobs || model_->manifest().text.seg_token_id;
  for (int64_t left = options.max_new_tokens; answer.stopped.empty(); --left) {
    Floats logits;
    if (!chosen) logits.assign(run.row(at), run.row(at) + run.width);
    bool thinks = thoughts && thoughts->inside();
    GuidedAnswer* form = thinks ? nullptr : guided;
    auto given = static_cast<int64_t>(answer.token_ids.size());
    bool ends_thought = thinks && !mark.empty() && given >= options.max_thinking_tokens;
    int64_t token = 0;
    if (ends_thought) {
      token = mark.front();
      mark.erase(mark.begin());
    } else {
      token = chosen ? *chosen : sample(form ? form->mask(logits) : logits);
    }
    if (form && form->imposes()) answer.imposed->push_back(log_probability(logits, token));
    bool complete = form && form->push(token);
    if (model_->manifest().text.seg_token_id == token) {
      Floats state = model_->normed(host(take(session_.states(), {static_cast<int64_t>(at)})).data);
      answer.seg_states.width = state.size();
      answer.seg_states.data.insert(answer.seg_states.data.end(), state.begin(), state.end());
    }
    double now = ms_since(start_);
    if (answer.token_ids.empty()) answer.timings.first_token = now;
    answer.token_ids.push_back(token);
    auto count = static_cast<double>(answer.token_ids.size());
    if (count > 1) answer.timings.decode_per_token = (now - answer.timings.first_token) / (count - 1);
    if (options.logprobs) answer.logprobs.push_back(log_probability(logits, token));
    std::string piece = output ? output->push(token) : "";
    if (thoughts && (thinks || thoughts->inside())) answer.thought_tokens = given + 1;
    bool ended = complete || (!options.ignore_eos && std::find(ends.begin(), ends.end(), token) != ends.end());
    if (output && output->stopped())
      answer.stopped = "stop";
    else if (ended)
      answer.stopped = "end";
    else if (left == 1)
      answer.stopped = "length";
    else if (session_.length() - static_cast<int64_t>(run.count() - at) + 2 >= session_.capacity())
      answer.stopped = "context";
    if (!answer.stopped.empty() && answer.stopped != "stop" && output) {
      piece += output->finish();
      if (output->stopped()) answer.stopped = "stop";
    }
    if (output) answer.text = output->text();
    if (thoughts) answer.thought = thoughts->thought();
    if (options.on_token && !options.on_token(token, piece)) throw Ended{"cancelled"};
    if (!answer.stopped.empty()) return;
    check_ended();
    if (++at < run.count()) continue;
    Ids next{token};
    if (form)
      for (int64_t sure : form->draft(std::min(left, session_.capacity() - session_.length()) - 2)) next.push_back(sure);
    chosen = sample.greedy() && !reads_logits ? session_.choose(token) : std::nullopt;
    if (!chosen) run = session_.decode(next);
    at = 0;
  }
}

}  // namespace vtxcore
