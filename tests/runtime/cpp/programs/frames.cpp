// vtx-cpp-frames BUNDLE DEVICE FRAMES: an application that asks two questions about each frame of a camera, and about the
// last one in a fork, too; for the tests. Prints the memory that it holds after a tenth of the frames and after all, in kB.
#include <cstdio>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "vtx/vtx.hpp"

namespace {

constexpr int kWidth = 96, kHeight = 64;

long resident_kb() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.compare(0, 6, "VmRSS:") == 0) return std::stol(line.substr(6));
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) return 2;
  vtx::LoadOptions options;
  options.device = argv[2];
  vtx::Model model(argv[1], options);
  const int frames = std::stoi(argv[3]);
  long early = 0;
  vtx::AskOptions ask;
  ask.max_new_tokens = 6;
  ask.ignore_eos = true;
  ask.k = "3", ask.reduce = "none";  // so that each frame has as many tokens
  for (int frame = 0; frame < frames; ++frame) {
    std::vector<unsigned char> pixels(size_t{kWidth} * kHeight * 3, static_cast<unsigned char>(frame * 7));
    vtx::Image image = vtx::Image::pixels(pixels.data(), kWidth, kHeight, size_t{kWidth} * 3, VTX_RGB8);
    vtx::Conversation conversation = model.open({image});
    for (const char* question : {"red?", "How many circle shapes are there?"})
      if (conversation.ask(question, ask).ids().size() != 6) return 1;
    if (frame == frames / 10) early = resident_kb();
    if (frame + 1 < frames) continue;
    vtx::Conversation fork = conversation.fork();
    for (const char* question : {"red?", "Where is it?"})
      if (fork.ask(question, ask).ids() != conversation.ask(question, ask).ids())
        throw std::runtime_error("a fork answers otherwise");
  }
  std::cout << early << " " << resident_kb() << "\n";
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
