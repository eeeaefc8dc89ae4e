#include "vision/layout.hpp"

#include <map>

#include "base/checks.hpp"
#include "bundle/fields.hpp"

namespace vtxcore {

LayoutPtr read_layout(const LayoutSpec& spec, const TowerSpec& tower) {
  static const std::map<std::string, LayoutPtr (*)(Fields&)> kLayouts{
      {"single", make_single},  {"anyres", make_anyres}, {"tiles", make_tiles},
      {"marked", make_marked},  {"native", make_native}, {"native_tiles", make_native_tiles},
      {"crops", make_crops},    {"budget", make_budget}, {"slices", make_slices},
      {"longest", make_longest}};
  auto kind = kLayouts.find(spec.name);
  std::string known;
  for (const auto& [name, make] : kLayouts) known += (known.empty() ? "" : ", ") + name;
  if (kind == kLayouts.end())
    fail(Kind::bundle, "vtx.json: the image layout '", spec.name.substr(0, 40), "' is unknown to this vtx, which has ",
         known, "; ", kUpgrade);
  LayoutPtr layout = make_declared(kind->second, spec);
  if (layout->min_tokens() != spec.min_tokens)
    fail(Kind::bundle, "vtx.json: layout.min_tokens ", spec.min_tokens.value_or(0), " is not that of '", spec.name,
         "'; export again");
  layout->check(tower);
  return layout;
}

void SquareLayout::check(const TowerSpec& tower) const {
  if (patch_ != tower.patch || merge_ != tower.square || tower.positions != positions_)
    fail(Kind::bundle, "vtx.json: the image layout has tokens of ", merge_, " x ", merge_, " patches of ", patch_,
         " pixels, the tower of ", tower.square, " x ", tower.square, " of ", tower.patch, "; export the bundle again");
}

LayoutPtr Layout::limited(int64_t) const {
  fail(Kind::request, "max_tiles has no effect here: this model sees each image in one piece; ",
       min_tokens() ? "use max_pixels (--max-pixels)" : "leave it out");
}

LayoutPtr Layout::within(int64_t) const {
  fail(Kind::request, "max_pixels has no effect here: this model does not see images at native resolution; leave it out");
}

void Layout::choices(std::optional<int64_t>, const Take& take) const {
  for (int64_t views = max_views(); views > 1; --views)
    if (take(limited(views))) return;
  take(max_views() == 1 ? nullptr : limited(1));
}

std::optional<int64_t> Layout::fitting(const std::vector<Size>& sizes, int64_t tokens) const {
  std::optional<int64_t> found;
  if (!pixels()) return found;
  choices(std::nullopt, [&](const LayoutPtr& choice) {
    int64_t total = 0;
    for (auto [width, height] : sizes) {
      const ImagePlan image = choice->plan(width, height);
      total += image.tokens() + static_cast<int64_t>(image.spans.size());
    }
    if (total <= tokens) found = choice->pixels();
    return found.has_value();
  });
  return found;
}

LayoutPtr sized_layout(const LayoutPtr& layout, int64_t image_tokens, int64_t width, int64_t height) {
  const int64_t most = layout->max_tokens();
  if (image_tokens > most)
    fail(Kind::request, "image_tokens is ", image_tokens, "; images of this bundle have at most ", most, "; lower it");
  LayoutPtr sized;
  int64_t fewest = most;
  layout->choices(image_tokens, [&](const LayoutPtr& choice) {
    const LayoutPtr& candidate = choice ? choice : layout;
    fewest = candidate->count(width, height);
    if (fewest <= image_tokens) sized = candidate;
    return sized != nullptr;
  });
  if (!sized)
    fail(Kind::request, "image_tokens is ", image_tokens, "; an image of ", width, "x", height, " pixels has at least ",
         fewest, " here; raise it");
  return sized;
}

void check_image_tokens(const Layout& layout, int64_t image_tokens) {
  check_whole("image_tokens", image_tokens, 1, names::kMostWhole);
  if (layout.max_views() == 1 && !layout.min_tokens())
    fail(Kind::request, "image_tokens has no effect here: every image of this model has ", layout.max_tokens(),
         " tokens; leave it out");
}

LayoutPtr Layout::released() const {
  fail(Kind::request, "fit 'released' is for LLaVA-NeXT (tiles of CDPruner's code) and pi0 (pictures of openpi); ",
       "leave it out");
}

ImageSettings settings_for(const Layout& layout, const ImageSettings& settings, const std::string& fit) {
  if (fit == "released" && settings.within && !settings.interpolated) {  // pi0's pictures, as openpi prepares them
    ImageSettings out = settings;
    out.resample = "bilinear", out.centred = true;
    return out;
  }
  if (fit == "released") {
    layout.released();
    return settings;
  }
  if (!fit.empty() && (layout.max_views() > 1 || settings.own_size()))
    fail(Kind::request, "fit '", fit.substr(0, 20), "' has no effect here: this model sees images of any shape ",
         settings.own_size() ? "at native resolution" : "in tiles", "; leave it out");
  return fitted(settings, fit);
}

}  // namespace vtxcore
