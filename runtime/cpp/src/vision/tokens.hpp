// An image as the decoder sees it: its tokens, and where in the picture each of them comes from.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/tensors.hpp"

namespace vtxcore {

struct TowerSpec;

// Where the tokens of one image come from; vectors [tokens], in the order of the tokens.
struct Patches {
  Ids places;   // the patch in raster order, view after view; of a merged window its first one, of the class token -1,
                // of a newline between rows of tiles -2
  Mask merged;  // whether the token is a merged window
  std::map<std::string, Floats> signals;  // what else the vision graph says of each token; of several numbers "NAME.0", ...
  std::map<std::string, Rows> states;     // the same with a vector a token: CLIP's patches, inputs of stages
  std::optional<Ids> views;               // of an image in tiles, which of them each comes from, -1 none

  size_t count() const { return places.size(); }
  Patches take(const Ids& which) const;
  // Of each view the `part` of its tokens, rounded up, with the highest `signal`; no newline is among them.
  Mask highest_of_each_view(const std::string& signal, double part) const;
  std::vector<Ids> of_views() const;  // the tokens of each view, without newlines
};

// The tower's own tokens of each of `views` of an image, the class token of each first, as the last block in use leaves
// them: what goes into the projector, the mean over heads of their keys, and what the class token gives to each, mean over
// heads. `columns`: the tiles of a row.
struct TowerTokens {
  Rows states, keys;
  Floats attention;
  size_t views = 1;
  int64_t columns = 1;
};

// New tokens of an image, each a weighted sum of the tower's before the projector. Those of token i begin at `starts[i]` of
// `sources` and `weights`. A sum of several has the place of its target, the first of them.
struct MergedTokens {
  Patches patches;
  Ids starts, sources;
  Floats weights;
  Rows states(const TowerTokens& tower) const;
};

// How alike an image's tokens, or those of one of its views, are to each other, [n, n], and the length of each.
struct Likeness {
  Doubles lengths;
  Floats cosines;
};

// Tokens [count, hidden] that the tower and projector made of one image. `offsets` are their positions behind the
// image's first one and `span` the positions that the image takes; none: they follow each other without gaps. `runs`: the
// numbers of tokens between texts of the prompt, where each of them takes `span` positions anew, and one without tokens
// none. `likeness` is worked out for the first question that needs it, and serves the next ones; an image belongs to one
// conversation. `key` is the hash of the image's pixels. `tower`: what they were made of, where the bundle was exported for
// that.
struct ImageTokens {
  Rows rows;
  Patches patches;
  std::optional<Positions> offsets;
  int64_t span = 0;  // with `offsets`
  Ids runs;
  mutable std::map<int64_t, std::shared_ptr<const Likeness>> likeness;  // by the first token; -1: of all tokens
  mutable std::string key;
  std::shared_ptr<const TowerTokens> tower;
  std::shared_ptr<const ImageTokens> uncut;  // of all whole views, where the layout left out padding and a method wants it
  mutable std::pair<std::string, Rows> projected;  // merged tokens that the next question takes again, by who merged them

  int64_t positions() const;
  std::shared_ptr<const ImageTokens> take(const Ids& which, bool keep_positions) const;
};

// An image in a prompt, in `spans` of so many image tokens each, with text of its layout among them: `marks` stand before,
// between and after the spans, one more than these. `span`: the positions of all tokens, if they are more than these.
// `number`: the texts before and after its number among the prompt's images, from 0, which comes before all else.
struct MarkedImage {
  Ids spans;
  std::vector<std::string> marks;
  int64_t span = 0;
  std::optional<std::pair<std::string, std::string>> number = std::nullopt;

  static MarkedImage plain(int64_t tokens) { return {{tokens}, {"", ""}}; }
  bool has_text() const;
  int64_t tokens() const;
  // What is printed for image `at` of the prompt, one image token a span.
  std::string text(const std::string& image_token, size_t at) const;
};

// The outputs of a vision graph for one image.
struct VisionOutputs {
  std::map<std::string, Ids> whole;
  std::map<std::string, Floats> signals;
  std::map<std::string, Rows> states;
};

// The tokens of them, of a graph of the bundle's tower; those that say they are gone are left out. Throws Error(bundle)
// where sizes differ.
std::shared_ptr<const ImageTokens> image_tokens(VisionOutputs found, const TowerSpec& tower);

// Tokens that come from no patch: learned newlines.
std::shared_ptr<const ImageTokens> newlines(const Rows& rows);

// Tokens of a grid [height, width] in raster order to [rows, columns], each a mean of the four nearest: torch's bilinear
// `interpolate` (align_corners=False), no antialiasing.
Rows shrunk_grid(const Rows& grid, int64_t height, int64_t width, int64_t rows, int64_t columns);
// The step of `size` along a side in the middle of each of `wanted` ones, [wanted].
Ids nearest_steps(int64_t size, int64_t wanted);

// The tokens of views, and of newlines, one after the other; `columns` of tiles stand in a row.
std::shared_ptr<const ImageTokens> joined(const std::vector<std::shared_ptr<const ImageTokens>>& views, int64_t columns = 1);

// ceil(part * count), free of the rounding of binary fractions: 0.1 of 30 is 3.
int64_t share(double part, int64_t count);
// `value` to so many decimals, as Python's round(value, digits).
double rounded_to(double value, int digits);
// Which are the `count` largest; of equal ones the earlier.
Mask highest(const Floats& values, int64_t count);

}  // namespace vtxcore
