// `plain` graphs as OpenVINO's own kernel takes them: one operator fills caches in blocks and attends to them.
#pragma once

#include <openvino/openvino.hpp>

namespace vtxcore::openvino {

// Replaces each softmax(q k^T * scale + mask) v of the layers `first` to `last`, and the caches that it grows, by one
// operator that fills blocks. Caches become inputs, named as they were, [blocks, kv_heads, slots of a block, head_dim],
// which the operator writes into; in which type, the engine's settings say. A row sees its own slot and those before, as the
// mask said. Throws std::runtime_error where attention is written in another way than vtx writes it.
void page_caches(ov::Model& model, int64_t first, int64_t last, int64_t heads);

// Adds the input names::kPagedRows, [m] int32: the last layer's output projection and MLP run for these rows of the hidden
// states alone, and these are what the stage gives; its K and V are of all. Caches must be in pages already. Throws
// std::runtime_error where a layer is written in another way than vtx writes it.
void choose_rows(ov::Model& model);

}  // namespace vtxcore::openvino
