// Some frames of a video, each one view of the same number of tokens: Video-LLaVA, SmolVLM and others.
//
// The tokens follow frame by frame.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/utf8.hpp"
#include "bundle/fields.hpp"
#include "vision/layouts/tiled.hpp"
#include "vision/video.hpp"

namespace vtxcore {
namespace {

// A number from 1 to 999 in English words.
std::string in_words(int64_t number) {
  static const char* const kOnes[] = {"",         "one",     "two",     "three",     "four",     "five",    "six",
                                      "seven",    "eight",   "nine",    "ten",       "eleven",   "twelve",  "thirteen",
                                      "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"};
  static const char* const kTens[] = {"", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"};
  int64_t hundreds = number / 100, rest = number % 100;
  std::string out = hundreds > 0 ? cat(kOnes[hundreds], " hundred") : "", words;
  if (rest < 20)
    words = kOnes[rest];
  else
    words = cat(kTens[rest / 10], rest % 10 ? "-" : "", kOnes[rest % 10]);
  return out + (out.empty() || words.empty() ? "" : " and ") + words;
}

// `frames` of a video unless more or fewer are asked for, and `tokens` of each as its graph gives them.
struct FramesForm {
  int64_t frames, tokens;
  bool halved = false;   // these form a square, which is shrunk bilinearly to half its side, rounded up
  bool newline = false;  // one learned newline ends the video
  std::string between;   // text of the prompt between two frames
  bool padded = false;   // frames are sampled up to the one before the last, and a video with fewer begins with black ones
  // Frames are sampled at this rate, at most `frames`, without the first and the last second of a long video, and the prompt
  // tells their number, the duration and the time of each, as SmolVLM's does.
  std::optional<double> a_second;
  std::optional<int64_t> longer;  // pixels along the longer side before a frame is resized to the tower's size
};

class Frames : public VideoLayout {
 public:
  explicit Frames(FramesForm form) : f_(std::move(form)), side_(std::llrint(std::floor(std::sqrt(real_of(f_.tokens))))) {
    double rate = f_.a_second.value_or(1);
    int64_t longer = f_.longer.value_or(1);
    if (length_utf8(f_.between) > static_cast<size_t>(names::kMaxBetween))
      fail(Kind::bundle, "layout 'frames' has ", length_utf8(f_.between), " characters between frames, the limit is ",
           names::kMaxBetween, "; export the bundle again");
    if (!(rate > 0 && rate <= 1000) || longer < 1 || longer > names::kMaxLonger)
      fail(Kind::bundle, "layout 'frames' has ", python_repr(rate), " frames a second of ", longer,
           " pixels; it needs up to 1000 and 1 to ", names::kMaxLonger, "; export the bundle again");
    bool sound = f_.frames >= 1 && f_.frames <= names::kMaxSampledFrames && f_.tokens >= 1 &&
                 f_.tokens <= names::kMaxFrameTokens && !(f_.halved && side_ * side_ != f_.tokens);
    if (!sound)
      fail(Kind::bundle, "layout 'frames' has ", f_.frames, " frames of ", f_.tokens, " tokens; it needs 1 to ",
           names::kMaxSampledFrames, " frames, and a square of tokens if it is halved; export the bundle again");
  }

  int64_t max_tokens() const override { return count(f_.frames); }

  Clip sample(int64_t count, double rate, int64_t wanted) const override {
    if (!f_.a_second) return {evenly(0, count - 1, wanted ? wanted : f_.frames, false, f_.padded), count, rate};
    int64_t number = wanted ? wanted : number_sampled(count, rate, *f_.a_second, 1, f_.frames, true);
    int64_t first = 0, last = count - 1;
    if (real_of(count) / rate - 2 > real_of(wanted ? wanted : f_.frames) * *f_.a_second)
      first = static_cast<int64_t>(rate), last = std::min(static_cast<int64_t>(real_of(count) - rate), last);
    if (first >= last) first = 0, last = count - 1;
    Ids numbers = evenly(first, last, number, false, f_.padded);
    if (!wanted) {
      std::sort(numbers.begin(), numbers.end());
      numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    }
    return {numbers, count, rate};
  }

  MarkedImage placed(const Clip& clip, int64_t, int64_t) const override {
    size_t frames = clip.numbers.size();
    if (f_.a_second) return {Ids(frames, count(1)), timed(clip)};
    if (f_.between.empty()) return MarkedImage::plain(count(static_cast<int64_t>(frames)));
    std::vector<std::string> marks(frames + 1, f_.between);
    marks.front() = marks.back() = "";
    return {Ids(frames, count(1)), marks};
  }

  ImagePlan frame(int64_t, int64_t width, int64_t height) const override {
    if (!f_.longer) return {{{f_.tokens}}};
    return {{{f_.tokens, {scaled_to(width, height, *f_.longer)}}}};
  }

  std::shared_ptr<const ImageTokens> arrange(const Views& views, const Clip&, int64_t, int64_t,
                                             const Rows& newline) const override {
    Views all = views;
    if (f_.halved) {
      Ids near = nearest_steps(side_, half()), shown;
      for (int64_t y : near)
        for (int64_t x : near) shown.push_back(y * side_ + x);
      int64_t number = 0;
      for (auto& view : all) {
        auto own = std::make_shared<ImageTokens>();
        own->rows = shrunk_grid(view->rows, side_, side_, half(), half());
        own->patches = view->patches.take(shown);  // each token is a mean of four, at the nearest one's patch
        for (int64_t& place : own->patches.places) place += number * (f_.tokens - half() * half());
        view = std::move(own);
        ++number;
      }
    }
    if (f_.newline) all.push_back(newlines(newline));
    auto out = std::make_shared<ImageTokens>(*joined(all));
    out->patches.views.reset();  // frames compete with each other, unlike the views of an image
    return out;
  }

 private:
  int64_t half() const { return (side_ + 1) / 2; }
  int64_t count(int64_t frames) const { return frames * (f_.halved ? half() * half() : f_.tokens) + f_.newline; }

  // The text before, between and after the frames of a video, as SmolVLM's processor prints it.
  static std::vector<std::string> timed(const Clip& clip) {
    char text[64];
    auto whole = static_cast<int64_t>(real_of(clip.count) / clip.rate);
    std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", static_cast<long long>(whole / 3600),
                  static_cast<long long>(whole / 60 % 60), static_cast<long long>(whole % 60));
    std::string before =
        cat("You are provided the following series of ", in_words(static_cast<int64_t>(clip.numbers.size())),
            " frames from a ", text, " [H:MM:SS] video.\n");
    std::vector<std::string> out;
    for (int64_t number : clip.numbers) {
      auto at = static_cast<int64_t>(real_of(number) / clip.rate);
      std::snprintf(text, sizeof text, "%02lld:%02lld", static_cast<long long>(at / 60), static_cast<long long>(at % 60));
      out.push_back(cat(before, "\nFrame from ", text, ":", kAroundTile, kBeforeWhole));
      before = kAroundTile;
    }
    out.push_back(before + "\n\n");
    return out;
  }

  const FramesForm f_;
  const int64_t side_;  // of a frame's square of tokens
};

}  // namespace

VideoLayoutPtr make_frames(Fields& parameters) {
  FramesForm form;
  form.frames = parameters.whole("frames", INT32_MIN), form.tokens = parameters.whole("tokens", INT32_MIN);
  auto flag = [&](const char* key) { return parameters.has(key) && parameters.flag(key); };
  form.halved = flag("halved"), form.newline = flag("newline"), form.padded = flag("padded");
  if (parameters.has("between")) form.between = parameters.text("between");
  if (parameters.has("a_second") && !parameters.get("a_second").is_null()) form.a_second = parameters.number("a_second");
  if (parameters.has("longer")) form.longer = parameters.whole_or_null("longer", INT32_MIN);
  return std::make_shared<Frames>(std::move(form));
}

}  // namespace vtxcore
