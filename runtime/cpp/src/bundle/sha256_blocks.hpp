// Blocks of SHA-256 by the processor's own instructions, where it has them: several times the speed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vtxcore {

extern const uint32_t kSha256Rounds[64];

bool has_sha_instructions();
// Takes `count` blocks of 64 bytes into the state. Only where there are instructions.
void sha256_blocks(uint32_t* state, const uint8_t* data, size_t count);

}  // namespace vtxcore
