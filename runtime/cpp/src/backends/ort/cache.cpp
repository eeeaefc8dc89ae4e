#include "backends/ort/cache.hpp"

#include <cstring>

#include "base/halves.hpp"

namespace vtxcore {
namespace {

int64_t wide(const OrtCacheContext& c) { return c.manifest.model.hidden; }

}  // namespace

OrtStageCache::OrtStageCache(const OrtCacheContext& context, const OrtGraph& stage, const StageSpec& spec, int64_t slots)
    : StageCache(slots), context_(context), stage_(stage), spec_(spec),
      memory_(static_cast<size_t>(2 * spec.layers() * context.manifest.model.kv_heads), static_cast<size_t>(slots),
              static_cast<size_t>(context.manifest.model.head_dim * context.manifest.kv_bytes("ort"))),
      last_tensor_(tensor_over(context.ort, &last_, {1}, "int32")),
      total_tensor_(tensor_over(context.ort, &total_, {1}, "int32")), token_(1, static_cast<size_t>(wide(context))),
      token_out_(1, static_cast<size_t>(wide(context))), token_position_(1),
      token_tensor_(tensor_over(context.ort, token_.data.data(), {1, wide(context)}, "float32")),
      token_position_tensor_(tensor_over(context.ort, token_position_.data(), {1, 1}, "int64")),
      token_out_tensor_(tensor_over(context.ort, token_out_.data.data(), {1, wide(context)}, "float32")),
      token_binding_(stage) {
  const ModelSpec& model = context.manifest.model;
  Ids shape{1, model.kv_heads, slots, model.head_dim};
  for (size_t plane = 0; plane < static_cast<size_t>(2 * spec.layers()); ++plane)
    buffers_.push_back(tensor_over(context.ort, memory_.plane(plane * static_cast<size_t>(model.kv_heads)), shape,
                                   context.manifest.kv_dtype));
  bind(token_binding_, token_tensor_, token_position_tensor_, token_out_tensor_);
}

void OrtStageCache::bind(OrtBinding& binding, const OrtTensor& rows, const OrtTensor& positions, const OrtTensor& out) {
  binding.input(names::kHidden, rows);
  binding.input(names::kPositions, positions);
  binding.input(names::kLastSlot, last_tensor_);
  binding.input(names::kTotalSlots, total_tensor_);
  binding.input(names::kCos, context_.tensors.at(names::kCos));
  binding.input(names::kSin, context_.tensors.at(names::kSin));
  binding.output(names::kHiddenOut, out);
  bool scaled = context_.manifest.kv_dtype == "int8";
  for (int64_t layer = spec_.first; layer <= spec_.last; ++layer) {
    std::string number = std::to_string(layer);
    auto first = static_cast<size_t>(2 * (layer - spec_.first));
    binding.input(names::kPastKey + number, buffers_[first]);
    binding.output(names::kPresentKey + number, buffers_[first]);
    binding.input(names::kPastValue + number, buffers_[first + 1]);
    binding.output(names::kPresentValue + number, buffers_[first + 1]);
    for (const char* scale : {names::kKeyScaleOf, names::kValueScaleOf})
      if (scaled) binding.input(scale + number, context_.tensors.at(scale + number));
  }
}

Rows OrtStageCache::run(const Rows& rows, const Ids& positions, bool query) {
  auto count = static_cast<int64_t>(rows.count());
  last_ = static_cast<int32_t>(length + count - 1);
  total_ = static_cast<int32_t>(length + count);
  if (count == 1 && !query) {
    token_.data = rows.data;  // equally long: the memory that is bound stays
    token_position_[0] = positions[0];
    token_binding_.run();
    return token_out_;
  }
  Rows out(rows.count(), rows.width);
  OrtTensor in_tensor = tensor_over(context_.ort, rows.data.data(), {count, wide(context_)}, "float32");
  OrtTensor at_tensor = tensor_over(context_.ort, positions.data(), {1, count}, "int64");
  OrtTensor out_tensor = tensor_over(context_.ort, out.data.data(), {count, wide(context_)}, "float32");
  OrtBinding binding(stage_);
  bind(binding, in_tensor, at_tensor, out_tensor);
  if (query) {
    const ModelSpec& model = context_.manifest.model;
    query_ = Rows(rows.count(), static_cast<size_t>(model.heads * model.head_dim));
    OrtTensor tensor = tensor_over(context_.ort, query_.data.data(), {count, model.heads * model.head_dim}, "float32");
    binding.output(names::kQuery, tensor);
    binding.run();
  } else {
    binding.run();
  }
  return out;
}

Scores OrtStageCache::attention(bool last_only) {
  const OrtGraph& score = *context_.score;
  size_t count = query_.count(), first = last_only ? count - 1 : 0;
  auto rows = static_cast<int64_t>(count - first), across = static_cast<int64_t>(query_.width);
  OrtTensor query = tensor_over(context_.ort, query_.row(first), {rows, across}, "float32");
  const OrtTensor& key = buffers_[buffers_.size() - 2];  // of the last layer
  std::vector<const OrtTensor*> inputs{&query, &key, &total_tensor_};
  if (context_.manifest.kv_dtype == "int8")
    inputs.push_back(&context_.tensors.at(names::kKeyScaleOf + std::to_string(spec_.last)));
  std::vector<OrtTensor> outputs = score.run(inputs);
  auto values = [&](const OrtTensor& tensor) {
    auto data = static_cast<const float*>(tensor.data());
    int64_t scores = tensor.shape().size() == 1 ? tensor.shape()[0] : 0;
    if (scores < length) check_rows(score.name, static_cast<size_t>(scores), static_cast<size_t>(length));
    return Floats(data, data + length);
  };
  return {values(outputs[0]), values(outputs[1])};
}

Rows OrtStageCache::keys() {
  const ModelSpec& model = context_.manifest.model;
  auto heads = static_cast<size_t>(model.kv_heads), dim = static_cast<size_t>(model.head_dim);
  const std::string& dtype = context_.manifest.kv_dtype;
  const Floats* scale = nullptr;
  if (dtype == "int8") scale = &context_.constants.at(names::kKeyScaleOf + std::to_string(spec_.last));
  Rows out(static_cast<size_t>(length), heads * dim);
  size_t plane = static_cast<size_t>(2 * (spec_.layers() - 1)) * heads;
  for (size_t head = 0; head < heads; ++head) {
    const uint8_t* from = memory_.plane(plane + head);
    for (size_t slot = 0; slot < out.count(); ++slot)
      for (size_t d = 0; d < dim; ++d) {
        size_t at = slot * dim + d;
        float value;
        if (dtype == "float32")
          std::memcpy(&value, from + 4 * at, 4);
        else if (dtype == "int8")
          value = static_cast<float>(static_cast<int8_t>(from[at])) * (*scale)[head * dim + d];
        else
          value = half_to_float(static_cast<uint16_t>(from[2 * at] | from[2 * at + 1] << 8));
        out.row(slot)[head * dim + d] = value;
      }
  }
  return out;
}

void OrtStageCache::write(const Ids& slots, const SavedSlots& kv, int64_t filled) {
  memory_.write(slots, kv);
  length = filled;
}

}  // namespace vtxcore
