// vtx-cpp-misuse BUNDLE PICTURE [OTHER_BUNDLE]: what vtx.h does not allow, and memory that runs out anywhere in libvtx; for
// the tests and the sanitizers. Ends with 1 at the first thing that is not refused as it should be, or that leaves a model
// which cannot be used on.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <new>
#include <thread>
#include <utility>

#include "vtx/vtx.hpp"

// --- allocations of libvtx's own code, of which one can be made to fail ---

namespace {

thread_local int64_t left = -1;   // allocations until one fails; negative: none does
thread_local int64_t failed = 0;  // how many did

bool in_libvtx(const void* caller) {
  static const void* const base = [] {
    Dl_info info{};
    return dladdr(reinterpret_cast<const void*>(&vtx_version), &info) ? info.dli_fbase : nullptr;
  }();
  Dl_info info{};
  return dladdr(caller, &info) != 0 && info.dli_fbase == base;
}

// Null where this allocation is the one to fail.
void* attempt(size_t bytes, const void* caller) noexcept {
  if (left >= 0 && in_libvtx(caller)) {
    --left;
    if (left < 0) {
      ++failed;
      return nullptr;
    }
  }
  return std::malloc(bytes ? bytes : 1);
}

void* allocate(size_t bytes, const void* caller) {
  void* memory = attempt(bytes, caller);
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Not inlined: where GCC 12 sees one of a pair and not the other, it warns that they do not belong together.
[[gnu::noinline]] void* operator new(size_t bytes) { return allocate(bytes, __builtin_return_address(0)); }
[[gnu::noinline]] void* operator new[](size_t bytes) { return allocate(bytes, __builtin_return_address(0)); }
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return attempt(bytes, __builtin_return_address(0));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace {

struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(bool fine, const std::string& what) {
  if (!fine) throw Wrong(what + " (" + vtx_last_error() + ")");
}

void refused(vtx_status status, vtx_status wanted, const char* word, const std::string& what) {
  std::string said = vtx_last_error();
  require(status == wanted && said.find(word) != std::string::npos, what + " has status " + std::to_string(status));
}

using Tokens = std::vector<int64_t>;

vtx::AskOptions few() {
  vtx::AskOptions options;
  options.max_new_tokens = 4;
  options.ignore_eos = true;
  return options;
}

vtx_load_options loading() {
  vtx_load_options options;
  vtx_load_options_init(&options, sizeof options);
  options.threads = 1;
  options.device = "cpu";
  return options;
}

vtx_ask_options asking(vtx_on_token on_token, void* user) {
  vtx_ask_options options;
  vtx_ask_options_init(&options, sizeof options);
  options.max_new_tokens = 4, options.ignore_eos = 1;
  options.on_token = on_token, options.user = user;
  return options;
}

vtx_image file_image(const std::string& path) {
  vtx_image image;
  vtx_image_init(&image, sizeof image);
  image.path = path.c_str();
  return image;
}

vtx_conversation* opened(vtx_model* model, const std::string& picture) {
  vtx_image image = file_image(picture);
  vtx_conversation* conversation = nullptr;
  require(vtx_open(model, &image, 1, nullptr, &conversation) == VTX_OK, "opening");
  return conversation;
}

Tokens ask(vtx_conversation* conversation) {
  vtx_ask_options options = asking(nullptr, nullptr);
  vtx_answer* answer = nullptr;
  require(vtx_ask(conversation, "red?", &options, &answer) == VTX_OK, "asking");
  size_t count = 0;
  const int64_t* ids = vtx_answer_ids(answer, &count);
  Tokens out(ids, ids + count);
  vtx_answer_free(answer);
  return out;
}

// --- handles ---

void freed_handles(vtx_model* model, const std::string& picture) {
  vtx_conversation* conversation = opened(model, picture);
  vtx_answer* answer = nullptr;
  require(vtx_ask(conversation, "red?", nullptr, &answer) == VTX_OK, "asking");
  vtx_answer_free(answer);
  vtx_answer_free(answer);
  size_t count = 7;
  require(vtx_answer_ids(answer, &count) == nullptr && count == 0, "ids of a freed answer");
  require(*vtx_answer_text(answer) == 0 && std::string(vtx_answer_json(answer)) == "null", "a freed answer");
  vtx_conversation_free(conversation);
  vtx_conversation_free(conversation);
  vtx_cancel(conversation);
  refused(vtx_ask(conversation, "red?", nullptr, &answer), VTX_REQUEST, "was freed", "a freed conversation");
  refused(vtx_chat_restart(conversation), VTX_REQUEST, "was freed", "a freed conversation");
  refused(vtx_conversation_replace(conversation, nullptr, 0, 0, nullptr), VTX_REQUEST, "was freed", "a freed conversation");
  vtx_conversation* forked = conversation;
  refused(vtx_conversation_fork(conversation, &forked), VTX_REQUEST, "was freed", "a freed conversation");
  require(forked == nullptr, "a fork of a freed conversation");
  refused(vtx_conversation_load_prefix(conversation, "file"), VTX_REQUEST, "was freed", "a freed conversation");
  refused(vtx_conversation_save_prefix(conversation, "file"), VTX_REQUEST, "was freed", "a freed conversation");
  auto* other = reinterpret_cast<vtx_conversation*>(model);
  refused(vtx_ask(other, "red?", nullptr, &answer), VTX_REQUEST, "or never made", "a model in place of a conversation");
  auto* none = reinterpret_cast<vtx_model*>(conversation);
  refused(vtx_open(none, nullptr, 0, nullptr, &conversation), VTX_REQUEST, "the model was freed", "another handle");
}

int frees_its_conversation(void* user, int64_t, const char*, size_t) {
  vtx_conversation_free(*static_cast<vtx_conversation**>(user));
  return 0;
}

// Freed by the callback, then by another thread, at any moment of an answer.
void freed_while_it_answers(vtx_model* model, const std::string& picture) {
  vtx_conversation* conversation = opened(model, picture);
  vtx_ask_options options = asking(frees_its_conversation, static_cast<void*>(&conversation));
  vtx_answer* answer = nullptr;
  require(vtx_ask(conversation, "red?", &options, &answer) == VTX_OK, "a conversation freed by its callback");
  require(std::string(vtx_answer_stopped(answer)) == "cancelled", "what is freed while it answers is cancelled");
  vtx_answer_free(answer);
  for (int round = 0; round < 8; ++round) {
    conversation = opened(model, picture);
    options = asking(nullptr, nullptr);
    std::thread other([conversation, round] {
      std::this_thread::sleep_for(std::chrono::milliseconds(round));
      vtx_conversation_free(conversation);
    });
    vtx_status status = vtx_ask(conversation, "red?", &options, &answer);
    other.join();
    require(status == VTX_OK || status == VTX_REQUEST, "a conversation freed by another thread");
    vtx_answer_free(answer);
  }
}

// Freed between the call and its first step: long stop strings are copied meanwhile.
void freed_before_it_answers(vtx_model* model, const std::string& picture) {
  const std::string text(1 << 20, 'x');
  const std::vector<const char*> stop(16, text.c_str());
  for (int round = 1; round < 5; ++round) {
    vtx_conversation* conversation = opened(model, picture);
    vtx_ask_options options = asking(nullptr, nullptr);
    options.stop = stop.data(), options.stop_count = stop.size();
    std::thread other([conversation, round] {
      std::this_thread::sleep_for(std::chrono::milliseconds(round));
      vtx_conversation_free(conversation);
    });
    vtx_answer* answer = nullptr;
    vtx_status status = vtx_ask(conversation, "red?", &options, &answer);
    other.join();
    bool ended = status == VTX_OK && std::string(vtx_answer_stopped(answer)) == "cancelled";
    require(ended || status == VTX_REQUEST, "what is freed before it answers is cancelled");
    vtx_answer_free(answer);
  }
}

// --- callbacks ---

int throws(void*, int64_t, const char*, size_t) { throw std::runtime_error("from the application"); }

void callbacks_that_throw(vtx_model* model, const std::string& picture, const Tokens& expected) {
  vtx_conversation* conversation = opened(model, picture);
  vtx_ask_options options = asking(throws, nullptr);
  vtx_answer* answer = nullptr;
  refused(vtx_ask(conversation, "red?", &options, &answer), VTX_INTERNAL, "from the application", "a callback that throws");
  require(ask(conversation) == expected, "after a callback that threw");
  vtx_conversation_free(conversation);
}

void callbacks_that_throw_in_cpp(vtx::Model& model, const std::string& picture, const Tokens& expected) {
  vtx::Conversation conversation = model.open({vtx::Image::file(picture)});
  bool caught = false;
  try {
    conversation.ask("red?", few(), [](std::string_view) -> bool { throw std::out_of_range("mine"); });
  } catch (const std::out_of_range& mine) {
    caught = std::string(mine.what()) == "mine";
  }
  require(caught, "what a callback throws comes out of ask");
  require(conversation.ask("red?", few()).ids() == expected, "after what a callback threw");
}

// --- values ---

template <typename Work>
void throws_error(vtx_status wanted, const char* word, Work work) {
  try {
    work();
  } catch (const vtx::Error& error) {
    require(error.status() == wanted && std::string(error.what()).find(word) != std::string::npos,
            std::string("another refusal than ") + word + ": " + error.what());
    return;
  }
  throw Wrong(std::string("not refused: ") + word);
}

void frames(vtx::Model& model) {
  std::vector<uint8_t> pixels(size_t{64} * 64 * 4, 128);
  auto open = [&](int width, int height, size_t stride, int format) {
    return [&model, &pixels, width, height, stride, format] {
      model.open({vtx::Image::pixels(pixels.data(), width, height, stride, static_cast<vtx_pixel_format>(format))});
    };
  };
  for (int side : {0, -1, 1 << 30, 2147483647, -2147483647}) {
    throws_error(VTX_IMAGE, "the buffer", open(side, 64, 192, VTX_RGB8));
    throws_error(VTX_IMAGE, "the buffer", open(64, side, 192, VTX_RGB8));
  }
  throws_error(VTX_IMAGE, "bytes apart", open(64, 64, 0, VTX_RGB8));
  throws_error(VTX_IMAGE, "bytes apart", open(64, 64, 191, VTX_RGB8));
  throws_error(VTX_IMAGE, "give the stride in bytes, 192 to", open(64, 64, static_cast<size_t>(-192), VTX_RGB8));
  throws_error(VTX_IMAGE, "odd", open(63, 64, 192, VTX_YUYV));
  throws_error(VTX_REQUEST, "data2 is NULL", open(64, 64, 64, VTX_NV12));
  throws_error(VTX_REQUEST, "takes no videos", open(64, 64, 192, VTX_VIDEO));
  throws_error(VTX_REQUEST, "pixel format", open(64, 64, 192, VTX_VIDEO + 1));
  throws_error(VTX_REQUEST, "pixel format", open(64, 64, 192, -1));
  throws_error(VTX_IMAGE, "", [&] { model.open({vtx::Image::bytes(pixels.data(), pixels.size())}); });
  throws_error(VTX_IMAGE, "", [&] { model.open({vtx::Image::file("")}); });
}

void texts(vtx::Model& model, const std::string& picture) {
  vtx::Conversation conversation = model.open({vtx::Image::file(picture)});
  const std::string broken = "red \xff\xc0\x80?", cut("red\0?", 5);
  throws_error(VTX_REQUEST, "UTF-8", [&] { conversation.ask(broken); });
  throws_error(VTX_REQUEST, "UTF-8", [&] { conversation.chat(broken); });
  throws_error(VTX_REQUEST, "UTF-8", [&] { model.open({}, broken); });
  throws_error(VTX_REQUEST, "zero", [&] { conversation.ask(cut); });
  vtx::AskOptions options = few();
  options.stop = {broken};
  throws_error(VTX_REQUEST, "UTF-8", [&] { conversation.ask("red?", options); });
  for (std::string vtx::AskOptions::* field : {&vtx::AskOptions::k, &vtx::AskOptions::reduce}) {
    options = few();
    options.*field = broken;
    throws_error(VTX_REQUEST, "", [&] { conversation.ask("red?", options); });
  }
  options = few();
  options.stop.assign(17, "a");
  throws_error(VTX_REQUEST, "at most 16", [&] { conversation.ask("red?", options); });
  vtx::Conversation moved = std::move(conversation);
  throws_error(VTX_REQUEST, "is NULL", [&] { conversation.ask("red?"); });  // NOLINT(bugprone-use-after-move): the point
  conversation.cancel();
}

// --- memory ---

// Runs `work` with the first allocation failing, then one after it, and so on, in steps that grow by a `growth`-th of
// what lies behind, until none does; how often it was refused.
template <typename Work>
int run_out_of_memory(int64_t growth, Work work) {
  int refusals = 0;
  for (int64_t number = 0;; number += 1 + number / growth) {
    left = number, failed = 0;
    vtx_status status = work();
    left = -1;
    if (failed == 0) {
      require(status == VTX_OK, "with all memory");
      return refusals;
    }
    require(status == VTX_OK || status == VTX_MEMORY, "without memory, status " + std::to_string(status));
    refusals += status == VTX_MEMORY;
  }
}

int without_memory(vtx_model* model, const std::string& bundle, const std::string& picture, const Tokens& expected) {
  vtx_load_options load = loading();
  load.threads = 2;
  int refusals = run_out_of_memory(6, [&] {
    vtx_model* other = nullptr;
    vtx_status status = vtx_load(bundle.c_str(), &load, &other);
    vtx_model_free(other);
    return status;
  });
  vtx_image image = file_image(picture);
  const int64_t each = 1000000;  // the decoders' few among them
  refusals += run_out_of_memory(each, [&] {
    vtx_conversation* conversation = nullptr;
    vtx_status status = vtx_open(model, &image, 1, nullptr, &conversation);
    vtx_conversation_free(conversation);
    return status;
  });
  std::vector<uint8_t> pixels(size_t{64} * 64 * 3, 128);
  vtx_image other = vtx::Image::pixels(pixels.data(), 64, 64, size_t{64} * 3, VTX_RGB8).raw();
  refusals += run_out_of_memory(each, [&] {
    int64_t held = std::exchange(left, -1);
    vtx_conversation* shown = opened(model, picture);
    require(ask(shown) == expected, "before an image is replaced");
    left = held;
    int32_t replaced = 0;
    vtx_status status = vtx_conversation_replace(shown, &other, 1, 0, &replaced);
    held = std::exchange(left, -1);
    require(status == VTX_OK || replaced == 0, "an image that was not replaced");
    if (status != VTX_OK) vtx_conversation_replace(shown, &other, 1, 0, &replaced);
    require(replaced == 1, "an image that is replaced after memory ran out");
    ask(shown);
    require(vtx_conversation_replace(shown, &image, 1, 0, &replaced) == VTX_OK && replaced == 1, "replacing it again");
    require(ask(shown) == expected, "an image that is shown again");
    vtx_conversation_free(shown);
    left = held;
    return status;
  });
  vtx_conversation* conversation = opened(model, picture);
  refusals += run_out_of_memory(30, [&] {
    vtx_ask_options options = asking(nullptr, nullptr);
    vtx_answer* answer = nullptr;
    vtx_status status = vtx_ask(conversation, "red?", &options, &answer);
    vtx_answer_free(answer);
    int64_t held = left;
    left = -1;
    require(ask(conversation) == expected, "a conversation after memory ran out");
    left = held;
    return status;
  });
  vtx_conversation_free(conversation);
  return refusals;
}

void run(const std::string& bundle, const std::string& picture, const std::string& other) {
  vtx_load_options load = loading();
  vtx_model *model = nullptr, *second = nullptr;
  require(vtx_load(bundle.c_str(), &load, &model) == VTX_OK, "loading");
  require(vtx_load(other.c_str(), &load, &second) == VTX_OK, "loading another bundle");
  vtx_conversation* conversation = opened(model, picture);
  Tokens expected = ask(conversation);
  vtx_conversation* beside = opened(second, picture);
  ask(beside);
  vtx_model_free(second);
  vtx_model_free(second);
  ask(beside);
  require(ask(conversation) == expected, "beside another model");
  vtx_conversation_free(beside);
  vtx_conversation_free(conversation);
  freed_handles(model, picture);
  freed_while_it_answers(model, picture);
  freed_before_it_answers(model, picture);
  callbacks_that_throw(model, picture, expected);
  vtx::LoadOptions options;
  options.threads = 1, options.device = "cpu";
  vtx::Model in_cpp(bundle, options);
  callbacks_that_throw_in_cpp(in_cpp, picture, expected);
  frames(in_cpp);
  texts(in_cpp, picture);
  std::cout << without_memory(model, bundle, picture, expected) << " times out of memory, all refused\n";
  vtx_model_free(model);
}

}  // namespace

int main(int count, char** values) {
  if (count != 3 && count != 4) {
    std::cerr << "Usage: vtx-cpp-misuse BUNDLE PICTURE [OTHER_BUNDLE]\n";
    return 2;
  }
  try {
    run(values[1], values[2], values[count - 1 == 3 ? 3 : 1]);
    return 0;
  } catch (const std::exception& error) {
    left = -1;
    std::cerr << "Error: " << error.what() << "\n";
    return 1;
  }
}
