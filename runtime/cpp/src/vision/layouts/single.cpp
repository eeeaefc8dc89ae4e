// One view of each image, and the same number of tokens whatever its size: LLaVA-1.5.
#include "bundle/fields.hpp"
#include "vision/layout.hpp"

namespace vtxcore {
namespace {

class Single : public Layout {
 public:
  explicit Single(int64_t tokens) : tokens_(tokens) {}
  int64_t max_tokens() const override { return tokens_; }
  void check(const TowerSpec& tower) const override {
    if (tokens_ != tower.tokens)
      fail(Kind::bundle, "vtx.json: the image layout says ", tokens_, " tokens an image, the tower gives ", tower.tokens,
           "; export the bundle again");
  }
  ImagePlan plan(int64_t, int64_t) const override { return {{{tokens_}}}; }

 private:
  int64_t tokens_;
};

}  // namespace

LayoutPtr make_single(Fields& parameters) { return std::make_shared<Single>(parameters.whole("tokens")); }

}  // namespace vtxcore
