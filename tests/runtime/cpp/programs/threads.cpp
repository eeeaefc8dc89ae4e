// vtx-cpp-threads BUNDLE PICTURE: one model and many threads, as vtx.h allows it; for the tests and ThreadSanitizer.
// Prints what was asked; ends with 1 where an answer is not the one that a single thread gets.
#include <atomic>
#include <iostream>
#include <thread>

#include "vtx/vtx.hpp"

namespace {

constexpr int kThreads = 4, kRounds = 6;
const char* const kQuestions[] = {"red?", "How many circle shapes are there?", "Where is the square?"};

std::atomic<int> answers{0}, busy{0}, cancelled{0}, wrong{0};

using Tokens = std::vector<int64_t>;

vtx::AskOptions options() {
  vtx::AskOptions out;
  out.max_new_tokens = 8;
  out.ignore_eos = true;
  return out;
}

bool begins(const Tokens& whole, const Tokens& part) {
  return part.size() <= whole.size() && std::equal(part.begin(), part.end(), whole.begin());
}

// Asks once; another thread's answer or a cancel may come between.
void ask(vtx::Conversation& conversation, size_t question, const std::vector<Tokens>& expected) {
  try {
    vtx::Answer answer = conversation.ask(kQuestions[question], options());
    bool early = answer.stopped() == "cancelled";
    ++(early ? cancelled : answers);
    if (!(early ? begins(expected[question], answer.ids()) : answer.ids() == expected[question])) ++wrong;
  } catch (const vtx::Error& error) {
    error.status() == VTX_BUSY ? ++busy : ++wrong;
    if (std::string(error.what()).find("another thread reads an answer") == std::string::npos) ++wrong;
  }
}

template <typename Work>
void in_threads(Work work) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

// Each thread has a conversation of its own.
void side_by_side(vtx::Model& model, const std::string& picture, const std::vector<Tokens>& expected) {
  in_threads([&](size_t number) {
    vtx::Conversation conversation = model.open({vtx::Image::file(picture)});
    for (size_t round = 0; round < kRounds; ++round) ask(conversation, (number + round) % std::size(kQuestions), expected);
  });
}

// All threads want the same conversation, and one of them cancels.
void one_for_all(vtx::Model& model, const std::string& picture, const std::vector<Tokens>& expected) {
  vtx::Conversation conversation = model.open({vtx::Image::file(picture)});
  in_threads([&](size_t number) {
    for (size_t round = 0; round < kRounds; ++round) {
      if (number == 0)
        conversation.cancel();
      else
        ask(conversation, round % std::size(kQuestions), expected);
      std::this_thread::yield();
    }
  });
  ask(conversation, 0, expected);  // and can be used on
}

// A model of each thread's own, freed while its conversation goes on; errors stay in the thread that made them.
void models_apart(const std::string& bundle, const vtx::LoadOptions& load, const std::string& picture,
                  const std::vector<Tokens>& expected) {
  in_threads([&](size_t number) {
    std::string missing = "no-bundle-" + std::to_string(number);
    try {
      vtx::Model model(missing, load);
      ++wrong;
    } catch (const vtx::Error& error) {
      if (std::string(error.what()).find(missing) == std::string::npos) ++wrong;
    }
    auto model = std::make_unique<vtx::Model>(bundle, load);
    vtx::Conversation conversation = model->open({vtx::Image::file(picture)});
    model.reset();
    ask(conversation, number % std::size(kQuestions), expected);
  });
}

void run(const std::string& bundle, const std::string& picture) {
  vtx::LoadOptions load;
  load.threads = 1;
  vtx::Model model(bundle, load);
  std::vector<Tokens> expected;
  vtx::Conversation alone = model.open({vtx::Image::file(picture)});
  for (const char* question : kQuestions) expected.push_back(alone.ask(question, options()).ids());
  side_by_side(model, picture, expected);
  one_for_all(model, picture, expected);
  models_apart(bundle, load, picture, expected);
  std::cout << answers << " answers, " << busy << " busy, " << cancelled << " cancelled, " << wrong << " wrong\n";
}

}  // namespace

int main(int count, char** values) {
  if (count != 3) {
    std::cerr << "Usage: vtx-cpp-threads BUNDLE PICTURE\n";
    return 2;
  }
  try {
    run(values[1], values[2]);
    return wrong == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << "Error: " << error.what() << "\n";
    return 1;
  }
}
