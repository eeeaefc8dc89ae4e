// One token through the embedding, every stage and the head on the device: one launch, one wait.
//
// Ids and positions go in, the best token and its hidden state come out; the logits stay on the device unless they are asked
// for. The first step over a conversation's memory is queued, the second recorded into a CUDA graph, and later ones launch
// it; all are queued if TensorRT or the driver cannot record one. K and V of the token are
// copied behind the filled slots afterwards, since their address changes, and states of layers to where they are held.
// Layers that read K and V of others come after that, in a second launch.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/tensorrt/cache.hpp"

namespace vtxcore {

constexpr size_t kRecordings = 4;  // that a stage's memory keeps, each with other memory of the stages before it

// A stage's context for one token, and the numbers that the host tells it of that token, by the input's name. `id` is never
// that of another one; `recordings` are of steps that end with this stage, by the ids of all stages of theirs: nothing once
// one has run, null if it cannot be recorded.
struct BoundStage {
  // `in`: names of the inputs that say which slots there are.
  BoundStage(TensorrtCacheContext& context, const StageSpec& stage, const std::string& graph,
             const std::vector<std::string>& in);
  virtual ~BoundStage() { forget(); }
  void forget();
  void tell(const std::map<std::string, int64_t>& told);
  // Queues copies of what was told to where the stage reads it.
  void copy_told();
  // Queues what makes the memory ready for the token after the one whose run is queued, at the same addresses.
  virtual void turn() {}

  TensorrtCacheContext& shared;
  const StageSpec spec;
  Cuda& cuda;
  const int64_t id;
  std::map<std::string, std::unique_ptr<Pinned<int64_t>>> places;
  std::map<std::string, std::unique_ptr<Pinned<int32_t>>> slots;
  std::unique_ptr<Context> decode;
  std::map<Ids, std::optional<void*>> recordings;
};

// A stage's cache as a step needs it.
class DecodingCache {
 public:
  virtual ~DecodingCache() = default;
  // What is bound to its memory, which has room for one more token.
  virtual BoundStage& for_one_more() = 0;
  // Readies that memory for a token at that position, which is to fill the next slot.
  virtual void begin_token(int64_t position) = 0;
  // Queues copies of what the token's run gave to where it is held; the slot is counted later.
  virtual void end_token() {}
};

class TokenSteps {
 public:
  TokenSteps(TensorrtCacheContext& context, const Graphs& graphs);
  // See Backend; a Use is held meanwhile.
  Step run(const std::vector<StageCache*>& caches, int64_t token, const Ids& positions, bool logits);

 private:
  // Of some of the stages; with the embedding if a token `begins`, and the head if it `ends`.
  void launch(const std::vector<BoundStage*>& stages, bool begins, bool ends);
  void queue(const std::vector<BoundStage*>& stages, bool begins, bool ends);

  TensorrtCacheContext& context_;
  Cuda& cuda_;
  Pinned<int64_t> ids_;
  Pinned<int32_t> best_;
  Pinned<float> state_, logits_;
  std::map<std::string, std::unique_ptr<Pinned<float>>> zeros_;  // token inputs that the embedding does not give
  std::unique_ptr<Context> embed_, head_;
};

}  // namespace vtxcore
