// Weights of `plain` graphs on OpenVINO: as narrow as the bundle holds them, and once in memory.
#pragma once

#include <openvino/openvino.hpp>

#include "backends/openvino/bridge.hpp"

namespace vtxcore::openvino {

// Has matrices of float16, bfloat16 and integers stay such: who multiplies by them widens a value as it is read.
// OpenVINO would else widen them while it compiles, and keep that in float32 beside the packed form it computes with.
// Where it computes in bfloat16, matrices of bfloat16 are multiplied as what they are: the kernel that widens values as it
// reads them is slower.
void keep_narrow(ov::Model& model, const std::string& compute);

// How many int4 weights of a row share a scale: the least of its matrices, and no less than names::kQuantisedRowsInt4. A
// matrix [out, in] is split into blocks by a reshape, [out, in / block, block].
int64_t int4_block(const ov::Model& model);

// Pages of the weights' files that are read while it lives do not stay resident. To be held while the engine packs them:
// each page is read once, and the packed form is what it computes with. The files stay mapped. Where pages need not go
// `at_once` they do so at the end, and none is fetched twice.
std::unique_ptr<Dropping> letting_go(const ov::Model& model, bool at_once);

}  // namespace vtxcore::openvino
