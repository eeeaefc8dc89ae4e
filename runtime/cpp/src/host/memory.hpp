// What this machine has of memory.
#pragma once

#include <cstdint>
#include <optional>

namespace vtxcore {

// Bytes of memory that a new program could take; none where the system does not say.
std::optional<int64_t> available_memory();

}  // namespace vtxcore
