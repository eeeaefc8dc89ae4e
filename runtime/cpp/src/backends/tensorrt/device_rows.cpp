#include "backends/tensorrt/device_rows.hpp"

namespace vtxcore {
namespace {

using Lock = Cuda::Use;

// Memory for the hidden states of `capacity` tokens. Nothing of it is read before it is written.
struct StatesMemory : StageMemory {
  StatesMemory(Cuda& cuda, int64_t tokens, size_t bytes)
      : StageMemory(tokens), buffer(cuda, bytes, cat("the memory of the hidden states of ", tokens, " tokens")) {}
  void clear() override {}
  Buffer buffer;
};

constexpr int64_t kLeastStates = 32;  // tokens

}  // namespace

TensorrtRows::TensorrtRows(TensorrtCacheContext& context, size_t count) : context_(context), count_(count) {
  int64_t capacity = kLeastStates;
  while (capacity < static_cast<int64_t>(count)) capacity *= 2;
  const MemoryKey key{MemoryKind::hidden, capacity};
  auto made = borrow<StatesMemory>(context, key, capacity, [&] {
    return std::make_unique<StatesMemory>(context.cuda, capacity, static_cast<size_t>(capacity) * row_bytes());
  });
  first_ = made->buffer.address();
  memory_ = {made.release(),
             [&context, key](StageMemory* memory) { give_back(context, key, std::unique_ptr<StageMemory>(memory)); }};
}

Floats TensorrtRows::read() const {
  Floats out(count_ * row_bytes() / sizeof(float));
  if (out.empty()) return out;
  Lock held(context_.cuda);
  context_.cuda.copy_out(out.data(), first_, out.size() * sizeof(float));
  context_.cuda.wait();
  return out;
}

std::shared_ptr<const DeviceRows> TensorrtRows::take(const Ids& which) const {
  std::vector<SlotRun> runs = slot_runs(which);
  if (runs.size() <= 1) {
    auto view = std::make_shared<TensorrtRows>(*this);
    if (!runs.empty()) view->first_ = row(runs.front().first);
    view->count_ = which.size();
    return view;
  }
  Lock held(context_.cuda);
  auto out = std::make_shared<TensorrtRows>(context_, which.size());
  for (const SlotRun& run : runs) {
    size_t bytes = run.count * row_bytes();
    context_.cuda.copy_rows(out->row(run.start), bytes, row(run.first), bytes, bytes, 1);
  }
  return out;
}

std::shared_ptr<const DeviceRows> TensorrtRows::joined(const Rows& first, const Rows& second) const {
  Lock held(context_.cuda);
  auto out = std::make_shared<TensorrtRows>(context_, first.count() + second.count());
  put(context_.cuda, out->row(0), first, 0, first.count());
  put(context_.cuda, out->row(first.count()), second, 0, second.count());
  return out;
}

void put(Cuda& cuda, uint8_t* to, const Rows& rows, size_t start, size_t count) {
  size_t bytes = count * rows.width * sizeof(float);
  if (bytes == 0) return;
  if (rows.on_device)
    cuda.copy_rows(to, bytes, static_cast<const TensorrtRows&>(*rows.on_device).row(start), bytes, bytes, 1);
  else
    cuda.copy_in(to, rows.row(start), bytes);
}

}  // namespace vtxcore
