// Asks standing questions about the newest frames of a camera:
//
//   camera BUNDLE CAMERA [--near SHARE] [--system TEXT] [--prefix FILE] [--every SECONDS] QUESTION ...
//
// The camera is a device such as /dev/video0, or a folder of pictures, shown at 30 a second. --every holds for the questions
// behind it. Under systemd with Type=notify it is ready once its bundle is loaded, and each answer feeds WatchdogSec.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "supervisor.hpp"
#include "watch.hpp"
#if __has_include(<linux/videodev2.h>)
#include "v4l2.hpp"
#endif

namespace {

constexpr std::chrono::milliseconds kInterval(33);

Source source_of_folder(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return [files, next = size_t{0}]() mutable -> std::optional<Frame> {
    if (next > 0) std::this_thread::sleep_for(kInterval);
    if (next == files.size()) return std::nullopt;
    Frame frame;
    frame.name = files[next++];
    std::ifstream file(frame.name, std::ios::binary);
    frame.bytes.assign(std::istreambuf_iterator<char>(file), {});
    return frame;
  };
}

Source source_of(const std::string& camera) {
  if (std::filesystem::is_directory(camera)) return source_of_folder(camera);
#if __has_include(<linux/videodev2.h>)
  return [camera, device = std::make_shared<V4l2Camera>(camera, 640, 480)]() mutable {
    while (true) try {
        return device->next();
      } catch (const FormatChanged& change) {
        std::cerr << change.what() << "; it is opened again\n";
        device.reset();  // a camera may be open once
        device = std::make_shared<V4l2Camera>(camera, 640, 480);
      }
  };
#else
  throw std::runtime_error(camera + " is not a folder; this build knows no Video4Linux");
#endif
}

WatchOptions read_options(const std::vector<std::string>& words) {
  WatchOptions options;
  options.ask.max_new_tokens = 32;
  double every = 0;
  for (size_t i = 0; i < words.size(); ++i) {
    bool named = words[i].compare(0, 2, "--") == 0;
    if (named && i + 1 == words.size()) throw std::runtime_error(words[i] + " has no value");
    if (words[i] == "--near")
      options.near = std::stod(words[++i]);
    else if (words[i] == "--system")
      options.system = words[++i];
    else if (words[i] == "--prefix")
      options.prefix_file = words[++i];
    else if (words[i] == "--every")
      every = std::stod(words[++i]);
    else if (named)
      throw std::runtime_error("there is no option " + words[i]);
    else
      options.questions.push_back({words[i], every});
  }
  return options;
}

}  // namespace

int main(int count, char** values) {
  try {
    WatchOptions options = read_options({values + std::min(count, 3), values + count});
    if (options.questions.empty()) {
      std::cerr
          << "Usage: camera BUNDLE CAMERA [--near SHARE] [--system TEXT] [--prefix FILE] [--every SECONDS] QUESTION ...\n";
      return 2;
    }
    vtx::Model model(values[1]);
    notify("READY=1");
    bool several = options.questions.size() > 1;
    auto on_answer = [&](const Frame& frame, const std::string& question, const std::string& answer, bool reused) {
      std::cout << frame.name << ": " << (several ? question + " " : "") << answer << (reused ? " (as before)" : "")
                << std::endl;
      notify("WATCHDOG=1");
      return true;
    };
    auto on_problem = [](const std::string& name, const std::string& problem) {
      std::cerr << name << ": " << problem << "\n";
    };
    WatchCounts counts = watch(model, source_of(values[2]), options, on_answer, on_problem);
    std::cerr << counts.dropped << " of " << counts.frames << " frames were replaced by newer ones\n";
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "Error: " << error.what() << "\n";
    return 1;
  }
}
