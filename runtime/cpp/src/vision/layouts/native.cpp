#include "vision/layouts/native.hpp"

namespace vtxcore {

Native read_native(Fields& parameters) {
  int64_t patch = parameters.whole("patch"), merge = parameters.whole("merge");
  int64_t least = parameters.whole("min_pixels"), most = parameters.whole("max_pixels");
  return {patch, merge, least, most};
}

LayoutPtr make_native(Fields& parameters) { return std::make_shared<Native>(read_native(parameters)); }

}  // namespace vtxcore
