// A grid of tokens made smaller, with the numbers of torch's bilinear `interpolate` (align_corners=False).
#pragma once

#include "base/tensors.hpp"

namespace vtxcore {

// Tokens of a grid [height, width] in raster order to [rows, columns], each a mean of the four nearest; no antialiasing.
Rows shrunk_grid(const Rows& grid, int64_t height, int64_t width, int64_t rows, int64_t columns);

// Which of `size` steps along a side lies in the middle of each of `wanted` ones, [wanted].
Ids nearest(int64_t size, int64_t wanted);

}  // namespace vtxcore
