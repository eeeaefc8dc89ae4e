// An image as the decoder sees it: its tokens, and where in the picture each of them comes from.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/tensors.hpp"

namespace vtxcore {

// Where the tokens of one image come from; vectors [tokens], in the order of the tokens.
struct Patches {
  Ids places;   // the patch in raster order; of a merged window its first one, of the class token -1
  Mask merged;  // whether the token is a merged window
  std::map<std::string, Floats> signals;  // what else the vision graph says of each token

  size_t count() const { return places.size(); }
  Patches take(const Ids& which) const;
};

// Tokens [count, hidden] that the tower and projector made of one image. `offsets` are their positions behind the
// image's first one and `span` the positions that the image takes; none: they follow each other without gaps.
struct ImageTokens {
  Rows rows;
  Patches patches;
  std::optional<Ids> offsets;
  int64_t span = 0;  // with `offsets`

  int64_t positions() const { return offsets ? span : static_cast<int64_t>(rows.count()); }
  std::shared_ptr<const ImageTokens> take(const Ids& which, bool keep_positions) const;
};

// The outputs of a vision graph for one image.
struct VisionOutputs {
  Rows features;
  std::map<std::string, Ids> whole;
  std::map<std::string, Floats> signals;
};

// The tokens of them; those that say they are gone are left out. Throws Error(bundle) where sizes differ.
std::shared_ptr<const ImageTokens> image_tokens(VisionOutputs found);

// ceil(part * count), free of the rounding of binary fractions: 0.1 of 30 is 3.
int64_t share(double part, int64_t count);
// `value` to nine decimals, as Python's round(value, 9).
double round9(double value);
// Which are the `count` largest; of equal ones the earlier.
Mask highest(const Floats& values, int64_t count);

}  // namespace vtxcore
