// vtx-cpp-watching BUNDLE MODE FRAMES: the watch loop of the examples over frames that are made here; for the tests.
//
// MODE steady: each frame waits until the one before was looked at. They change their size and pixel format, each picture
// comes twice, and some are damaged. Each answer is compared with that of a fresh conversation, of the first frames.
// MODE fast: 100 frames come while one is looked at.
// Prints counts, what went wrong, and the memory in kB after a tenth of the frames and after all, as JSON.
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <mutex>
#include <string>

#include "watch.hpp"

namespace {

constexpr size_t kBehind = 100, kCompared = 60, kDamaged = 25;

long resident_kb() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.compare(0, 6, "VmRSS:") == 0) return std::stol(line.substr(6));
  return 0;
}

// Each picture twice, the formats and sizes in turn.
Frame made(size_t number) {
  size_t picture = number / 2;
  constexpr vtx_pixel_format kFormats[] = {VTX_RGB8, VTX_YUYV, VTX_NV12, VTX_GRAY8};
  Frame frame;
  frame.name = std::to_string(number);
  frame.format = kFormats[picture % 4];
  frame.width = 64 + 2 * static_cast<int>(picture % 7), frame.height = 48 + 2 * static_cast<int>(picture % 5);
  size_t pixel = frame.format == VTX_RGB8 ? 3 : frame.format == VTX_YUYV ? 2 : 1;
  frame.stride = static_cast<size_t>(frame.width) * pixel + 6;
  size_t rows = static_cast<size_t>(frame.height) * (frame.format == VTX_NV12 ? 3 : 2) / 2;
  frame.bytes.resize(frame.stride * rows);
  for (size_t i = 0; i < frame.bytes.size(); ++i)
    frame.bytes[i] = static_cast<uint8_t>(i * (picture % 13 + 1) / 7 + picture * 5);
  return frame;
}

}  // namespace

int main(int count, char** values) try {
  if (count != 4) return 2;
  vtx::Model model(values[1]);
  const bool fast = std::string(values[2]) == "fast";
  const size_t frames = std::stoul(values[3]);
  std::mutex mutex;
  std::condition_variable changed;
  size_t given = 0, due = kBehind, looked_at = 0, last = 0, older = 0, different = 0, damaged = 0;
  long early = 0;
  bool ended = false;

  auto source = [&]() -> std::optional<Frame> {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return fast ? given < due : looked_at == given; });
    ended = given == frames;
    changed.notify_all();
    if (ended) return std::nullopt;
    Frame frame = made(given++);
    if (!fast && given % kDamaged == 0) frame.format = VTX_FILE;
    return frame;
  };
  auto looked = [&](const std::string& name) {
    std::unique_lock<std::mutex> lock(mutex);
    size_t number = std::stoul(name);
    older += number + 1 < last;
    last = number + 1;
    looked_at = last;
    if (last == frames / 10) early = resident_kb();
    due = given + kBehind;
    changed.notify_all();
    if (fast) changed.wait(lock, [&] { return ended || given == due; });
  };
  WatchOptions options;
  options.ask.max_new_tokens = 4;
  options.ask.ignore_eos = true;
  options.system = "Be brief.";
  options.questions = {{"red?"}, {"How many?"}};
  auto on_answer = [&](const Frame& frame, const std::string& question, const std::string& answer, bool) {
    if (!fast && looked_at < kCompared)
      different += model.open({frame.image()}, options.system).ask(question, options.ask).text() != answer;
    if (question == options.questions.back().text) looked(frame.name);
    return true;
  };
  auto on_problem = [&](const std::string& name, const std::string&) {
    ++damaged;
    looked(name);
  };
  WatchCounts counts = watch(model, source, options, on_answer, on_problem);
  std::cout << "{\"frames\": " << counts.frames << ", \"dropped\": " << counts.dropped << ", \"answers\": " << counts.answers
            << ", \"reused\": " << counts.reused << ", \"refused\": " << counts.refused << ", \"damaged\": " << damaged
            << ", \"last\": " << last << ", \"older\": " << older << ", \"different\": " << different
            << ", \"early\": " << early << ", \"late\": " << resident_kb() << "}\n";
  return 0;
} catch (const vtx::Error& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
