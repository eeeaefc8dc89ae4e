// The constants that stages of every backend read: rotary tables, and the scales of int8 K and V.
#pragma once

#include <map>
#include <string>

#include "bundle/bundle.hpp"

namespace vtxcore {

// cos and sin, each [max_context, head_dim / 2], and with int8 K and V two scales a layer, each
// [1, kv_heads, 1, head_dim]. Throws Error(bundle) if one is missing or has another shape or type.
std::map<std::string, Floats> read_tables(const Bundle& bundle);
Ids table_shape(const Manifest& m, const std::string& name);

// Where tokens read the rotary tables: at `rows` of the bundle's, or, where parts of a position differ, of their `own`, each
// number of which is from the row of the bundle's that its part says. By name, [tokens, head_dim / 2].
struct RopeRows {
  Ids rows;
  std::map<std::string, Floats> own;
};
RopeRows rope_rows(const std::map<std::string, Floats>& tables, const Manifest& m, const Positions& positions);

// The learned newline that some layouts put among an image's tokens, as one token [1, hidden]. Throws Error(bundle).
Rows read_newline(const Bundle& bundle);

// The weight [hidden, state] and bias [hidden] that make a robot's state a token of the prompt. Throws Error(bundle).
std::pair<Floats, Floats> read_state_projection(const Bundle& bundle);

// The weight [hidden] of the decoder's last norm, for reductions that measure hidden states behind it.
Floats read_final_norm(const Bundle& bundle);

}  // namespace vtxcore
