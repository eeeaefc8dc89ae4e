// Pruning before the decoder: the patches that the tower's class token looks at most enter, the others do not.
#include "bundle/names.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

// Of each image the share `keep` of its tokens, rounded up, enters the decoder, in the order it has.
class Cls : public Method, public Entry, public std::enable_shared_from_this<Cls> {
 public:
  explicit Cls(double keep) : keep_(keep) {
    if (!(keep > 0 && keep <= 1))
      fail(Kind::request, "cls: keep is ", python_repr(keep), "; give the share to keep, above 0 and up to 1");
  }
  std::string name() const override { return "cls"; }
  std::string spec() const override { return "cls:keep=" + spec_number(keep_); }
  std::string key() const override { return spec(); }
  Needs needs() const override {
    Needs needs;
    needs.attention = true;
    return needs;
  }
  std::shared_ptr<const Entry> entry() const override { return shared_from_this(); }
  std::optional<Ids> select(const ImageTokens& image, const PromptText*) const override {
    return indices_of(image.patches.highest_of_each_view(names::kClsAttention, keep_));
  }

 private:
  double keep_;
};

}  // namespace

MethodPtr make_cls(SpecOptions& options) { return std::make_shared<Cls>(options.number("keep", 0.25)); }

}  // namespace vtxcore
