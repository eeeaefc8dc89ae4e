#include <algorithm>

#include "backends/tensorrt/cache.hpp"

namespace vtxcore {

uint8_t* Queries::room(size_t count) {
  size_t bytes = 4 * count * static_cast<size_t>(context_.manifest.model.heads * context_.manifest.model.head_dim);
  if (!buffer_ || buffer_->size() < bytes) {
    buffer_.reset();
    buffer_.emplace(context_.cuda, bytes, "the tokens' queries");
  }
  count_ = count;
  return buffer_->address();
}

Scores Queries::attention(uint8_t* key, int64_t slots, int64_t length, bool last_only) {
  auto longest = static_cast<size_t>(context_.engines.longest(context_.score));
  Scores out{Floats(static_cast<size_t>(slots)), Floats(static_cast<size_t>(slots))};
  for (size_t start = last_only ? count_ - 1 : 0; start < count_; start += longest) {
    size_t end = std::min(start + longest, count_);
    Scores part = run(start, end, key, slots, length - static_cast<int64_t>(count_ - end));
    for (size_t slot = 0; slot < out.first.size(); ++slot) {
      out.first[slot] += part.first[slot];
      out.second[slot] = std::max(out.second[slot], part.second[slot]);
    }
  }
  out.first.resize(static_cast<size_t>(length));
  out.second.resize(static_cast<size_t>(length));
  return out;
}

// The scores of tokens `start` to `end`, the last of which fills slot `filled` - 1: none sees a later one.
Scores Queries::run(size_t start, size_t end, uint8_t* key, int64_t slots, int64_t filled) {
  const ModelSpec& model = context_.manifest.model;
  LoadedEngines& engines = context_.engines;
  Cuda& cuda = context_.cuda;
  int64_t width = model.heads * model.head_dim;
  auto total = static_cast<int32_t>(filled);
  Addresses addresses{{names::kQuery, buffer_->address() + 4 * static_cast<size_t>(width) * start}, {names::kKey, key}};
  for (const char* name : {names::kTotalSlots, names::kAttentionSum, names::kAttentionMax})
    addresses[name] = engines.address(name);
  Shapes shapes{{names::kQuery, {static_cast<int64_t>(end - start), width}},
                {names::kKey, {1, model.kv_heads, slots, model.head_dim}}};
  Context& context = engines.context(context_.score, 0);
  cuda.copy_in(addresses[names::kTotalSlots], &total, sizeof total);
  context.bind(shapes, addresses);
  context.enqueue();
  Scores out{Floats(static_cast<size_t>(slots)), Floats(static_cast<size_t>(slots))};
  cuda.copy_out(out.first.data(), addresses[names::kAttentionSum], out.first.size() * sizeof(float));
  cuda.copy_out(out.second.data(), addresses[names::kAttentionMax], out.second.size() * sizeof(float));
  cuda.wait();
  return out;
}

}  // namespace vtxcore
