#include "vision/video.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/checks.hpp"

namespace vtxcore {

Ids evenly(int64_t first, int64_t last, int64_t wanted, bool nearest, bool padded) {
  int64_t count = last - first + 1;
  Ids out;
  if (padded && count < wanted) {
    out.assign(static_cast<size_t>(wanted - count), -1);
    for (int64_t number = first; number <= last; ++number) out.push_back(number);
    return out;
  }
  if (wanted == 1) return {first};
  last -= padded;
  double step = real_of(last - first) / real_of(wanted - 1);
  for (int64_t number = 0; number < wanted - 1; ++number) {
    double place = real_of(number) * step + real_of(first);
    out.push_back(nearest ? std::llrint(place) : static_cast<int64_t>(place));
  }
  out.push_back(last);
  return out;
}

int64_t number_sampled(int64_t count, double rate, double a_second, int64_t fewest, int64_t most, bool nearest) {
  double number = std::min(real_of(count) / rate * a_second, real_of(count));
  return std::min({std::max(static_cast<int64_t>(nearest ? std::nearbyint(number) : number), fewest), most, count});
}

VideoLayoutPtr read_video_layout(const LayoutSpec& spec) {
  static const std::map<std::string, VideoLayoutPtr (*)(Fields&)> kKinds{{"frames", make_frames}, {"pairs", make_pairs}};
  auto kind = kKinds.find(spec.name);
  if (kind == kKinds.end()) return nullptr;
  return make_declared(kind->second, spec);
}

PreparedFrames prepare_frames(const Video& video, const VideoLayout& layout, const ImageSettings& settings) {
  if (video.fps != 0 && !(video.fps >= 1e-9 && video.fps <= real_of(names::kMaxRate)))
    fail(Kind::request, "fps is ", python_repr(video.fps), "; give a number of frames a second up to ", names::kMaxRate);
  if (video.sampled != 0) check_whole("frames", video.sampled, 1, names::kMostWhole);
  if (video.sampled > names::kMaxSampledFrames)
    fail(Kind::request, "frames is ", video.sampled, ", the limit is ", names::kMaxSampledFrames, " of a video; use fewer");
  if (video.count < 1) fail(Kind::image, "the given video has no frames; give at least one");
  PreparedFrames out{layout.sample(video.count, video.fps != 0 ? video.fps : names::kUsualRate, video.sampled), 0, 0, {}};
  Ids wanted = out.clip.numbers;
  wanted.resize(wanted.size() + (-wanted.size() % static_cast<size_t>(layout.together())), wanted.back());
  std::map<int64_t, Pixels> seen;
  Ids order = wanted;
  std::sort(order.begin(), order.end(), [](int64_t a, int64_t b) {  // a black frame, which has the others' size, last
    return static_cast<uint64_t>(a) < static_cast<uint64_t>(b);
  });
  for (int64_t number : order) {
    if (seen.count(number) > 0) continue;
    Picture frame = number >= 0 ? video.frame(number) : Picture(static_cast<int>(out.width), static_cast<int>(out.height));
    if (int64_t{frame.width} * frame.height > names::kMaxFramePixels)
      fail(Kind::image, "the given video", " has frames of ", frame.width, "x", frame.height, " pixels; they may have 1 to ",
           grouped(names::kMaxFramePixels), "; save it smaller");
    if (out.width == 0) out.width = frame.width, out.height = frame.height;
    if (out.width != frame.width || out.height != frame.height)
      fail(Kind::image, "the given video", " changes its size from ", out.width, "x", out.height, " to ", frame.width, "x",
           frame.height, " at frame ", number, "; save it in one size");
    const ImagePlan plan = layout.frame(static_cast<int64_t>(out.clip.numbers.size()), out.width, out.height);
    seen.emplace(number, std::move(plan.pixels(frame, settings).front()));
  }
  for (size_t at = 0; at < wanted.size(); at += static_cast<size_t>(layout.together())) {
    Pixels view = seen.at(wanted[at]);
    for (; view.pictures < layout.together(); ++view.pictures) {
      const Floats& next = seen.at(wanted[at + static_cast<size_t>(view.pictures)]).values;
      view.values.insert(view.values.end(), next.begin(), next.end());
    }
    out.views.push_back(std::move(view));
  }
  return out;
}

}  // namespace vtxcore
