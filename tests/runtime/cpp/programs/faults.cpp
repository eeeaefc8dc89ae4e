// vtx-cpp-faults BUNDLE DEVICE FAULT: an application whose GPU fails it, by the stand-in for CUDA; for the tests. FAULT is
// "answer", "prompt": other programs take the device's memory in the middle of an answer, or before a longer prompt; "gone":
// the device is lost in an answer. Prints the message of each error. Ends with 1 if one has another status than
// VTX_DEVICE, or if the conversation does not answer as before once there is memory again.
#include <dlfcn.h>

#include <iostream>
#include <string>
#include <vector>

#include "vtx/vtx.hpp"

namespace {

template <typename Call>
Call standin(const char* name) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Call>(library ? dlsym(library, name) : nullptr);
}

// Whether it fails, as a device does.
template <typename Work>
bool fails(const Work& work) {
  try {
    work();
  } catch (const vtx::Error& error) {
    std::cout << error.what() << "\n";
    return error.status() == VTX_DEVICE;
  }
  std::cout << "no error\n";
  return false;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) return 2;
  const std::string fault = argv[3];
  vtx::LoadOptions options;
  options.device = argv[2];
  vtx::Model model(argv[1], options);
  std::vector<unsigned char> pixels(size_t{96} * 64 * 3, 90);
  vtx::Conversation image = model.open({vtx::Image::pixels(pixels.data(), 96, 64, size_t{96} * 3, VTX_RGB8)});
  vtx::AskOptions few, many;
  for (vtx::AskOptions* ask : {&few, &many}) ask->k = "2", ask->reduce = "none", ask->ignore_eos = true;
  few.max_new_tokens = 4, many.max_new_tokens = 90;
  const std::vector<int64_t> before = image.ask("red?", few).ids();
  auto leave = standin<void (*)(size_t)>("vtx_standin_leave");
  auto lose = standin<void (*)(int)>("vtx_standin_lose");
  if (!leave || !lose) return 3;
  if (fault == "gone") {
    bool device = fails([&] {
      image.ask("red?", many, [&](std::string_view) {
        lose(719);
        return true;
      });
    });
    return device && fails([&] { image.ask("red?", few); }) && fails([&] { model.open({}).ask("red?", few); }) ? 0 : 1;
  }
  std::string longer;
  for (int i = 0; i < 4; ++i) longer += "How many circle shapes are there? ";
  leave(0);
  bool device = fails([&] { fault == "answer" ? image.ask("red?", many) : image.ask(longer, few); });
  bool fits = image.ask("red?", few).ids() == before;  // in the memory that the conversation has
  leave(size_t{1} << 30);
  return device && fits && image.ask("red?", few).ids() == before && image.ask("red?", many).ids().size() == 90 ? 0 : 1;
} catch (const vtx::Error& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
