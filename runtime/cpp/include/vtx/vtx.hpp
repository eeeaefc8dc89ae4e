// libvtx for C++17, header only, over the C ABI of vtx.h:
//
//   #include <iostream>
//   #include <vtx/vtx.hpp>
//
//   int main() {
//     vtx::Model model("bundle");
//     vtx::Conversation picture = model.open({vtx::Image::file("photo.jpg")});
//     vtx::Answer answer = picture.ask("What is on the table?", {}, [](std::string_view text) {
//       std::cout << text << std::flush;
//       return true;
//     });
//     std::cout << "\n" << picture.ask("What colour is it?").text() << "\n";  // the image is not run again
//   }
//
// Whatever fails throws vtx::Error with one line for a person. What may be called from which thread stands in vtx.h.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "vtx/vtx.h"

namespace vtx {

class Error : public std::runtime_error {
 public:
  Error(vtx_status status, const char* message) : std::runtime_error(message), status_(status) {}
  vtx_status status() const noexcept { return status_; }

 private:
  vtx_status status_;
};

inline void check(vtx_status status) {
  if (status != VTX_OK) throw Error(status, vtx_last_error());
}

// A text as C takes it, which ends at the first zero: one that goes on behind it would be cut short there.
inline const char* text_of(const std::string& text) {
  if (text.find('\0') != std::string::npos) throw Error(VTX_REQUEST, "a text holds a zero byte; leave it out");
  return text.c_str();
}

inline const char* text_or_null(const std::string& text) { return text.empty() ? nullptr : text_of(text); }

struct LoadOptions {
  std::string device = "auto", library, fit, compute;
  int threads = 0, max_tiles = 0;
  int64_t max_pixels = 0;
  std::optional<std::string> require_signature;  // the file of the public key that must have signed the bundle
};

struct AskOptions {
  std::string k, reduce;  // empty: the bundle's defaults
  int64_t max_new_tokens = 256;
  double temperature = 0, top_p = 1;
  int64_t top_k = 0;
  std::optional<uint64_t> seed;
  double repetition_penalty = 1, gate_threshold = 0.5, timeout = 0;
  std::vector<std::string> stop;
  bool ignore_eos = false, logprobs = false, boxes = false;
  std::optional<bool> thinking;     // with or without a thought before the answer; none: as the chat template has it
  int64_t max_thinking_tokens = 0;  // after which the thought is ended; 0: no limit
  std::string guide_kind;  // the form of the answer, as in vtx.h
  std::optional<std::string> guide;
  std::optional<std::string> about;   // text by which image tokens are chosen in place of the question
  std::optional<std::string> rest;    // image tokens that stay from K on, "10%" or "57"
  std::optional<std::string> accept;  // with choices, the probability that an answer must have, "0.8" or "card"
};

struct Box {
  std::string label;
  double left, top, right, bottom;
};

// An image or a video that is about to be opened; what lies in memory must live until then.
class Image {
 public:
  static Image file(std::string path) {
    Image image;
    image.path_ = std::move(path);
    return image;
  }
  // A PNG or JPEG file in memory.
  static Image bytes(const void* data, size_t size) {
    Image image;
    image.image_.data = data;
    image.image_.bytes = size;
    image.image_.format = VTX_FILE;
    return image;
  }
  // A frame; `data2` is the second plane of NV12.
  static Image pixels(const void* data, int width, int height, size_t stride, vtx_pixel_format format,
                      const void* data2 = nullptr) {
    Image image;
    image.image_.data = data, image.image_.data2 = data2;
    image.image_.width = width, image.image_.height = height, image.image_.stride = stride;
    image.image_.format = format;
    return image;
  }
  // Frames of a video, the first one first, `fps` of them a second (0: 24), of which `sampled` are seen (0: as many as the
  // bundle says). The model must take videos.
  static Image video(std::vector<Image> frames, double fps = 0, int sampled = 0) {
    Image image;
    auto held = std::make_shared<Frames>();
    held->images = std::move(frames);
    for (const Image& frame : held->images) held->raw.push_back(frame.raw());
    image.image_.format = VTX_VIDEO;
    image.image_.frames = held->raw.data(), image.image_.frame_count = held->raw.size();
    image.image_.fps = fps, image.image_.sampled = sampled;
    image.frames_ = std::move(held);
    return image;
  }
  // The same image with another limit of tokens, as vtx.h says.
  Image with_tokens(int32_t image_tokens) const {
    Image image = *this;
    image.image_.image_tokens = image_tokens;
    return image;
  }
  vtx_image raw() const {
    vtx_image image = image_;
    image.path = path_ ? text_of(*path_) : nullptr;
    return image;
  }

 private:
  struct Frames {
    std::vector<Image> images;
    std::vector<vtx_image> raw;  // of these
  };
  Image() { vtx_image_init(&image_, sizeof image_); }
  vtx_image image_;
  std::optional<std::string> path_;
  std::shared_ptr<const Frames> frames_;
};

class Answer {
 public:
  explicit Answer(vtx_answer* answer) : answer_(answer) {}
  std::string text() const { return vtx_answer_text(answer_.get()); }
  std::string stopped() const { return vtx_answer_stopped(answer_.get()); }
  std::string json() const { return vtx_answer_json(answer_.get()); }
  std::vector<int64_t> ids() const {
    size_t count = 0;
    const int64_t* ids = vtx_answer_ids(answer_.get(), &count);
    return std::vector<int64_t>(ids, ids + count);
  }
  // Of at most 64 choices each with its probability, normalised over them.
  std::vector<std::pair<std::string, double>> choices() const {
    std::vector<std::pair<std::string, double>> out;
    double probability = 0;
    while (const char* choice = vtx_answer_choice(answer_.get(), out.size(), &probability))
      out.emplace_back(choice, probability);
    return out;
  }
  // With `boxes`, those that the answer names, in pixels of the picture as it was given.
  std::vector<Box> boxes() const {
    std::vector<Box> out;
    double corners[4] = {};
    while (const char* label = vtx_answer_box(answer_.get(), out.size(), corners))
      out.push_back({label, corners[0], corners[1], corners[2], corners[3]});
    return out;
  }
  // The thought before it, none without one.
  std::optional<std::string> thought() const {
    const char* thought = vtx_answer_thought(answer_.get());
    return thought ? std::optional<std::string>(thought) : std::nullopt;
  }
  double choices_mass() const { return vtx_answer_choices_mass(answer_.get()); }
  // Why the answer is not to be acted on; none if it is accepted, or `accept` was not given.
  std::optional<std::string> unsure() const {
    const char* reason = vtx_answer_unsure(answer_.get());
    return reason ? std::optional<std::string>(reason) : std::nullopt;
  }
  // Of each segmentation token (LISA) the hidden state that chose it; a copy.
  std::vector<std::vector<float>> seg_states() const {
    size_t count = 0, hidden = 0;
    const float* states = vtx_answer_seg_states(answer_.get(), &count, &hidden);
    std::vector<std::vector<float>> out;
    for (size_t i = 0; i < count; ++i) out.emplace_back(states + i * hidden, states + (i + 1) * hidden);
    return out;
  }

 private:
  struct Free {
    void operator()(vtx_answer* answer) const { vtx_answer_free(answer); }
  };
  std::unique_ptr<vtx_answer, Free> answer_;
};

// Gets each piece of text; false ends the answer. What it throws comes out of the call that asks.
using OnText = std::function<bool(std::string_view)>;

class Conversation {
 public:
  explicit Conversation(vtx_conversation* conversation) : conversation_(conversation) {}
  Answer ask(const std::string& question, const AskOptions& options = {}, const OnText& on_text = {}) {
    return run(options, on_text, [&](const vtx_ask_options* raw, vtx_answer** out) {
      return vtx_ask(conversation_.get(), text_of(question), raw, out);
    });
  }
  // The next turn of a chat.
  Answer chat(const std::string& question, const AskOptions& options = {}, const OnText& on_text = {}) {
    return run(options, on_text, [&](const vtx_ask_options* raw, vtx_answer** out) {
      return vtx_chat(conversation_.get(), text_of(question), raw, out);
    });
  }
  // A prompt in token ids, each image standing as one image token, each video as one video token.
  Answer ask_ids(const std::vector<int64_t>& ids, const AskOptions& options = {}, const OnText& on_text = {}) {
    return run(options, on_text, [&](const vtx_ask_options* raw, vtx_answer** out) {
      return vtx_ask_ids(conversation_.get(), ids.data(), ids.size(), raw, out);
    });
  }
  // Another conversation about the same images, which begins with what this one has of them, for another thread.
  Conversation fork() {
    vtx_conversation* forked = nullptr;
    check(vtx_conversation_fork(conversation_.get(), &forked));
    return Conversation(forked);
  }
  // Asks about other images from now on, e.g. the next frame of a camera. False, and nothing is done, where they are equal
  // to the present ones as the model sees them, or differ by at most `near`, as in vtx.h: then answers still stand.
  bool replace(const std::vector<Image>& images, double near = 0) {
    std::vector<vtx_image> raw;
    for (const Image& image : images) raw.push_back(image.raw());
    int32_t replaced = 0;
    check(vtx_conversation_replace(conversation_.get(), raw.data(), raw.size(), near, &replaced));
    return replaced != 0;
  }
  // What the caches hold of the prompt before its last image, from a file and into it.
  void load_prefix(const std::string& path) { check(vtx_conversation_load_prefix(conversation_.get(), text_of(path))); }
  void save_prefix(const std::string& path) { check(vtx_conversation_save_prefix(conversation_.get(), text_of(path))); }
  void restart_chat() { check(vtx_chat_restart(conversation_.get())); }
  // From any thread.
  void cancel() { vtx_cancel(conversation_.get()); }

 private:
  struct Stream {
    const OnText& on_text;
    std::exception_ptr thrown;
  };

  static int on_token(void* user, int64_t, const char* text, size_t length) {
    auto* stream = static_cast<Stream*>(user);
    try {
      return length == 0 || stream->on_text(std::string_view(text, length)) ? 0 : 1;
    } catch (...) {
      stream->thrown = std::current_exception();
      return 1;
    }
  }

  template <typename Call>
  static Answer run(const AskOptions& options, const OnText& on_text, Call call) {
    vtx_ask_options raw;
    vtx_ask_options_init(&raw, sizeof raw);
    raw.k = text_or_null(options.k);
    raw.reduce = text_or_null(options.reduce);
    raw.max_new_tokens = options.max_new_tokens;
    raw.temperature = options.temperature, raw.top_p = options.top_p, raw.top_k = options.top_k;
    raw.has_seed = options.seed.has_value(), raw.seed = options.seed.value_or(0);
    raw.repetition_penalty = options.repetition_penalty, raw.gate_threshold = options.gate_threshold;
    raw.timeout = options.timeout, raw.ignore_eos = options.ignore_eos, raw.logprobs = options.logprobs;
    raw.boxes = options.boxes;
    if (options.thinking) raw.thinking = *options.thinking ? 1 : -1;
    raw.max_thinking_tokens = options.max_thinking_tokens;
    raw.guide_kind = text_of(options.guide_kind), raw.guide = options.guide ? text_of(*options.guide) : nullptr;
    raw.about = options.about ? text_of(*options.about) : nullptr;
    raw.rest = options.rest ? text_of(*options.rest) : nullptr;
    raw.accept = options.accept ? text_of(*options.accept) : nullptr;
    std::vector<const char*> stop;
    for (const std::string& text : options.stop) stop.push_back(text_of(text));
    raw.stop = stop.data(), raw.stop_count = stop.size();
    Stream stream{on_text, nullptr};
    if (on_text) raw.on_token = on_token, raw.user = &stream;
    vtx_answer* answer = nullptr;
    vtx_status status = call(&raw, &answer);
    Answer out(answer);
    if (stream.thrown) std::rethrow_exception(stream.thrown);
    check(status);
    return out;
  }

  struct Free {
    void operator()(vtx_conversation* conversation) const { vtx_conversation_free(conversation); }
  };
  std::unique_ptr<vtx_conversation, Free> conversation_;
};

struct ActOptions {
  std::string k;      // empty: the bundle's default
  int64_t steps = 0;  // 0: the checkpoint's
  bool normalized = false;
  std::vector<float> noise;  // [horizon, width of the model]; empty: drawn
  std::optional<uint64_t> seed;
  double deadline_ms = 0;            // 0: none
  std::vector<std::string> cameras;  // of each image; empty: in the bundle's order
  std::string unnorm_key;            // OpenVLA: the data set whose units the actions have; empty: the only one
  std::string reduce;                // OpenVLA: as in AskOptions
};

// The next actions of a robot, [horizon, width].
class Actions {
 public:
  explicit Actions(vtx_actions* actions) : actions_(actions) { values_ = vtx_actions_values(actions, &horizon_, &width_); }
  size_t horizon() const { return horizon_; }
  size_t width() const { return width_; }
  // The numbers of one moment, which belong to the actions.
  const float* operator[](size_t moment) const { return values_ + moment * width_; }
  std::string json() const { return vtx_actions_json(actions_.get()); }

 private:
  struct Free {
    void operator()(vtx_actions* actions) const { vtx_actions_free(actions); }
  };
  std::unique_ptr<vtx_actions, Free> actions_;
  size_t horizon_ = 0, width_ = 0;
  const float* values_;
};

class Model {
 public:
  explicit Model(const std::string& bundle, const LoadOptions& options = {}) {
    vtx_load_options raw;
    vtx_load_options_init(&raw, sizeof raw);
    raw.device = text_of(options.device);
    raw.library = text_or_null(options.library);
    raw.fit = text_or_null(options.fit);
    raw.threads = options.threads, raw.max_tiles = options.max_tiles, raw.max_pixels = options.max_pixels;
    raw.require_signature = options.require_signature ? text_of(*options.require_signature) : nullptr;
    raw.compute = text_or_null(options.compute);
    vtx_model* model = nullptr;
    check(vtx_load(text_of(bundle), &raw, &model));
    model_.reset(model);
  }
  Conversation open(const std::vector<Image>& images = {}, const std::optional<std::string>& system = {}) {
    std::vector<vtx_image> raw;
    for (const Image& image : images) raw.push_back(image.raw());
    vtx_conversation* conversation = nullptr;
    check(vtx_open(model_.get(), raw.data(), raw.size(), system ? text_of(*system) : nullptr, &conversation));
    return Conversation(conversation);
  }
  // The next actions of a robot whose cameras show these images. Only of a model that makes actions; OpenVLA reads no state.
  Actions act(const std::vector<Image>& images, const std::string& instruction, const std::vector<float>& state,
              const ActOptions& options = {}) {
    std::vector<vtx_image> raw;
    for (const Image& image : images) raw.push_back(image.raw());
    vtx_act_options o;
    vtx_act_options_init(&o, sizeof o);
    o.k = text_or_null(options.k), o.steps = options.steps, o.normalized = options.normalized;
    o.noise = options.noise.empty() ? nullptr : options.noise.data(), o.noise_count = options.noise.size();
    o.has_seed = options.seed.has_value(), o.seed = options.seed.value_or(0), o.deadline_ms = options.deadline_ms;
    o.unnorm_key = text_or_null(options.unnorm_key), o.reduce = text_or_null(options.reduce);
    std::vector<const char*> cameras;
    for (const std::string& camera : options.cameras) cameras.push_back(text_of(camera));
    if (!cameras.empty() && cameras.size() != images.size())
      throw Error(VTX_REQUEST, "cameras are named, and their number is not that of the images; name each image's");
    o.cameras = cameras.empty() ? nullptr : cameras.data();
    vtx_actions* actions = nullptr;
    check(vtx_act(model_.get(), raw.data(), raw.size(), text_of(instruction), state.data(), state.size(), &o, &actions));
    return Actions(actions);
  }
  std::string json() const { return vtx_model_json(model_.get()); }

 private:
  struct Free {
    void operator()(vtx_model* model) const { vtx_model_free(model); }
  };
  std::unique_ptr<vtx_model, Free> model_;
};

}  // namespace vtx
