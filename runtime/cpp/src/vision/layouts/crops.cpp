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
  // The whole image included: one crop would be the image again.
  LayoutPtr limited(int64_t max_views) const override {
    const int64_t most = std::min(most_, max_views - 1);
    return std::make_shared<Crops>(tile_, tokens_, side_, most > 1 ? most : 0, ratio_);
  }

  // The text is what transformers' processor prints.
  ImagePlan plan(int64_t width, int64_t height) const override {
    const int64_t longer = std::max(width, height), count = crops(width, height);
    const std::string begin = kImageBegin, end = kImageEnd;
    if (count == 0) return {{{tokens_}}, {begin, end}};
    ImagePlan out{{{tokens_}}, {kOriginal + begin, end + kSomeCrops + begin}};
    const int64_t length = (longer + count - 1) / count;
    for (int64_t crop = 0; crop < count; ++crop) {
      const int64_t first = crop * length, last = std::min(longer, first + length);
      out.views.push_back({tokens_});
      out.views.back().box = width >= height ? CropBox{first, 0, last, height} : CropBox{0, first, width, last};
      out.marks.push_back(crop + 1 < count ? end + " " + begin : end);
    }
    return out;
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
