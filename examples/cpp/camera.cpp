// Asks the same question about each frame of a camera: camera BUNDLE CAMERA QUESTION
//
// The camera is a device such as /dev/video0, or a folder of pictures. One thread takes frames, and the newest one waits
// where the last one did. The other answers, a conversation a frame. So an answer is never about an old frame, and
// nothing piles up where frames come faster than answers. A frame with the very bytes of the last one that was answered is
// not run: its answer stands.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "frame.hpp"
#if __has_include(<linux/videodev2.h>)
#include "v4l2.hpp"
#endif

namespace {

constexpr std::chrono::milliseconds kInterval(33);  // 30 frames a second, from a folder

// A place for one frame: what is put there replaces what nobody took.
class Newest {
 public:
  // False once nobody takes frames any more.
  bool put(Frame frame) {
    std::lock_guard<std::mutex> lock(mutex_);
    dropped_ += frame_.has_value();
    frame_ = std::move(frame);
    changed_.notify_one();
    return !ended_;
  }
  // There are no more frames; with what went wrong, if something did.
  void end(std::exception_ptr problem = nullptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    if (problem) problem_ = problem;
    changed_.notify_one();
  }
  // The newest frame; none once the camera has ended. Throws what went wrong there.
  std::optional<Frame> take() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return frame_ || ended_; });
    if (!frame_ && problem_) std::rethrow_exception(problem_);
    return std::exchange(frame_, std::nullopt);
  }
  size_t dropped() const { return dropped_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Frame> frame_;
  std::exception_ptr problem_;
  bool ended_ = false;
  size_t dropped_ = 0;
};

using Source = std::function<std::optional<Frame>()>;  // the next frame, or none at the end

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
  return [device = std::make_shared<V4l2Camera>(camera, 640, 480)] { return device->next(); };
#else
  throw std::runtime_error(camera + " is not a folder; this build knows no Video4Linux");
#endif
}

// Takes frames in a thread of its own for as long as it lives.
class Watch {
 public:
  Watch(Source source, Newest& newest)
      : newest_(newest), thread_([source = std::move(source), &newest] {
          try {
            while (std::optional<Frame> frame = source())
              if (!newest.put(*std::move(frame))) return;
            newest.end();
          } catch (...) {
            newest.end(std::current_exception());
          }
        }) {}
  ~Watch() {
    newest_.end();
    thread_.join();
  }

 private:
  Newest& newest_;
  std::thread thread_;
};

// Called with each answer; `reused` if it is that of an equal frame before.
using OnAnswer = std::function<void(const Frame& frame, const std::string& answer, bool reused)>;

void run(const std::string& bundle, const std::string& camera, const std::string& question, const OnAnswer& on_answer) {
  vtx::Model model(bundle);
  vtx::AskOptions options;
  options.max_new_tokens = 32;
  Newest newest;
  Watch watch(source_of(camera), newest);
  std::optional<Frame> last;  // the last frame that was answered
  std::string text;
  while (std::optional<Frame> frame = newest.take()) {
    try {
      bool reused = last && frame->shows_same(*last);
      if (!reused) {
        last.reset();
        text = model.open({frame->image()}).ask(question, options).text();
        last = frame;
      }
      on_answer(*frame, text, reused);
    } catch (const vtx::Error& error) {  // a frame that cannot be read ends nothing
      std::cerr << frame->name << ": " << error.what() << "\n";
    }
  }
  std::cerr << newest.dropped() << " frames were replaced by newer ones\n";
}

}  // namespace

int main(int count, char** values) {
  if (count != 4) {
    std::cerr << "Usage: camera BUNDLE CAMERA QUESTION\n";
    return 2;
  }
  try {
    run(values[1], values[2], values[3], [](const Frame& frame, const std::string& answer, bool reused) {
      std::cout << frame.name << ": " << answer << (reused ? " (as before)" : "") << std::endl;
    });
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "Error: " << error.what() << "\n";
    return 1;
  }
}
