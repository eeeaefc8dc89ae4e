// The manifest of a bundle, vtx.json, read strictly: an unknown, missing or mistyped key is an error that names it.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/json.hpp"
#include "base/tensors.hpp"
#include "bundle/names.hpp"

namespace vtxcore {

// What a runtime knows of the vision tower: of one pass, pixels and patches a side, and its tokens.
struct TowerSpec {
  int64_t image, patch, grid, tokens, states;  // tokens as they leave the tower, and within it
  int64_t state_width, key_width;  // numbers of one of these that are projected, and of the mean over heads of its keys
  int64_t square;                  // patches a side that become one token
  int64_t pool;                    // patches a side whose states are averaged to those of one token
  bool class_token;
  bool several;           // features of several towers are joined
  std::string positions;  // how patches get theirs; with all but "table" images keep native resolution

  // Whether the first of a view's tokens is the class token: no hidden state was left out.
  bool class_first(size_t tokens_of_view) const { return class_token && static_cast<int64_t>(tokens_of_view) == states; }
};

// The layers whose tokens see only the last `window` positions, their own included; `head_dim` is theirs.
struct SlidingLayers {
  std::set<int64_t> layers;
  int64_t window, head_dim;
};

// The tokens that see each other both ways: those of a prompt, or those of each image.
enum class TwoWay { none, prompt, images };

// Sizes of the decoder and of the vision tower, as far as the runtime needs them.
struct ModelSpec {
  std::string name, family;
  int64_t layers, hidden, heads, kv_heads, head_dim, vocab, max_positions;
  double eps;      // of the decoder's norms
  Ids rope_parts;  // the part of a position that each rotary frequency turns by; empty if a position is one number
  TwoWay two_way = TwoWay::none;
  std::optional<SlidingLayers> sliding;
  std::optional<int64_t> shared;  // the first of the last layers, which read K and V of earlier ones and have none
  Ids conv_layers;                // in place of attention they have a convolution, and keep a state
  int64_t state_numbers = 0;      // of one of these layers
  TowerSpec tower;

  bool sees_both_ways() const { return two_way != TwoWay::none; }
  bool slides(int64_t layer) const { return sliding && sliding->layers.count(layer) > 0; }
  // The size of a layer's heads, and its mean over the layers that keep K and V.
  int64_t heads_of(int64_t layer) const { return slides(layer) ? sliding->head_dim : head_dim; }
  double mean_head_dim() const;
  // The layer whose K and V a layer reads: its own, or those of the last one before `shared` that slides as it does.
  int64_t source(int64_t layer) const;
  // The layers before `first` whose K and V the layers from it to `last` read.
  Ids sources(int64_t first, int64_t last) const;

  int64_t position_parts() const { return rope_parts.empty() ? 1 : std::tuple_size_v<Position>; }
};

// A text encoder that turns up to `max_tokens` ids into a vector of `width`, in one space with the patches. A segment
// of ids counts up to its first `end_id`, or up to its highest id if there is none.
struct TextTowerSpec {
  std::string tokenizer;  // its own tokenizer's file
  int64_t vocab, max_tokens, width;
  std::optional<int64_t> end_id;
};

// How images become views and tokens: the layout's name and parameters, and the most tokens of any one image. `min_tokens`:
// of the smallest, if images keep native resolution; the largest then need not fit the bundle's context.
struct LayoutSpec {
  std::string name;
  int64_t max_tokens;
  Json parameters;
  std::optional<int64_t> min_tokens;
};

struct StageSpec {
  int64_t first, last;              // layers, counted from 1, both included
  bool query;                       // whether it gives the last layer's q
  std::vector<std::string> inputs;  // names of the token inputs that it reads
  Ids cached, stateful;             // its layers that keep K and V in slots, and those that keep a state
  int64_t layers() const { return last - first + 1; }
  // Whether a layer keeps something of the tokens it has seen: else all read the K and V of earlier stages.
  bool keeps() const { return !cached.empty() || !stateful.empty(); }
};

// An input of stages per token, in addition to the hidden state: `width` numbers, and the graphs that give them.
struct TokenInput {
  std::string name;
  int64_t width;
  bool of_text, of_images;
};

// Files of the graphs of one dialect; of the stages and gates in the manifest's order.
struct Graphs {
  std::string vision, embed, head;
  std::vector<std::string> stages, gates;
  std::optional<std::string> score, text_tower, video, projector;
  bool vision_merges, vision_attention, vision_last_attention;
  std::optional<int64_t> vision_received;  // a block of the tower
};

struct FileRecord {
  int64_t bytes;
  std::string sha256;
};

// How one picture becomes [3, height, width]: pad, resize, crop, then (value * rescale - mean) / std. With none of the three
// the layout resizes pictures, and each has its own size.
struct ImageSettings {
  std::optional<std::array<int, 3>> pad;
  int shortest = 0;                           // resize the shortest edge to this; 0: see `resize`
  std::optional<std::pair<int, int>> resize;  // height, width
  std::string resample;
  std::optional<std::pair<int, int>> crop;  // height, width
  double rescale;
  std::array<double, 3> mean, std;
  bool within = false;        // pictures keep their shape within `resize`, at the top left; the rest is 0
  bool centred = false;       // in the middle of black instead
  bool ended = false;         // at the bottom right of black
  bool interpolated = false;  // resized as PyTorch does it, without antialiasing

  bool own_size() const { return !pad && !resize && !crop && shortest == 0; }
  std::pair<int, int> output() const;  // height, width; only if pictures do not have their own
};

// A conversation, turns of a role and parts, null for an image; and what the export's Jinja printed of it.
struct PromptExample {
  std::vector<std::pair<std::string, std::vector<std::optional<std::string>>>> turns;
  std::string text;
};

// How videos become tokens.
struct VideoSpec {
  LayoutSpec layout;
  ImageSettings image;
  bool own_graph;
  int64_t tokens;  // of a frame, with a graph of its own
};

// How answers write a box, as Python's BoxForm has it; `scale` none: pixels of the picture as the model sees it.
struct BoxForm {
  std::string pattern, label;
  std::optional<int64_t> scale;
  bool rows_first;
};

struct TextSettings {
  std::optional<BoxForm> boxes;  // none: the model has no stated form
  std::string image_token;
  int64_t image_token_id;
  std::optional<std::string> video_token;  // of bundles that take videos; the image token if their frames are images
  std::optional<int64_t> video_token_id;
  std::optional<int64_t> seg_token_id;  // for a segment of the image; answers give out the state that chose it
  std::optional<std::string> bos_token, unk_token;
  Ids end_ids, ids_before, ids_after;
  bool add_special_tokens;
  std::map<std::string, int64_t> control_tokens;
  int64_t characters_per_token = 0;  // the length bound; 0: there is none
  bool bound_normalized = false;
  std::map<std::string, std::string> variables;  // special tokens by the names that templates use
  std::vector<PromptExample> examples;
};

// The number of a signed bundle among those of one name.
struct BundleRelease {
  std::string name;
  int64_t number = 0;
  std::string until;  // the last day on which it may be loaded, YYYY-MM-DD in UTC; empty for no end
};

// Statistics of a robot's states or actions, by which they are normalised: means and standard deviations, or `ranges` whose
// ends become -1 and 1.
struct Statistics {
  Floats first, second;
  bool ranges;
};

// An expert, which makes `horizon` actions of `width` numbers from a state of `state` numbers and noise, in `steps` steps.
// `cameras` name the pictures of a prompt in their order; empty: any number. `absent_cameras`: some may be missing.
// `state_in`: the state is a token of the "expert", the last one of the "prompt", or bins in the prompt's "text".
struct ActionSpec {
  int64_t state, width, horizon, steps;
  std::vector<std::string> cameras;
  std::string state_in = "expert";
  bool absent_cameras = false;
  std::optional<int64_t> instruction_tokens;  // the most of the prompt's text
  std::optional<Statistics> of_states, of_actions;

  int64_t rows() const { return horizon + (state_in == "expert"); }  // tokens of the expert
};

// The range of each number of an action in the data set `name`: -1 means `low`, 1 `high`; a number whose mask is 0 has none.
struct ActionRange {
  std::string name;
  Doubles low, high;
  Mask mask;
};

// Actions as tokens, one for each number. `edges` equally spaced edges from -1 to 1 bound the bins, and a number is the
// middle of its bin. Token `vocab` - 1 is the first bin, the one before it the second; other tokens are the nearest bin.
struct ActionBins {
  int64_t vocab, edges;
  std::vector<ActionRange> ranges;
};

// True for the dialects of TensorRT, whose caches have the axis of slots before that of heads.
inline bool for_tensorrt(const std::string& dialect) { return dialect == "trt" || dialect == "trt10"; }

// True for the dialects whose head also gives the best token.
inline bool on_gpu(const std::string& dialect) { return dialect == "ort-cuda" || for_tensorrt(dialect); }

// True for the dialects whose graphs write K and V where they read them.
inline bool in_place(const std::string& dialect) { return dialect == "ort" || dialect == "ort-cuda"; }

struct Manifest {
  std::string vtx;
  ModelSpec model;
  LayoutSpec layout;
  std::string precision, vision_precision, head_precision, kv_dtype;
  int64_t max_context;
  Ids variants;
  std::string default_k;  // "none", "auto" or a number
  std::vector<std::string> reductions;
  std::vector<std::string> arithmetic;   // next to float32, that kept the answers at export
  std::optional<BundleRelease> release;  // of a signed bundle
  std::vector<StageSpec> stages;
  std::vector<TokenInput> token_inputs;
  Ids gates;
  std::map<std::string, Graphs> dialects;
  std::string tokenizer, chat_template, rope;
  std::optional<std::string> kv_scales;
  std::optional<TextTowerSpec> text_tower;
  std::optional<VideoSpec> video;
  std::optional<ActionSpec> action;  // the model outputs actions, and the head is its expert
  std::optional<ActionBins> bins;    // its tokens are actions
  ImageSettings image;
  TextSettings text;
  std::map<std::string, FileRecord> files;

  // How a message ends that says what does not fit: with the larger context that an export could have, if any.
  std::string or_more_context() const;

  // Bytes of a number of K or V in a dialect's graphs, and numpy's name of its type.
  std::string kv_type(const std::string& dialect) const;
  int64_t kv_bytes(const std::string& dialect) const;
  // Bytes of one KV slot of one layer, K and V of all heads, whose numbers have so many each and `more` a head: the mean of
  // the layers that keep them.
  int64_t kv_slot_bytes(int64_t number_bytes, int64_t more = 0) const;
};

// The section `model`. Throws Error(bundle).
ModelSpec read_model(const Json& value);

// The section `action`. Throws Error(bundle).
ActionSpec read_action(const Json& value);

// The section `bins`. Throws Error(bundle).
ActionBins read_bins(const Json& value);

// The section `text`. Throws Error(bundle).
TextSettings read_text_settings(const Json& value);

// The path itself, named at `where`; throws Error(bundle) unless it stays inside the bundle.
std::string check_inside(const std::string& name, const std::string& where);

// Reads the text of vtx.json. Throws Error(bundle).
Manifest parse_manifest(const std::string& text);

}  // namespace vtxcore
