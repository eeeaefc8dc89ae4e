// Pruning before the decoder: the patches that the tower's class token looks at most enter, the others do not.
#include "bundle/names.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

// Of each image the share `keep` of its tokens, rounded up, enters the decoder, in the order it has.
class Cls : public EntryReduction {
 public:
  using EntryReduction::EntryReduction;
  std::optional<Ids> select(const ImageTokens& image, const PromptText*) const override {
    return indices_of(image.patches.highest_of_each_view(names::kClsAttention, options_.number("keep")));
  }
};

const Registered<Cls> kCls("cls");

}  // namespace

}  // namespace vtxcore
