// Actions of a loaded bundle whose tokens are actions: one picture and an instruction, answered by a token a number.
#include <algorithm>
#include <mutex>

#include "api/acting.hpp"
#include "api/conversation.hpp"
#include "prompt/unicode.hpp"

namespace vtxcore {
namespace {

constexpr size_t kShown = 40;  // names of data sets in a message

// As Python's str.lower, which writes a sigma at the end of a word otherwise.
std::string lower(const std::string& text) {
  Codes codes = decode_utf8(text);
  for (size_t i = 1; i < codes.size(); ++i)
    if (codes[i] == U'Σ' && is_letter(codes[i - 1]) && (i + 1 == codes.size() || !is_letter(codes[i + 1]))) codes[i] = U'ς';
  return encode_utf8(lower_case(codes));
}

// A picture that is that of the last call keeps its tokens, and its K and V up to the instruction.
class TokenActor final : public Actor {
 public:
  explicit TokenActor(std::shared_ptr<const Model> model) : model_(std::move(model)), bins_(*model_->manifest().bins) {}
  Actions act(const std::vector<Picture>& pictures, const std::string& instruction, const Floats& state,
              const ActOptions& given) override;

 private:
  const ActionRange& range(const std::optional<std::string>& name) const;

  std::shared_ptr<const Model> model_;
  const ActionBins& bins_;
  std::mutex lock_;
  std::unique_ptr<Conversation> conversation_;
};

// The range of actions in the data set `name`, or in the only one.
const ActionRange& TokenActor::range(const std::optional<std::string>& name) const {
  const std::vector<ActionRange>& ranges = bins_.ranges;
  if (!name && ranges.size() == 1) return ranges[0];
  std::vector<std::string> shown;
  for (const ActionRange& each : ranges) {
    if (name == each.name) return each;
    if (shown.size() < kShown) shown.push_back(each.name);
  }
  const std::string names = listed(shown) + (ranges.size() > kShown ? ", ..." : "");
  if (!name)
    fail(Kind::request, "this model has the statistics of ", ranges.size(),
         " data sets, whose units differ; name one as unnorm_key: ", names);
  fail(Kind::request, "unnorm_key '", name->substr(0, 58), "' is not a data set of this model; its data sets are ", names);
}

Actions TokenActor::act(const std::vector<Picture>& pictures, const std::string& instruction, const Floats& state,
                        const ActOptions& given) {
  Deadline deadline(given.deadline_ms, "a smaller K");
  std::vector<std::string> unread;
  if (!state.empty()) unread.push_back("state");
  if (given.noise) unread.push_back("noise");
  if (given.seed) unread.push_back("seed");
  if (given.steps) unread.push_back("steps");
  if (!unread.empty())
    fail(Kind::request, listed(unread, " and "),
         ": this model makes actions of a picture and an instruction alone; leave it out");
  if (given.cameras) fail(Kind::request, "this bundle names no cameras; give the picture itself");
  if (pictures.size() != 1) fail(Kind::request, pictures.size(), " pictures are given, and this model sees one");
  check_instruction(instruction);
  const ActionRange& limits = range(given.unnorm_key);
  const size_t count = limits.low.size();
  std::vector<PreparedImage> prepared{model_->prepare(pictures[0], "")};
  std::lock_guard<std::mutex> held(lock_);
  if (conversation_)
    conversation_->replace(std::move(prepared), 0);
  else
    conversation_ = std::make_unique<Conversation>(model_, std::move(prepared), std::nullopt);
  Options options;
  options.k = given.k, options.reduce = given.reduce, options.max_new_tokens = static_cast<int64_t>(count);
  options.timeout = deadline.left();
  const Answer answer = conversation_->ask(lower(instruction), options);
  deadline.left();
  const size_t found = answer.token_ids.size();
  const std::string there = cat("the answer has ", found, " of the ", count, " tokens of an action");
  if (found < count && answer.stopped == "context")
    fail(Kind::context, there, ", then the context is full; shorten the instruction", model_->manifest().or_more_context());
  if (found < count)
    fail(Kind::bundle, there, " and ends (", answer.stopped, "), so no action is given; give another instruction");
  Actions out;
  out.values.width = count;
  const double step = 2.0 / static_cast<double>(bins_.edges - 1);
  auto edge = [&](int64_t number) { return number == bins_.edges - 1 ? 1.0 : static_cast<double>(number) * step - 1; };
  for (size_t i = 0; i < count; ++i) {
    const int64_t bin = std::clamp(bins_.vocab - 1 - answer.token_ids[i], int64_t{0}, bins_.edges - 2);
    double number = (edge(bin) + edge(bin + 1)) / 2;
    if (!given.normalized && limits.mask[i]) number = (number + 1) / 2 * (limits.high[i] - limits.low[i]) + limits.low[i];
    out.values.data.push_back(static_cast<float>(number));
  }
  const Timings& ms = answer.timings;
  const double decoding = ms.first_token - ms.vision - ms.prefill + static_cast<double>(found - 1) * ms.decode_per_token;
  Json::Object facts =
      facts_of(out.values, {ms.vision / 1000, ms.prefill / 1000, std::max(0.0, decoding) / 1000}, ms.vision > 0 ? 1 : 0);
  facts.emplace_back("token_ids", Json::Array(answer.token_ids.begin(), answer.token_ids.end()));
  out.json = std::move(facts);
  return out;
}

}  // namespace

std::unique_ptr<Actor> make_token_actor(std::shared_ptr<const Model> model) {
  return std::make_unique<TokenActor>(std::move(model));
}

}  // namespace vtxcore
