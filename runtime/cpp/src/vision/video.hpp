// Frames of a video: which of them the model sees, and how these become views, tokens and text of a prompt.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "vision/layout.hpp"

namespace vtxcore {

// Frames as a program has them: `frame` gives one of `count`, and they have one size. `fps` of them are shown a second; 0:
// 24. `sampled`: as many are seen, evenly from the first to the last; 0: as many as the bundle says.
struct Video {
  int64_t count;
  std::function<Picture(int64_t)> frame;
  double fps = 0;
  int64_t sampled = 0;
};

// The frames sampled of a video: their numbers among its `count` frames, `rate` a second. A black frame has the number -1.
struct Clip {
  Ids numbers;
  int64_t count;
  double rate;
};

// `wanted` numbers of frames from the first to the last, rounded down, or to the nearest, at a half to the even one.
// `padded`: up to the one before the last; of too few frames all, behind black ones.
Ids evenly(int64_t first, int64_t last, int64_t wanted, bool nearest, bool padded = false);

// The frames sampled `a_second`, rounded down or to the nearest: at least `fewest`, if there are, and at most `most`.
int64_t number_sampled(int64_t count, double rate, double a_second, int64_t fewest, int64_t most, bool nearest);

// What is asked of a layout of videos. Sizes are those of a frame in pixels, before any preprocessing.
class VideoLayout {
 public:
  virtual ~VideoLayout() = default;
  virtual int64_t max_tokens() const = 0;  // of a video of the usual number of frames
  // Of `count` frames those that are seen; `wanted`: so many of them, 0: as many as the layout has.
  virtual Clip sample(int64_t count, double rate, int64_t wanted) const = 0;
  virtual int64_t together() const { return 1; }  // frames of a view
  // The pixels of a token, where frames are seen at native resolution and have a limit of pixels.
  virtual std::optional<int64_t> area() const { return std::nullopt; }
  // With at most so many pixels of each frame, which images have checked; null: this one.
  virtual std::shared_ptr<const VideoLayout> within(int64_t) const { return nullptr; }
  // What stands in a prompt for a video.
  virtual MarkedImage placed(const Clip& clip, int64_t width, int64_t height) const = 0;
  // Whether text that stands among its tokens allows some of them to leave before the decoder.
  virtual bool counted() const { return false; }
  // The plan of each of `frames` frames of this size.
  virtual ImagePlan frame(int64_t frames, int64_t width, int64_t height) const = 0;
  // The tokens of a video from those of its views; `newline` [1, hidden], [0, hidden] if there is none.
  virtual std::shared_ptr<const ImageTokens> arrange(const Views& views, const Clip& clip, int64_t width, int64_t height,
                                                     const Rows& newline) const = 0;
};

using VideoLayoutPtr = std::shared_ptr<const VideoLayout>;

// The layout of videos that a bundle declares; null: libvtx has no such layout. Throws Error(bundle).
VideoLayoutPtr read_video_layout(const LayoutSpec& spec);

// Layouts of each kind; `parameters` as the bundle has them.
VideoLayoutPtr make_frames(Fields& parameters);
VideoLayoutPtr make_pairs(Fields& parameters);

// A video that a model is to see: the sampled frames, their size, and the views that the tower gets, of which each covers
// frames that the layout takes together.
struct PreparedFrames {
  Clip clip;
  int64_t width, height;
  std::vector<Pixels> views;
};

// Reads the sampled frames one after the other. Throws Error(request) for a wrong rate or number, Error(image) for a video
// without frames, of frames of several sizes, or too large.
PreparedFrames prepare_frames(const Video& video, const VideoLayout& layout, const ImageSettings& settings);

}  // namespace vtxcore
