// Frames of a video in pairs, each one pass of the tower at native resolution: Qwen2-VL, Qwen2.5-VL, Qwen3-VL.
//
// A patch covers a square of both frames. Each token has a time, a row and a column as position.
#include <cstdio>

#include "vision/layouts/native.hpp"
#include "vision/video.hpp"

namespace vtxcore {
namespace {

constexpr int64_t kTogether = 2;  // frames in a patch

int64_t pairs_of(int64_t frames) { return (frames + 1) / kTogether; }

// Tokens are squares of `merge` x `merge` patches of `patch` pixels a side, in two frames each. `a_second` frames are
// sampled a second, at least `fewest` and at most `frames`; of an odd number the last counts twice.
struct PairsForm {
  int64_t patch, merge, min_pixels, max_pixels, frames;
  double a_second;
  int64_t fewest;
  bool of_clip = false;         // pixels are those of all frames together, not of each
  bool flat = false;            // with `times`, positions are single numbers
  bool times = false;           // the prompt tells the time of each pair before it, and positions begin anew with each
  std::optional<double> ticks;  // positions a second between pairs; none: one between two pairs
  std::optional<int64_t> frame_pixels, capped;  // the most pixels of a frame; the most tokens, see grid()
};

class Pairs : public VideoLayout {
 public:
  explicit Pairs(PairsForm form) : f_(form), unit_(f_.patch * f_.merge), area_(product({unit_, unit_})) {
    int64_t most = names::kMaxResizedPixels * (f_.of_clip ? names::kMaxSampledFrames : 1);
    bool sound = std::min({f_.patch, f_.merge, f_.min_pixels}) >= 1 && f_.min_pixels <= f_.max_pixels &&
                 f_.max_pixels <= most && area_ <= std::min(f_.max_pixels, f_.frame_pixels.value_or(f_.max_pixels));
    sound = sound && f_.fewest >= 1 && f_.fewest <= f_.frames && f_.frames <= names::kMaxSampledFrames;
    sound = sound && f_.a_second > 0 && f_.a_second <= 1000 && !(f_.capped && (*f_.capped < 1 || *f_.capped > 1 << 24));
    sound = sound && (f_.times || !f_.flat);
    if (!sound || (f_.ticks && (f_.times || !(*f_.ticks > 0 && *f_.ticks <= 1000))))
      fail(Kind::bundle, "layout 'pairs' has ", f_.fewest, " to ", f_.frames, " frames, ", python_repr(f_.a_second),
           " a second, of ", f_.min_pixels, " to ", f_.max_pixels, " pixels in tokens of ", unit_, " x ", unit_,
           "; it needs 1 to ", names::kMaxSampledFrames, " frames, and at least one token and at most ", grouped(most),
           " pixels; export the bundle again");
  }

  int64_t max_tokens() const override {
    int64_t share = f_.of_clip ? f_.frames : 1;
    int64_t most = std::min(std::max(area_, f_.max_pixels / share), names::kMaxResizedPixels);
    int64_t least = std::min((f_.min_pixels + share - 1) / share, most);
    return pairs_of(f_.frames) * Native(f_.patch, f_.merge, least, most).max_tokens();
  }

  Clip sample(int64_t count, double rate, int64_t wanted) const override {
    int64_t number = wanted ? wanted : number_sampled(count, rate, f_.a_second, f_.fewest, f_.frames, false);
    return {evenly(0, count - 1, number, true), count, rate};
  }

  int64_t together() const override { return kTogether; }
  bool counted() const override { return true; }
  std::optional<int64_t> area() const override { return area_; }
  VideoLayoutPtr within(int64_t max_pixels) const override {
    PairsForm form = f_;
    form.frame_pixels = std::min(max_pixels, f_.frame_pixels.value_or(max_pixels));
    return std::make_shared<Pairs>(form);
  }

  MarkedImage placed(const Clip& clip, int64_t width, int64_t height) const override {
    auto frames = static_cast<int64_t>(clip.numbers.size()), pairs = pairs_of(frames);
    Size size = grid(frames, width, height);
    int64_t tokens = size.first * size.second;
    if (!f_.times) return {{pairs * tokens}, {"", ""}, span(clip, size)};
    MarkedImage out{Ids(static_cast<size_t>(pairs), tokens), {}};
    const std::string end = "<|vision_end|>";
    for (size_t at = 0; at < clip.numbers.size(); at += kTogether) {
      int64_t next = clip.numbers[std::min(at + 1, clip.numbers.size() - 1)];
      double seconds = (real_of(clip.numbers[at]) / clip.rate + real_of(next) / clip.rate) / 2;
      char text[400];
      std::snprintf(text, sizeof text, "<%.1f seconds><|vision_start|>", seconds);
      out.marks.push_back((at > 0 ? end : "") + text);
    }
    out.marks.push_back(end);
    return out;
  }

  ImagePlan frame(int64_t frames, int64_t width, int64_t height) const override {
    return {{own_shape(grid(frames, width, height), unit_)}};
  }

  std::shared_ptr<const ImageTokens> arrange(const Views& views, const Clip& clip, int64_t width, int64_t height,
                                             const Rows&) const override {
    Size size = grid(static_cast<int64_t>(clip.numbers.size()), width, height);
    auto out = std::make_shared<ImageTokens>(*joined(views));
    auto count = views.size() * static_cast<size_t>(size.first * size.second);
    check_outputs(*out, static_cast<int64_t>(count));
    out->patches.views.reset();
    out->offsets.emplace();
    const int64_t tokens = size.first * size.second;
    if (f_.times) out->runs = Ids(views.size(), tokens);
    if (f_.flat) {
      for (int64_t token = 0; token < static_cast<int64_t>(count); ++token)
        out->offsets->push_back({token % tokens, token % tokens, token % tokens});
      out->span = tokens;
      return out;
    }
    for (size_t pair = 0; pair < views.size(); ++pair)
      add_squares(*out->offsets, size, f_.times ? 0 : tick(clip, static_cast<int64_t>(pair)));
    out->span = f_.times ? std::max(size.first, size.second) : span(clip, size);
    return out;
  }

 private:
  // The position in time of a pair, from 0.
  int64_t tick(const Clip& clip, int64_t pair) const {
    double each = 1;
    if (f_.ticks)  // seconds of two of the sampled frames; transformers multiplies in float32
      each =
          *f_.ticks * (kTogether / (real_of(static_cast<int64_t>(clip.numbers.size())) / real_of(clip.count) * clip.rate));
    return static_cast<int64_t>(static_cast<float>(pair) * static_cast<float>(each));
  }

  int64_t span(const Clip& clip, Size size) const {
    return std::max({size.first, size.second, tick(clip, pairs_of(static_cast<int64_t>(clip.numbers.size())) - 1) + 1});
  }

  // Columns and rows of tokens of each of `frames` frames of this size. `capped` are the most tokens of a frame, or, without
  // `of_clip`, 90% of it are the most of all frames.
  Size grid(int64_t frames, int64_t width, int64_t height) const {
    int64_t least = f_.min_pixels * frames, most = f_.max_pixels * frames, counted = frames;
    check_ratio(width, height);
    if (f_.of_clip) {
      least = f_.min_pixels, most = f_.max_pixels;
      counted = kTogether * std::max<int64_t>(1, std::llrint(real_of(frames) / kTogether));
      std::tie(width, height) = grown(width, height, unit_);
    }
    if (f_.capped) {
      int64_t share = *f_.capped * area_, floor = static_cast<int64_t>(real_of(f_.min_pixels) * 1.05);
      if (f_.of_clip)
        share = std::min(share, f_.max_pixels / frames);
      else
        share = std::min(f_.max_pixels, static_cast<int64_t>(real_of(share) * 0.9) * kTogether / frames);
      most = std::max(share, floor) * frames;
    }
    const Size nearest = nearest_grid(width, height, unit_);
    Size out = PixelBounds{unit_, least, most}.grid(width, height, nearest, frames, counted);
    if (f_.frame_pixels) out = PixelBounds{unit_, 0, *f_.frame_pixels}.grid(width, height, out);
    if (out.first * out.second * area_ > names::kMaxResizedPixels)
      fail(Kind::image, "frames of ", width, "x", height, " pixels are resized to ", out.first * unit_, "x",
           out.second * unit_, "; the limit is ", grouped(names::kMaxResizedPixels),
           " pixels; use more frames, or max_pixels (--max-pixels)");
    return out;
  }

  const PairsForm f_;
  const int64_t unit_, area_;  // of a token's square, in pixels
};

}  // namespace

VideoLayoutPtr make_pairs(Fields& parameters) {
  PairsForm form;
  form.patch = parameters.whole("patch"), form.merge = parameters.whole("merge");
  form.min_pixels = parameters.whole("min_pixels"), form.max_pixels = parameters.whole("max_pixels");
  form.frames = parameters.whole("frames"), form.a_second = parameters.number("a_second");
  form.fewest = parameters.whole("fewest");
  auto flag = [&](const char* key) { return parameters.has(key) && parameters.flag(key); };
  form.of_clip = flag("of_clip"), form.times = flag("times"), form.flat = flag("flat");
  if (parameters.has("ticks") && !parameters.get("ticks").is_null()) form.ticks = parameters.number("ticks");
  if (parameters.has("frame_pixels")) form.frame_pixels = parameters.whole_or_null("frame_pixels", 1);
  if (parameters.has("capped")) form.capped = parameters.whole_or_null("capped", 1);
  return std::make_shared<Pairs>(form);
}

}  // namespace vtxcore
