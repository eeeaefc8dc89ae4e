#include "vision/layouts/native.hpp"

namespace vtxcore {

namespace {

Small read_small(Fields& parameters) {
  if (!parameters.has("small")) return Small::kept;
  const std::string name = parameters.text("small");
  if (name != "floored" && name != "nearest")
    fail(Kind::bundle, "layout 'native' enlarges small images by ", quoted(name),
         ", unknown to this vtx, which has floored, nearest; ", kUpgrade);
  return name == "floored" ? Small::floored : Small::nearest;
}

}  // namespace

Native read_native(Fields& parameters) {
  int64_t patch = parameters.whole("patch"), merge = parameters.whole("merge");
  int64_t least = parameters.whole("min_pixels"), most = parameters.whole("max_pixels");
  const bool flat = parameters.has("flat") && parameters.flag("flat");
  return {patch, merge, least, most, read_small(parameters), flat};
}

LayoutPtr make_native(Fields& parameters) { return std::make_shared<Native>(read_native(parameters)); }

}  // namespace vtxcore
