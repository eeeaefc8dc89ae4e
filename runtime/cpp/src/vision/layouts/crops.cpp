// An image as a whole, and after it crops along its longer side: Gemma 3's pan and scan.
#include <algorithm>
#include <cmath>

#include "bundle/fields.hpp"
#include "vision/layouts/tiled.hpp"

namespace vtxcore {
namespace {

constexpr char kImageBegin[] = "\n\n<start_of_image>", kImageEnd[] = "<end_of_image>\n\n";
constexpr char kOriginal[] = "Here is the original image ",
               kSomeCrops[] = " and here are some crops to help you see better ";

// Images of `tile` pixels a side and `tokens` each: the whole one, squeezed to a square, and up to `most` crops. An image is
// cropped if its longer side is at least `ratio` times the other one and no crop's side is below `side`.
class Crops : public TiledLayout {
 public:
  Crops(int64_t tile, int64_t tokens, int64_t side, int64_t most, double ratio)
      : TiledLayout(tile, tokens), side_(side), most_(most), ratio_(ratio) {
    if (most > std::min(side, names::kMaxCrops) || !(ratio >= 1))
      fail(Kind::bundle, "layout 'crops' has up to ", most, " crops of at least ", side, " pixels a side and ", tokens,
           " tokens, from a ratio of ", python_repr(ratio), " on; it needs at least 1 token, at most ", names::kMaxCrops,
           " crops and as many pixels, and a ratio of at least 1; export again");
  }

  int64_t max_views() const override { return 1 + most_; }
  bool has_marks() const override { return true; }
  int64_t count(int64_t width, int64_t height) const override { return tokens_ * (1 + crops(width, height)); }

  // The text is what transformers' processor prints.
  MarkedImage placed(int64_t width, int64_t height) const override {
    const int64_t count = crops(width, height);
    const std::string begin = kImageBegin, end = kImageEnd;
    if (count == 0) return {{tokens_}, {begin, end}};
    MarkedImage out{Ids(static_cast<size_t>(1 + count), tokens_), {kOriginal + begin, end + kSomeCrops + begin}};
    for (int64_t crop = 1; crop < count; ++crop) out.marks.push_back(end + " " + begin);
    out.marks.push_back(end);
    return out;
  }

  std::vector<Pixels> views(const Picture& picture, const ImageSettings& settings) const override {
    const int64_t width = picture.width, height = picture.height, longer = std::max(width, height);
    const int64_t count = crops(width, height), length = count > 0 ? (longer + count - 1) / count : longer;
    std::vector<Pixels> out{preprocess(picture, settings)};
    for (int64_t crop = 0; crop < count; ++crop) {
      const auto first = static_cast<int>(crop * length), size = static_cast<int>(std::min(longer - crop * length, length));
      out.push_back(preprocess(
          width >= height ? cut(picture, first, 0, size, picture.height) : cut(picture, 0, first, picture.width, size),
          settings));
    }
    return out;
  }

 protected:
  // The whole image included: one crop would be the image again.
  LayoutPtr with_at_most(int64_t max_views) const override {
    const int64_t most = std::min(most_, max_views - 1);
    return std::make_shared<Crops>(tile_, tokens_, side_, most > 1 ? most : 0, ratio_);
  }

 private:
  int64_t crops(int64_t width, int64_t height) const {
    const int64_t longer = std::max(width, height), shorter = std::min(width, height);
    const double shape = real_of(longer) / real_of(shorter);
    if (most_ == 0 || shape < ratio_) return 0;
    const auto nearest = static_cast<int64_t>(std::floor(shape + 0.5));
    const int64_t count = std::min(most_, std::max<int64_t>(2, std::min(longer / side_, nearest)));
    return std::min((longer + count - 1) / count, shorter) < side_ ? 0 : count;
  }

  int64_t side_, most_;
  double ratio_;
};

}  // namespace

LayoutPtr make_crops(Fields& parameters) {
  int64_t tile = parameters.whole("tile", 1, names::kMaxInputSide), tokens = parameters.whole("tokens", 1, 1 << 24);
  int64_t side = parameters.whole("side", 0), most = parameters.whole("most", 0);
  return std::make_shared<Crops>(tile, tokens, side, most, parameters.number("ratio"));
}

}  // namespace vtxcore
