// Rewrites of `plain` graphs for OpenVINO: products of integers, narrow weights, caches in blocks.
#pragma once

#include <openvino/openvino.hpp>
#include <set>

#include "backends/openvino/bridge.hpp"

namespace vtxcore::openvino {

// Products of integers on OpenVINO: hidden states rounded to 8 bits, with a scale a token, by matrices of int8.
//
// OpenVINO's CPU plugin multiplies integers where both sides are quantised by constants. So a token's hidden state is
// divided by its own scale first, which leaves values from -127 to 127, and those are rounded by one constant range; its
// scale is multiplied back behind the product (LLM.int8(), arXiv 2208.07339, section 2.1, without its outliers' part).

// Has every product with a matrix of int8, which is [out, in] with a scale for each row, multiply integers. Matrices of
// int4 and of floats are left alone.
void multiply_integers(ov::Model& model);

// Has matrices of int4 become int8 with a scale a row, in `memory`. An integer of a block becomes the nearest int8 to its
// value by the row's scale: what is rounded anew is at most half of 1/127 of the largest weight of its row.
void bring_to_int8(ov::Model& model, WeightMemory& memory);

// Weights of `plain` graphs on OpenVINO: as narrow as the bundle holds them, and once in memory.

// Has matrices of float16, bfloat16 and integers stay such: who multiplies by them widens a value as it is read.
// OpenVINO would else widen them while it compiles, and keep that in float32 next to the packed form it computes with.
// Where it computes in bfloat16, matrices of bfloat16 are multiplied as what they are: the kernel that widens values as it
// reads them is slower.
void keep_narrow(ov::Model& model, const std::string& compute);

// How many integers of a row share a scale: the least of its matrices' blocks that has names::kQuantisedRowsInt4 or more,
// 0 if there is none. A matrix [out, in] is split into blocks by a reshape, [out, in / block, block].
int64_t weight_block(const ov::Model& model);

// Pages of the weights' files that are read while it lives do not stay resident. To be held while the engine packs them:
// each page is read once, and the packed form is what it computes with. The files stay mapped.
std::unique_ptr<Dropping> letting_go(const ov::Model& model);

// `plain` graphs as OpenVINO's own kernel takes them: one operator fills caches in blocks and attends to them.

// Replaces each softmax(q k^T * scale + mask) v, which these layers have, and the caches that it grows, by one operator that
// fills blocks. Caches become inputs, named as they were, [blocks, kv_heads, slots of a block, head_dim],
// which the operator writes into; in which type, the engine's settings say. A row sees its own slot and those before, as the
// mask said; in layers `sliding` the last of these alone, as many as the input names::kPagedWindow says, in the blocks
// that inputs behind names::kPagedSliding say. `windows`: the model has such layers, here or in other stages. `both_ways`: tokens with a 1 in the input names::kPagedImages also see
// those that follow. Keys are divided by `key_scales` [kv_heads, head_dim] of their layer, and queries multiplied: products
// stay, and channels have one range. Throws std::runtime_error where attention is written in another way than vtx writes it.
void page_caches(ov::Model& model, const std::vector<int64_t>& layers, int64_t heads, const std::set<int64_t>& sliding,
                 bool windows, bool both_ways, const std::map<int64_t, std::vector<float>>& key_scales);

// Adds the input names::kPagedRows, [m] int32: the last layer's output projection and MLP run for these rows of the hidden
// states alone, and these are what the stage gives; its K and V are of all. `whole`: the last layer keeps a state, so it
// runs for all, and only its result is chosen from. Caches must be in pages already. Throws std::runtime_error where a layer
// is written in another way than vtx writes it.
void choose_rows(ov::Model& model, bool whole);

// Has the output names::kStateOut given in the parts that it joins, each an output [conversations, ends, width] of that
// name, a dot and its number: the engine's first run of a graph that joins those of one layer gives zeros among them.
// Returns the widths, layer after layer; none where there is no such output, or it is made in another way.
std::vector<int64_t> split_states(ov::Model& model);

}  // namespace vtxcore::openvino
