// The C ABI over the classes of this library: no exception leaves it.
#include <algorithm>
#include <cstring>
#include <new>

#include "api/acting.hpp"
#include "api/conversation.hpp"
#include "api/handles.hpp"
#include "base/checks.hpp"
#include "base/utf8.hpp"
#include "vtx/vtx.h"

struct vtx_model {
  std::shared_ptr<vtxcore::Model> model;
  std::string json;
  std::unique_ptr<vtxcore::Actor> actor;  // made by the first actions
  std::mutex lock;                        // while it is
};

struct vtx_actions {
  vtxcore::Rows values;
  std::string json;
};

struct vtx_conversation {
  template <typename... Parts>
  explicit vtx_conversation(Parts&&... parts) : conversation(std::forward<Parts>(parts)...) {}
  vtxcore::Conversation conversation;
};

struct vtx_answer {
  vtxcore::Answer answer;
  std::string json;
};

namespace {

thread_local std::string last_error;

vtx_status failed(vtx_status status, const char* message) noexcept {
  try {
    // A path or a spec of the caller's may stand in it, whatever its bytes.
    last_error = vtxcore::first_invalid_utf8(message) == std::string::npos
                     ? message
                     : vtxcore::encode_utf8(vtxcore::decode_utf8(message));
  } catch (...) {
    last_error.clear();
  }
  return status;
}

vtx_status status_of(vtxcore::Kind kind) {
  switch (kind) {
    case vtxcore::Kind::request: return VTX_REQUEST;
    case vtxcore::Kind::context: return VTX_CONTEXT;
    case vtxcore::Kind::busy: return VTX_BUSY;
    case vtxcore::Kind::templates: return VTX_TEMPLATE;
    case vtxcore::Kind::image: return VTX_IMAGE;
    case vtxcore::Kind::bundle: return VTX_BUNDLE;
    case vtxcore::Kind::device: return VTX_DEVICE;
    case vtxcore::Kind::closed: return VTX_REQUEST;
    case vtxcore::Kind::late: return VTX_DEADLINE;
  }
  return VTX_INTERNAL;
}

template <typename Work>
vtx_status guarded(Work&& work) noexcept {
  try {
    work();
    return VTX_OK;
  } catch (const vtxcore::Error& error) {
    return failed(status_of(error.kind()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(VTX_MEMORY, "there is no memory left; end other programs, or ask about fewer images");
  } catch (const std::exception& error) {
    return failed(VTX_INTERNAL, error.what());
  } catch (...) {
    return failed(VTX_INTERNAL, "a fault of libvtx");
  }
}

[[noreturn]] void refuse(const void* given, const char* what) {
  vtxcore::fail(vtxcore::Kind::request, what, given ? " was freed, or never made" : " is NULL", "; give one that is there");
}

template <typename Pointer>
void require(Pointer pointer, const char* what) {
  if (!pointer) refuse(nullptr, what);
}

// What a handle stands for, held for as long as the call takes. Throws Error(request).
template <typename Object>
std::shared_ptr<Object> living(const Object* handle, const char* what) {
  std::shared_ptr<Object> found = vtxcore::Handles<Object>::all().find(handle);
  if (!found) refuse(handle, what);
  return found;
}

// The same for calls without a status: null if there is none.
template <typename Object>
std::shared_ptr<Object> found(const Object* handle) {
  return vtxcore::Handles<Object>::all().find(handle);
}

template <typename Object>
Object* handed_out(std::shared_ptr<Object> object) {
  return vtxcore::Handles<Object>::all().add(std::move(object));
}

std::string text_or(const char* text, const char* otherwise) { return text ? text : otherwise; }

// Writes the defaults into a struct of the caller's header, of which `size` bytes are there.
template <typename Struct>
void fill(Struct* given, size_t size, Struct defaults) {
  if (!given || size < sizeof(size_t)) return;
  std::memset(static_cast<void*>(given), 0, size);
  std::memcpy(static_cast<void*>(given), &defaults, std::min(size, sizeof defaults));
  given->size = size;
}

// `given` as this library knows the struct; fields that an older header lacks keep their defaults, and those of a newer
// one must not be set: what they ask for would not be done.
template <typename Struct>
Struct known(const Struct* given, void (*init)(Struct*, size_t)) {
  Struct out;
  init(&out, sizeof out);
  if (!given) return out;
  auto refuse = [](const std::string& wrong) {
    vtxcore::fail(vtxcore::Kind::request, "a struct ", wrong,
                  "; fill it with the _init function of the libvtx that takes it");
  };
  if (given->size < sizeof(size_t) || given->size > 1 << 16 || given->size % alignof(Struct) != 0)
    refuse(vtxcore::cat("has the size ", given->size));
  auto bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof out; i < given->size; ++i)
    if (bytes[i] != 0) refuse(vtxcore::cat("sets a field that libvtx ", vtx_version(), " does not know"));
  std::memcpy(static_cast<void*>(&out), given, std::min(given->size, sizeof out));
  return out;
}

vtxcore::Options options_of(const vtx_ask_options* given) {
  vtx_ask_options o = known(given, vtx_ask_options_init);
  vtxcore::Options out;
  out.k = text_or(o.k, "default"), out.reduce = text_or(o.reduce, "default");
  out.max_new_tokens = o.max_new_tokens;
  out.sampling.temperature = o.temperature, out.sampling.top_p = o.top_p, out.sampling.top_k = o.top_k;
  if (o.has_seed) out.sampling.seed = o.seed;
  out.sampling.repetition_penalty = o.repetition_penalty;
  out.gate_threshold = o.gate_threshold, out.timeout = o.timeout;
  out.ignore_eos = o.ignore_eos != 0, out.logprobs = o.logprobs != 0, out.boxes = o.boxes != 0;
  if (o.thinking) out.thinking = o.thinking > 0;
  out.max_thinking_tokens = o.max_thinking_tokens;
  if (o.about) out.about = o.about;
  if (o.rest) out.rest = o.rest;
  if (o.accept) out.accept = o.accept;
  if (o.guide) out.guide = vtxcore::Guide{text_or(o.guide_kind, ""), o.guide};
  if (o.stop_count) require(o.stop, "stop");
  vtxcore::check_stop_count(o.stop_count);
  for (size_t i = 0; i < o.stop_count; ++i) out.stop.push_back(text_or(o.stop[i], ""));
  if (o.on_token)
    out.on_token = [o](int64_t token, const std::string& text) {
      return o.on_token(o.user, token, text.c_str(), text.size()) == 0;
    };
  return out;
}

// Read as a number: a value that the enumeration lacks is none of its values.
unsigned format_of(const vtx_image& image) {
  unsigned number = 0;
  static_assert(sizeof number == sizeof image.format);
  std::memcpy(&number, &image.format, sizeof number);
  return number;
}

vtxcore::Picture picture_of(const vtx_image& given) {
  vtx_image image = known(&given, vtx_image_init);
  unsigned number = format_of(image);
  vtxcore::check_whole("the pixel format", number, 0, VTX_YUYV);
  if (image.path) return vtxcore::read_picture(image.path);
  auto data = static_cast<const uint8_t*>(image.data);
  require(data, "the image's data");
  if (number == VTX_FILE) {
    if (image.bytes > static_cast<size_t>(vtxcore::names::kMaxFileBytes))
      vtxcore::fail(vtxcore::Kind::image, "the image is over ", vtxcore::names::kMaxFileBytes >> 20,
                    " MiB, the limit for a file; save it smaller");
    return vtxcore::decode_picture(std::string(static_cast<const char*>(image.data), image.bytes), "the image");
  }
  static constexpr vtxcore::PixelFormat kFormats[] = {
      vtxcore::PixelFormat::rgb8,  vtxcore::PixelFormat::bgr8, vtxcore::PixelFormat::rgba8, vtxcore::PixelFormat::bgra8,
      vtxcore::PixelFormat::gray8, vtxcore::PixelFormat::nv12, vtxcore::PixelFormat::gray8, vtxcore::PixelFormat::yuyv};
  auto second = static_cast<const uint8_t*>(image.data2);
  if (number == VTX_NV12) require(second, "the image's data2");
  return vtxcore::from_buffer(data, second, image.width, image.height, image.stride, kFormats[number]);
}

// Each of the images in a list of the caller's header.
std::vector<const vtx_image*> listed(const vtx_image* images, size_t count, const char* what) {
  if (count) require(images, what);
  std::vector<const vtx_image*> out;
  const char* next = reinterpret_cast<const char*>(images);
  for (size_t i = 0; i < count; ++i) {
    out.push_back(reinterpret_cast<const vtx_image*>(next));
    next += known(out.back(), vtx_image_init).size;
  }
  return out;
}

std::vector<vtxcore::PreparedImage> prepared(const vtxcore::Model& model, const vtx_image* images, size_t count) {
  std::vector<vtxcore::PreparedImage> out;
  std::vector<const vtx_image*> all = listed(images, count, "the list of images");
  auto is_video = [](const vtx_image* image) { return format_of(known(image, vtx_image_init)) == VTX_VIDEO; };
  auto videos = static_cast<size_t>(std::count_if(all.begin(), all.end(), is_video));
  for (const vtx_image* each : all) {
    if (!is_video(each)) {
      int64_t tokens = known(each, vtx_image_init).image_tokens;
      out.push_back(model.prepare(picture_of(*each), "", count - videos, tokens));
      continue;
    }
    vtx_image video = known(each, vtx_image_init);
    if (video.image_tokens != 0)
      vtxcore::fail(vtxcore::Kind::request, "image_tokens is for images, not for videos and texts; leave it out");
    std::vector<const vtx_image*> frames = listed(video.frames, video.frame_count, "the list of frames");
    auto frame = [&](int64_t number) { return picture_of(*frames[static_cast<size_t>(number)]); };
    out.push_back(model.prepare(vtxcore::Video{static_cast<int64_t>(frames.size()), frame, video.fps, video.sampled}));
  }
  return model.ordered(std::move(out));
}

vtxcore::ActOptions act_options_of(const vtx_act_options* given, size_t images) {
  vtx_act_options o = known(given, vtx_act_options_init);
  vtxcore::ActOptions out;
  out.k = text_or(o.k, "default");
  if (o.steps) out.steps = o.steps;
  out.normalized = o.normalized != 0, out.deadline_ms = o.deadline_ms;
  if (o.noise_count) require(o.noise, "the noise");
  if (o.noise) out.noise = vtxcore::Floats(o.noise, o.noise + o.noise_count);
  if (o.has_seed) out.seed = o.seed;
  if (o.unnorm_key) out.unnorm_key = o.unnorm_key;
  out.reduce = text_or(o.reduce, "default");
  if (o.cameras) out.cameras.emplace();
  for (size_t i = 0; o.cameras && i < images; ++i) out.cameras->push_back(text_or(o.cameras[i], ""));
  return out;
}

vtx_answer* answer_of(vtxcore::Answer answer) {
  std::string json = answer.json.dump();
  return handed_out(std::make_shared<vtx_answer>(vtx_answer{std::move(answer), std::move(json)}));
}

std::string model_json(const vtxcore::Model& model) {
  const vtxcore::Manifest& m = model.manifest();
  vtxcore::Json::Array ks(m.variants.begin(), m.variants.end()), reductions(m.reductions.begin(), m.reductions.end());
  vtxcore::Json action;
  if (m.bins) {
    vtxcore::Json::Object widths;
    for (const vtxcore::ActionRange& range : m.bins->ranges) widths.emplace_back(range.name, range.low.size());
    action = vtxcore::Json::Object{{"widths", widths}, {"horizon", 1}};
  }
  if (const auto& a = m.action)
    action = vtxcore::Json::Object{{"state", a->of_states ? vtxcore::Json(a->of_states->first.size()) : vtxcore::Json()},
                                   {"width", a->of_actions ? vtxcore::Json(a->of_actions->first.size()) : vtxcore::Json()},
                                   {"normalized_state", a->state},
                                   {"normalized_width", a->width},
                                   {"horizon", a->horizon},
                                   {"steps", a->steps},
                                   {"cameras", vtxcore::Json::Array(a->cameras.begin(), a->cameras.end())}};
  return vtxcore::Json(vtxcore::Json::Object{{"name", m.model.name},
                                             {"action", action},
                                             {"layers", m.model.layers},
                                             {"precision", m.precision},
                                             {"kv_dtype", m.kv_dtype},
                                             {"max_context", m.max_context},
                                             {"image_tokens", m.layout.max_tokens},
                                             {"variants", ks},
                                             {"default_k", model.default_k()},
                                             {"reductions", reductions},
                                             {"device", model.backend().device},
                                             {"compute", model.backend().compute},
                                             {"engine", model.backend().library},
                                             {"load_ms", model.load_ms()},
                                             {"card", model.card().empty() ? vtxcore::Json() : model.card()}})
      .dump();
}

template <typename Ask>
vtx_status asked(vtx_conversation* conversation, const vtx_ask_options* options, vtx_answer** answer, Ask ask) {
  if (answer) *answer = nullptr;
  return guarded([&] {
    std::shared_ptr<vtx_conversation> held = living(conversation, "the conversation");
    require(answer, "the place for the answer");
    *answer = answer_of(ask(held->conversation, options_of(options)));
  });
}

}  // namespace

extern "C" {

const char* vtx_version(void) { return VTX_VERSION; }
int vtx_api_version(void) { return VTX_API_VERSION; }
const char* vtx_last_error(void) { return last_error.c_str(); }

void vtx_load_options_init(vtx_load_options* options, size_t size) { fill(options, size, vtx_load_options{}); }

void vtx_image_init(vtx_image* image, size_t size) { fill(image, size, vtx_image{}); }

void vtx_ask_options_init(vtx_ask_options* options, size_t size) {
  vtx_ask_options defaults{};
  defaults.max_new_tokens = 256;
  defaults.top_p = 1;
  defaults.repetition_penalty = 1;
  defaults.gate_threshold = 0.5;
  fill(options, size, defaults);
}

vtx_status vtx_load(const char* bundle, const vtx_load_options* given, vtx_model** model) {
  if (model) *model = nullptr;
  return guarded([&] {
    require(bundle, "the bundle");
    require(model, "the place for the model");
    vtx_load_options o = known(given, vtx_load_options_init);
    vtxcore::LoadOptions options{text_or(o.device, "auto"),
                                 text_or(o.library, ""),
                                 o.threads,
                                 text_or(o.compute, ""),
                                 text_or(o.fit, ""),
                                 o.max_tiles,
                                 o.max_pixels,
                                 {}};
    if (o.require_signature) options.require_signature = o.require_signature;
    auto out = std::make_shared<vtx_model>();
    out->model = std::make_shared<vtxcore::Model>(bundle, options);
    out->json = model_json(*out->model);
    *model = handed_out(std::move(out));
  });
}

void vtx_model_free(vtx_model* model) { vtxcore::Handles<vtx_model>::all().take(model); }

const char* vtx_model_json(const vtx_model* model) {
  auto held = found(model);
  return held ? held->json.c_str() : "null";
}

vtx_status vtx_open(vtx_model* model, const vtx_image* images, size_t count, const char* system,
                    vtx_conversation** conversation) {
  if (conversation) *conversation = nullptr;
  return guarded([&] {
    std::shared_ptr<vtx_model> held = living(model, "the model");
    require(conversation, "the place for the conversation");
    std::optional<std::string> prompt;
    if (system) prompt = system;
    *conversation = handed_out(
        std::make_shared<vtx_conversation>(held->model, prepared(*held->model, images, count), std::move(prompt)));
  });
}

vtx_status vtx_conversation_fork(vtx_conversation* conversation, vtx_conversation** forked) {
  if (forked) *forked = nullptr;
  return guarded([&] {
    std::shared_ptr<vtx_conversation> held = living(conversation, "the conversation");
    require(forked, "the place for the conversation");
    *forked = handed_out(std::make_shared<vtx_conversation>(held->conversation));
  });
}

vtx_status vtx_conversation_replace(vtx_conversation* conversation, const vtx_image* images, size_t count, double near,
                                    int32_t* replaced) {
  if (replaced) *replaced = 0;
  return guarded([&] {
    std::shared_ptr<vtx_conversation> held = living(conversation, "the conversation");
    bool done = held->conversation.replace(prepared(held->conversation.model(), images, count), near);
    if (replaced) *replaced = done;
  });
}

vtx_status vtx_conversation_load_prefix(vtx_conversation* conversation, const char* path) {
  return guarded([&] {
    require(path, "the path");
    living(conversation, "the conversation")->conversation.load_prefix(path);
  });
}

vtx_status vtx_conversation_save_prefix(vtx_conversation* conversation, const char* path) {
  return guarded([&] {
    require(path, "the path");
    living(conversation, "the conversation")->conversation.save_prefix(path);
  });
}

void vtx_conversation_free(vtx_conversation* conversation) {
  if (auto held = vtxcore::Handles<vtx_conversation>::all().take(conversation)) held->conversation.close();
}

vtx_status vtx_ask(vtx_conversation* conversation, const char* question, const vtx_ask_options* options,
                   vtx_answer** answer) {
  return asked(conversation, options, answer, [&](vtxcore::Conversation& held, const vtxcore::Options& o) {
    require(question, "the question");
    return held.ask(question, o);
  });
}

vtx_status vtx_chat(vtx_conversation* conversation, const char* question, const vtx_ask_options* options,
                    vtx_answer** answer) {
  return asked(conversation, options, answer, [&](vtxcore::Conversation& held, const vtxcore::Options& o) {
    require(question, "the question");
    return held.chat(question, o);
  });
}

vtx_status vtx_chat_restart(vtx_conversation* conversation) {
  return guarded([&] { living(conversation, "the conversation")->conversation.restart_chat(); });
}

vtx_status vtx_ask_ids(vtx_conversation* conversation, const int64_t* ids, size_t count, const vtx_ask_options* options,
                       vtx_answer** answer) {
  return asked(conversation, options, answer, [&](vtxcore::Conversation& held, const vtxcore::Options& o) {
    if (count) require(ids, "the list of ids");
    return held.ask_ids(vtxcore::Ids(ids, ids + count), o);
  });
}

void vtx_cancel(vtx_conversation* conversation) {
  if (auto held = found(conversation)) held->conversation.cancel();
}

const char* vtx_answer_text(const vtx_answer* answer) {
  auto held = found(answer);
  return held ? held->answer.text.c_str() : "";
}

const int64_t* vtx_answer_ids(const vtx_answer* answer, size_t* count) {
  auto held = found(answer);
  if (count) *count = held ? held->answer.token_ids.size() : 0;
  return held ? held->answer.token_ids.data() : nullptr;
}

const float* vtx_answer_seg_states(const vtx_answer* answer, size_t* count, size_t* hidden) {
  auto held = found(answer);
  const vtxcore::Rows* states = held ? &held->answer.seg_states : nullptr;
  if (count) *count = states ? states->count() : 0;
  if (hidden) *hidden = states ? states->width : 0;
  return states && states->count() > 0 ? states->data.data() : nullptr;
}

const char* vtx_answer_choice(const vtx_answer* answer, size_t index, double* probability) {
  auto held = found(answer);
  bool there = held && index < held->answer.choices.size();
  if (probability) *probability = there ? held->answer.choices[index].second : 0;
  return there ? held->answer.choices[index].first.c_str() : nullptr;
}

double vtx_answer_choices_mass(const vtx_answer* answer) {
  auto held = found(answer);
  return held ? held->answer.choices_mass : 0;
}

const char* vtx_answer_box(const vtx_answer* answer, size_t index, double corners[4]) {
  auto held = found(answer);
  if (!held || !held->answer.boxes || index >= held->answer.boxes->size()) return nullptr;
  const vtxcore::Box& box = (*held->answer.boxes)[index];
  if (corners) corners[0] = box.left, corners[1] = box.top, corners[2] = box.right, corners[3] = box.bottom;
  return box.label.c_str();
}

const char* vtx_answer_thought(const vtx_answer* answer) {
  auto held = found(answer);
  return held && held->answer.thought ? held->answer.thought->c_str() : nullptr;
}

const char* vtx_answer_unsure(const vtx_answer* answer) {
  auto held = found(answer);
  return held && held->answer.unsure ? held->answer.unsure->c_str() : nullptr;
}

int64_t vtx_answer_imposed(const vtx_answer* answer, double* mean_logprob, double* least_logprob) {
  auto held = found(answer);
  vtxcore::Imposed imposed = held && held->answer.imposed ? vtxcore::Imposed::of(*held->answer.imposed) : vtxcore::Imposed{};
  if (mean_logprob) *mean_logprob = imposed.mean;
  if (least_logprob) *least_logprob = imposed.least;
  return imposed.tokens;
}

const char* vtx_answer_stopped(const vtx_answer* answer) {
  auto held = found(answer);
  return held ? held->answer.stopped.c_str() : "";
}

const char* vtx_answer_json(const vtx_answer* answer) {
  auto held = found(answer);
  return held ? held->json.c_str() : "null";
}

void vtx_answer_free(vtx_answer* answer) { vtxcore::Handles<vtx_answer>::all().take(answer); }

void vtx_act_options_init(vtx_act_options* options, size_t size) { fill(options, size, vtx_act_options{}); }

vtx_status vtx_act(vtx_model* model, const vtx_image* images, size_t count, const char* instruction, const float* state,
                   size_t state_count, const vtx_act_options* options, vtx_actions** actions) {
  if (actions) *actions = nullptr;
  return guarded([&] {
    std::shared_ptr<vtx_model> held = living(model, "the model");
    require(actions, "the place for the actions");
    require(instruction, "the instruction");
    if (state_count) require(state, "the state");
    {
      std::lock_guard<std::mutex> making(held->lock);
      if (!held->actor) held->actor = vtxcore::make_actor(held->model);
    }
    std::vector<vtxcore::Picture> pictures;
    for (const vtx_image* image : listed(images, count, "the list of images")) pictures.push_back(picture_of(*image));
    vtxcore::Floats given(state, state + state_count);
    vtxcore::Actions found = held->actor->act(pictures, instruction, given, act_options_of(options, count));
    std::string json = found.json.dump();
    *actions = handed_out(std::make_shared<vtx_actions>(vtx_actions{std::move(found.values), std::move(json)}));
  });
}

const float* vtx_actions_values(const vtx_actions* actions, size_t* horizon, size_t* width) {
  auto held = found(actions);
  if (horizon) *horizon = held ? held->values.count() : 0;
  if (width) *width = held ? held->values.width : 0;
  return held ? held->values.data.data() : nullptr;
}

const char* vtx_actions_json(const vtx_actions* actions) {
  auto held = found(actions);
  return held ? held->json.c_str() : "null";
}

void vtx_actions_free(vtx_actions* actions) { vtxcore::Handles<vtx_actions>::all().take(actions); }

}  // extern "C"
