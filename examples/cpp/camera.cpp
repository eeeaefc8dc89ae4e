// Asks the same question about each frame of a camera: camera BUNDLE FOLDER QUESTION
//
// The camera is a folder of pictures, a stand-in for a driver: one thread takes frames, and the newest one waits where
// the last one did. The other answers, a conversation a frame. So an answer is never about an old frame, and nothing
// piles up where frames come faster than answers.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <iostream>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <vtx/vtx.hpp>

namespace {

constexpr std::chrono::milliseconds kInterval(33);  // 30 frames a second

// A place for one frame: what is put there replaces what nobody took.
class Newest {
 public:
  void put(std::string frame) {
    std::lock_guard<std::mutex> lock(mutex_);
    dropped_ += frame_.has_value();
    frame_ = std::move(frame);
    changed_.notify_one();
  }
  void end() {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    changed_.notify_one();
  }
  // The newest frame; none once the camera has ended.
  std::optional<std::string> take() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return frame_ || ended_; });
    return std::exchange(frame_, std::nullopt);
  }
  size_t dropped() const { return dropped_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::string> frame_;
  bool ended_ = false;
  size_t dropped_ = 0;
};

void watch(const std::string& folder, Newest& newest) {
  std::vector<std::string> frames;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) frames.push_back(entry.path());
  std::sort(frames.begin(), frames.end());
  for (const std::string& frame : frames) {
    newest.put(frame);
    std::this_thread::sleep_for(kInterval);
  }
  newest.end();
}

}  // namespace

int main(int count, char** values) {
  if (count != 4) {
    std::cerr << "Usage: camera BUNDLE FOLDER QUESTION\n";
    return 2;
  }
  try {
    vtx::Model model(values[1]);
    vtx::AskOptions options;
    options.max_new_tokens = 32;
    Newest newest;
    std::thread camera(watch, values[2], std::ref(newest));
    while (std::optional<std::string> frame = newest.take()) {
      try {
        vtx::Answer answer = model.open({vtx::Image::file(*frame)}).ask(values[3], options);
        std::cout << *frame << ": " << answer.text() << std::endl;
      } catch (const vtx::Error& error) {  // a frame that cannot be read ends nothing
        std::cerr << *frame << ": " << error.what() << "\n";
      }
    }
    camera.join();
    std::cerr << newest.dropped() << " frames were replaced by newer ones\n";
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "Error: " << error.what() << "\n";
    return 1;
  }
}
