// Products of integers on OpenVINO: hidden states rounded to 8 bits, with a scale a token, by matrices of int8.
//
// OpenVINO's CPU plugin multiplies integers where both sides are quantised by constants. So a token's hidden state is
// divided by its own scale first, which leaves values from -127 to 127, and those are rounded by one constant range; its
// scale is multiplied back behind the product (LLM.int8(), arXiv 2208.07339, section 2.1, without its outliers' part).
#pragma once

#include <openvino/openvino.hpp>

#include "backends/openvino/bridge.hpp"

namespace vtxcore::openvino {

// Has every product with a matrix of int8, which is [out, in] with a scale for each row, multiply integers. Matrices of
// int4 and of floats are left alone.
void multiply_integers(ov::Model& model);

// Has matrices of int4 become int8 with a scale a row, in `memory`. An integer of a block becomes the nearest int8 to its
// value by the row's scale: what is rounded anew is at most half of 1/127 of the largest weight of its row.
void bring_to_int8(ov::Model& model, WeightMemory& memory);

}  // namespace vtxcore::openvino
