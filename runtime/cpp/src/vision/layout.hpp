// How an image becomes views, passes of the tower, and tokens: the layout that a bundle declares, with parameters.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bundle/fields.hpp"
#include "bundle/manifest.hpp"
#include "vision/plan.hpp"

namespace vtxcore {

inline double real_of(int64_t value) { return static_cast<double>(value); }

// A layout of images: `plan` and its limits. Sizes of images are in pixels, as they are before any preprocessing.
class Layout {
 public:
  virtual ~Layout() = default;
  // The views, tokens and text of an image of this size.
  virtual ImagePlan plan(int64_t width, int64_t height) const = 0;
  virtual int64_t max_tokens() const = 0;  // that any image gives
  // Of the smallest image, where images are seen at native resolution.
  virtual std::optional<int64_t> min_tokens() const { return std::nullopt; }
  virtual int64_t max_views() const { return 1; }
  // The `max_pixels` at which `within` gives this layout, where images are not larger here.
  virtual std::optional<int64_t> pixels() const { return std::nullopt; }
  virtual bool newline() const { return false; }  // whether a learned newline stands among the tokens
  // Throws Error(bundle) if the tower cannot give these tokens.
  virtual void check(const TowerSpec& tower) const = 0;
  // The layout with at most so many views an image, at least 1. Throws Error(request): images have one view anyway.
  virtual std::shared_ptr<const Layout> limited(int64_t max_views) const;
  // The layout with images of at most so many pixels after they are resized. Throws Error(request): not even one token has
  // so few, or images are not seen at native resolution.
  virtual std::shared_ptr<const Layout> within(int64_t max_pixels) const;
  // The numbers of tokens that images can be asked to have at most, the largest first; empty: any number.
  virtual Ids budgets() const { return {}; }
  // Gives `take` the layouts in which an image may have at most so many tokens, or any number, the largest first, until it
  // takes one. Null: this one.
  using Take = std::function<bool(const std::shared_ptr<const Layout>&)>;
  virtual void choices(std::optional<int64_t> tokens, const Take& take) const;
  // The layout of each of so many images in one prompt; null: this one.
  virtual std::shared_ptr<const Layout> among(size_t) const { return nullptr; }
  // How the released code of CDPruner sees LLaVA-NeXT's images. Throws Error(request): images are not seen so.
  virtual std::shared_ptr<const Layout> released() const;

  // The largest `max_pixels` at which images of these sizes (width, height) have at most `tokens` in total, if there is one;
  // text that ends their rows counts.
  std::optional<int64_t> fitting(const std::vector<Size>& sizes, int64_t tokens) const;
  int64_t count(int64_t width, int64_t height) const { return plan(width, height).tokens(); }
  // Whether text stands among the tokens of an image.
  bool has_marks() const { return !plan(1, 1).marks.empty(); }
  // What stands in a prompt for an image of this size.
  MarkedImage placed(int64_t width, int64_t height) const { return plan(width, height).in_prompt(); }
};

using LayoutPtr = std::shared_ptr<const Layout>;

// Views of any shape. A token is a square of `merge` x `merge` patches of `patch` pixels a side; `positions` are those of
// the towers that give such tokens.
class SquareLayout : public Layout {
 public:
  SquareLayout(int64_t patch, int64_t merge, const char* positions)
      : patch_(patch), merge_(merge), unit_(product({patch, merge})), area_(product({unit_, unit_})), positions_(positions) {
  }
  void check(const TowerSpec& tower) const override;

 protected:
  int64_t patch_, merge_, unit_, area_;

 private:
  const char* positions_;
};

// The layout with at most `image_tokens` tokens of an image of this size. Throws Error(request) for fewer or more tokens
// than the image can have.
LayoutPtr sized_layout(const LayoutPtr& layout, int64_t image_tokens, int64_t width, int64_t height);

// Throws Error(request) for a number below 1, or if all images of this bundle have the same.
void check_image_tokens(const Layout& layout, int64_t image_tokens);

// What `make` makes of the declared parameters, of images or of videos. Throws Error(bundle): parameters that it does not
// have, or another number of tokens than declared.
template <typename Pointer>
Pointer make_declared(Pointer (*make)(Fields&), const LayoutSpec& spec) {
  Fields parameters(spec.parameters, "vtx.json: layout '" + spec.name + "'");
  Pointer layout = make(parameters);
  parameters.done();
  if (layout->max_tokens() != spec.max_tokens)
    fail(Kind::bundle, "vtx.json: layout '", spec.name, "' gives at most ", layout->max_tokens(),
         " tokens, layout.max_tokens is ", spec.max_tokens, "; export again");
  return layout;
}

// The layout that a bundle declares, checked against its tower. Throws Error(bundle).
LayoutPtr read_layout(const LayoutSpec& spec, const TowerSpec& tower);

// `fitted`, and Error(request) for a fit where images are seen in tiles or at native resolution, which show all of any
// shape.
ImageSettings settings_for(const Layout& layout, const ImageSettings& settings, const std::string& fit);

// Layouts of each kind; `parameters` as the bundle has them.
LayoutPtr make_single(Fields& parameters);
LayoutPtr make_anyres(Fields& parameters);
LayoutPtr make_tiles(Fields& parameters);
LayoutPtr make_marked(Fields& parameters);
LayoutPtr make_native(Fields& parameters);
LayoutPtr make_native_tiles(Fields& parameters);
LayoutPtr make_crops(Fields& parameters);
LayoutPtr make_budget(Fields& parameters);
LayoutPtr make_slices(Fields& parameters);
LayoutPtr make_longest(Fields& parameters);

}  // namespace vtxcore
