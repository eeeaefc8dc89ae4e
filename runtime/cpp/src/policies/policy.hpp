// Policies: which image tokens go on, decided between two stages. One file a method, in `methods/`.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "backends/backend.hpp"
#include "base/tensors.hpp"
#include "bundle/manifest.hpp"
#include "vision/tokens.hpp"

namespace vtxcore {

// What a method asks of a bundle; policies/base.py says what each means.
struct Needs {
  std::set<int64_t> cuts, queries;
  std::optional<int64_t> shrinks;
  bool merging = false, attention = false, last_attention = false, final_norm = false, text_tower = false, projector = false;
  std::set<int64_t> tower_layers, ahead;
  bool of_patches() const { return merging || attention || last_attention || text_tower || !tower_layers.empty(); }
};

// The text of a prompt, as known before its images enter the decoder: ids, input embeddings, and which of them stand
// after the last image.
struct PromptText {
  Ids ids;
  Rows hidden;
  Mask after;
  Rows embeddings;          // [segments, width] of the question alone by the text tower, where a policy needs it
  std::string key() const;  // equal for equal texts
};

using Images = std::vector<std::shared_ptr<const ImageTokens>>;

// What is known between two stages, for one question.
struct Boundary {
  int64_t layer;                                // the first layer to come
  std::function<Rows()> question_hidden;        // of the text after the last image
  const Images& images;                         // that entered the decoder
  Mask present;                                 // which of all their tokens are still there
  std::function<Scores(bool)> scores;           // of those still there; true: the last question token's only
  std::function<Rows()> image_hidden;           // of those still there
  std::function<std::pair<Rows, Rows>()> keys;  // of the layer just run: those still there, and the question's
  std::function<std::pair<Ids, Ids>()> positions;
  const Floats* final_norm;
  std::function<Scores()> next_scores;  // of those still there, by the last question token in the layer to come

  int64_t count() const { return count_of(present); }
};

// The `count` image tokens that get most attention from the prompt's last token, mean over heads; none: all.
std::optional<Mask> most_attended(const Boundary& boundary, int64_t count);

// The part of a method that works on an image before it enters the decoder.
class Entry {
 public:
  virtual ~Entry() = default;
  virtual std::string key() const = 0;  // equal for equal options
  virtual Extras vision_inputs() const { return {}; }
  virtual bool uses_question() const { return false; }
  virtual bool keeps_positions() const { return false; }
  virtual bool of_uncut() const { return false; }  // it selects from all tokens of whole views, padding included
  // Sums of the tower's tokens that take the place of the image's tokens; none: it merges none.
  virtual std::optional<MergedTokens> merge(const ImageTokens&) const { return std::nullopt; }
  // Indices of the image tokens that enter, in their order there; none: all as they are.
  virtual std::optional<Ids> select(const ImageTokens&, const PromptText*) const { return std::nullopt; }
};

// A method that leaves out image tokens. At its cuts a `whole` one, a part of K and not of a spec, removes all or none, or
// where it has queries all but some.
class Method {
 public:
  virtual ~Method() = default;
  virtual std::string name() const = 0;
  virtual std::string spec() const = 0;  // canonical, every option spelled out
  virtual bool whole() const { return false; }
  virtual bool fixed() const { return false; }  // whether a whole one removes all whatever is asked
  virtual bool renumbers() const { return false; }
  // How many of so many image tokens go on, of a method that of the attention reads only that of the prompt's last token,
  // and none where that is all; none: of any other.
  virtual std::optional<int64_t> last_query_keeps(int64_t) const { return std::nullopt; }
  virtual Needs needs() const { return {}; }
  virtual std::shared_ptr<const Entry> entry() const { return nullptr; }
  // Which tokens of the images it never drops; none: there are no such tokens.
  virtual std::optional<Mask> marks(const Images&) const { return std::nullopt; }
  // Which of the image tokens still there go on, [boundary.count()]; none: all. Asked at its cuts only.
  virtual std::optional<Mask> keep_mask(const Boundary&) const { return std::nullopt; }
};

using MethodPtr = std::shared_ptr<const Method>;

// Image tokens leave at a boundary: `kept` of those that were there go on.
struct Removal {
  Mask kept;
  std::vector<std::string> by;
  bool renumbers, shrinks;
};

// What one gate said: the probability that the image may leave before layer `k`, and its cost.
struct Decision {
  int64_t k;
  double probability, ms;
};

// What one question is asked with: methods in the order in which they are asked, first the one that removes images.
struct Policy {
  std::vector<MethodPtr> parts;
  Floats final_norm;                                 // where a method needs it
  std::shared_ptr<std::vector<Decision>> decisions;  // of gates; null if there are none

  Needs needs() const;
  std::vector<MethodPtr> reductions() const;
  std::set<int64_t> token_cuts() const;
  // The layer before which the whole image leaves whatever is asked; none if a question decides, or never.
  std::optional<int64_t> exit() const;
  // The layer from which only a rest of the image goes on, which every prompt chooses anew; none without a rest.
  std::optional<int64_t> rest_cut() const;
  // Whether methods read the attention of `layer` where `count` image tokens are left, and of more than the last token.
  std::pair<bool, bool> reads(int64_t layer, int64_t count) const;
  bool renumbers() const;
  std::vector<std::shared_ptr<const Entry>> entries() const;
  std::optional<Removal> ask(const Boundary& boundary) const;
  std::string key() const;  // equal for equal policies
};

using Odds = std::function<Floats(int64_t, const Rows&)>;

// Image tokens that stay from K on: a share of them, or a number.
struct Rest {
  bool is_share;
  double value;
};

// The rest that "10%" or "57" means. Throws Error(request).
Rest read_rest(const std::string& text);

// The reason why the attention that a layer gives to image tokens cannot rank them; empty: it can.
std::string unscored(const ModelSpec& model, int64_t layer);

// The policy that `k` ("none", "auto" or a number), `rest` (none: no image token) and `reduce` (a spec) mean, checked
// against the bundle. Throws Error(request).
Policy make_policy(const std::string& k, const std::optional<Rest>& rest, const std::string& reduce, const Manifest& m,
                   const std::string& dialect, const Odds& odds, double threshold,
                   const std::function<Floats()>& final_norm);

// The methods that a spec names, in the order in which they work; "none" names none. Throws Error(request).
std::vector<MethodPtr> parse_spec(const std::string& text);
std::string to_spec(const std::vector<MethodPtr>& parts);

}  // namespace vtxcore
