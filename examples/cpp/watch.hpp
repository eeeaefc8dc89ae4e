// Standing questions about the newest frames of a camera.
//
// One thread takes frames, and the newest one waits where the last one did; the caller's thread answers, in one conversation
// whose image is replaced. So an answer is never about an old frame, nothing piles up where frames come faster than answers,
// and what frames have in common is not run again. Answers stand while the picture is equal, or near, to the one they are
// about.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <fstream>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "frame.hpp"

// A place for one frame: what is put there replaces what nobody took.
class Newest {
 public:
  // False once nobody takes frames any more.
  bool put(Frame frame) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++frames_;
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
  // Frames that came, and those of them that newer ones replaced.
  std::pair<size_t, size_t> counts() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {frames_, dropped_};
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Frame> frame_;
  std::exception_ptr problem_;
  bool ended_ = false;
  size_t frames_ = 0, dropped_ = 0;
};

using Source = std::function<std::optional<Frame>()>;  // the next frame, or none at the end

// Takes frames in a thread of its own for as long as it lives.
class Taker {
 public:
  Taker(Source source, Newest& newest)
      : newest_(newest), thread_([source = std::move(source), &newest] {
          try {
            while (std::optional<Frame> frame = source())
              if (!newest.put(*std::move(frame))) return;
            newest.end();
          } catch (...) {
            newest.end(std::current_exception());
          }
        }) {}
  ~Taker() {
    newest_.end();
    thread_.join();
  }

 private:
  Newest& newest_;
  std::thread thread_;
};

struct StandingQuestion {
  std::string text;
  double every = 0;  // seconds, at least, from one time to the next
};

struct WatchOptions {
  std::vector<StandingQuestion> questions;
  vtx::AskOptions ask;
  double near = 0;          // answers stand while the picture differs by at most this; see vtx_conversation_replace
  std::string system;       // before every question
  std::string prefix_file;  // keeps what the caches hold of it for the next start
};

struct WatchCounts {
  size_t frames = 0, dropped = 0, refused = 0, answers = 0, reused = 0;
};

// Called with each answer; `reused` if it is that of an earlier frame, which still stands. False ends the watch.
using OnAnswer =
    std::function<bool(const Frame& frame, const std::string& question, const std::string& answer, bool reused)>;
// Called with a frame that cannot be read or answered, or the prefix file's problem; the watch goes on.
using OnProblem = std::function<void(const std::string& name, const std::string& problem)>;

// Asks until the source ends. Throws what went wrong with the source.
inline WatchCounts watch(vtx::Model& model, Source source, const WatchOptions& options, const OnAnswer& on_answer,
                         const OnProblem& on_problem) {
  struct State {
    double due = -std::numeric_limits<double>::infinity();
    bool stands = false;  // the answer is about the conversation's picture
    std::string answer;
  };
  std::optional<std::string> system;
  if (!options.system.empty()) system = options.system;
  vtx::Conversation conversation = model.open({}, system);
  bool saves = !options.prefix_file.empty();
  if (saves && std::ifstream(options.prefix_file)) try {
      conversation.load_prefix(options.prefix_file);
    } catch (const vtx::Error& error) {
      on_problem(options.prefix_file, error.what());
    }
  std::vector<State> states(options.questions.size());
  WatchCounts counts;
  Newest newest;
  Taker taker(std::move(source), newest);
  bool goes_on = true;
  while (std::optional<Frame> frame = goes_on ? newest.take() : std::nullopt) {
    double now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    bool shown = false;
    for (size_t i = 0; i < states.size() && goes_on; ++i) {
      const StandingQuestion& question = options.questions[i];
      State& state = states[i];
      if (now < state.due) continue;
      try {
        if (!shown && conversation.replace({frame->image()}, options.near))
          for (State& each : states) each.stands = false;
        shown = true;
        bool reused = state.stands;
        if (!reused) state.answer = conversation.ask(question.text, options.ask).text();
        state.stands = true, state.due = now + question.every;
        ++counts.answers, counts.reused += reused;
        goes_on = on_answer(*frame, question.text, state.answer, reused);
      } catch (const vtx::Error& error) {
        ++counts.refused;
        on_problem(frame->name, error.what());
        break;
      }
      if (std::exchange(saves, false)) try {
          conversation.save_prefix(options.prefix_file);
        } catch (const vtx::Error& error) {
          on_problem(options.prefix_file, error.what());
        }
    }
  }
  std::tie(counts.frames, counts.dropped) = newest.counts();
  return counts;
}
