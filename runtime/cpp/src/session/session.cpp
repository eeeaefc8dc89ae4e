#include "session/session.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "backends/contract.hpp"

namespace vtxcore {
namespace {

// How many leading ids agree, less one where all do: at least one token must run for its logits.
size_t common_prefix(const Ids& cached, const Ids& wanted) {
  size_t agreed = 0;
  while (agreed < cached.size() && agreed + 1 < wanted.size() && cached[agreed] == wanted[agreed]) ++agreed;
  return agreed;
}

TokenStates last_of(const TokenStates& tokens) {
  const Ids last{static_cast<int64_t>(tokens.count()) - 1};
  return {take(tokens.hidden, last), take(tokens.inputs, last)};
}

}  // namespace

Session::Session(Backend& backend, const Manifest& manifest)
    : backend_(backend), m_(manifest), stages_(manifest.stages) {
  if (manifest.action) fail(Kind::request, manifest.model.name, " outputs actions, not text; use act, or vtx-run --act");
  remaining_.assign(stages_.size(), Remaining::of(empty_prefix()));
}

PrefillResult Session::prefill(const Prompt& prompt, const Policy& policy, const Selection* after, const Check& check) {
  check_room(static_cast<int64_t>(prompt.ids.size()) + prompt.skipped, count_of(prompt.is_vision));
  if (prompt.prefix_length() == prompt.ids.size())
    fail(Kind::request, "the prompt ends with an image and leaves no token to answer from; export with a --chat-template ",
         "that prints the question, or ASSISTANT:, after the images");
  check_ = check;
  bool known = prompt.prefix_key(whole_prompt()) == prefix().key;
  bool reused = known && prompt.prefix_length() > 0 && depth() > 0;
  obstacle_.clear();
  if (!known) replace_prefix(prompt);
  Rows hidden = run_suffix(prompt, policy, after);
  states_ = Rows(0, hidden.width);  // a copy, so that the memory of the others is not held
  vtxcore::append(states_, take(hidden, {static_cast<int64_t>(hidden.count()) - 1}));
  for (size_t number = 0; number < stages_.size(); ++number) cache(number).mark(cache(number).length);
  return result(std::move(backend_.head(states_).data), reused);
}

Rows Session::decode(const Ids& tokens) {
  check_room(length() + static_cast<int64_t>(tokens.size()) - 1, 0);
  if (tokens.size() == 1 && backend_.steps()) {
    Rows logits(1, static_cast<size_t>(m_.model.vocab));
    logits.data = step(true, tokens[0]).logits;
    return logits;
  }
  states_ = append(tokens);
  suffix_.insert(suffix_.end(), tokens.begin(), tokens.end());
  return backend_.head(states_);
}

std::optional<int64_t> Session::choose(int64_t token) {
  if (!backend_.steps()) return std::nullopt;
  check_room(length(), 0);
  int64_t best = step(false, token).best;
  if (best < 0) fail(Kind::bundle, names::kNotFinite);
  return best;
}

// Runs one more token of the suffix in one go.
Step Session::step(bool logits, int64_t token) {
  std::vector<StageCache*> caches;
  Ids positions;
  auto done = static_cast<int64_t>(suffix_.size());
  check_();
  for (size_t number = 0; number < stages_.size(); ++number) {
    caches.push_back(&cache(number));
    caches.back()->keep(layouts_[number].slots + done);
    positions.push_back(layouts_[number].position + done);
  }
  Step out = backend_.step(caches, token, positions, logits);
  suffix_.push_back(token);
  states_ = Rows(1, out.state.size());
  states_.data = out.state;
  return out;
}

Rows Session::try_tokens(const Ids& tokens) {
  check_room(length() + static_cast<int64_t>(tokens.size()) - 1, 0);
  return backend_.head(append(tokens));  // the next append writes over them
}

void Session::check_room(int64_t tokens, int64_t vision) const {
  if (tokens + 1 <= capacity()) return;
  std::string images = vision ? cat(" (", vision, " of them for images)") : "";
  fail(Kind::context, "the prompt takes ", tokens, " tokens", images, ", and ", capacity() - 1,
       " fit into this bundle beside the answer; shorten it by ", tokens + 1 - capacity(), " tokens", m_.or_more_context());
}

// ---- the suffix

// Runs what the caches lack of the prompt's suffix; its hidden states after the last stage.
Rows Session::run_suffix(const Prompt& prompt, const Policy& policy, const Selection* after) {
  Ids suffix(prompt.ids.begin() + static_cast<std::ptrdiff_t>(prompt.prefix_length()), prompt.ids.end());
  Selection asked{prompt.prefix_key(whole_prompt()), policy.key(), suffix};
  reused_suffix_ = 0;
  bool continues = after && !policy.rest_cut() && after->key == asked.key && after->policy == asked.policy &&
                   common_prefix(after->ids, suffix) > 0;
  if (!continues) return select(asked, policy);
  Selection before = *after;  // `after` may be what this session holds
  bool cached = selection_ && before == *selection_;
  if (cached) {
    reused_stages_ = stages_.size();
  } else {
    select(before, policy);
    if (policy.decisions) policy.decisions->clear();  // they are of the question before, whose answer told them
  }
  size_t agreed = held(common_prefix(suffix_, suffix));
  suffix_.resize(agreed);
  reused_suffix_ = cached ? agreed : 0;
  Rows hidden = append(Ids(suffix.begin() + static_cast<std::ptrdiff_t>(agreed), suffix.end()), true);
  suffix_ = suffix;
  return hidden;
}

// Runs a question through all stages, asking its policy at each boundary which image tokens continue.
Rows Session::select(const Selection& selection, const Policy& policy) {
  selection_.reset();
  suffix_.clear();
  Needs needs = policy.needs();
  rest_cut_ = policy.rest_cut();
  prepare(policy);
  cuts_.clear();
  layouts_.clear();
  size_t held_stages = depth();
  std::optional<Mask> survivors;
  TokenStates here = embed(selection.ids, true);
  for (size_t number = 0; number < stages_.size(); ++number) {
    if (number > 0 && image_count(number - 1) > 0) {
      if (std::optional<Removal> removal = policy.ask(boundary(number, here, policy))) {
        const Remaining& left = remove(number, *removal);
        if (removal->shrinks) survivors = left.present;
      }
    }
    check_();
    layouts_.push_back(layout(number));
    const StageSpec& stage = stages_[number];
    auto [query, alone] = policy.reads(stage.last, image_count(number));
    here.hidden = run(number, here, query, alone);
  }
  if (survivors && needs.shrinks) shrink(*needs.shrinks, *survivors, selection.ids.size());
  if (policy.renumbers())  // as the released code decodes: each layer at its own cache's length
    for (PrefixSlots& layout : layouts_) layout.position = layout.slots;
  selection_ = selection;
  suffix_ = selection.ids;
  reused_stages_ = std::min(held_stages, first_pruned());
  return std::move(here.hidden);
}

// The most tokens of the suffix, up to `agreed`, that every stage's cache can go back to.
size_t Session::held(size_t agreed) {
  for (size_t number = 0; number < stages_.size(); ++number) {
    int64_t slots = layouts_[number].slots, nearest = cache(number).nearest(slots + static_cast<int64_t>(agreed)) - slots;
    if (nearest < static_cast<int64_t>(agreed)) return held(static_cast<size_t>(std::max<int64_t>(0, nearest)));
  }
  return agreed;
}

// Runs more tokens of the suffix in the caches as they are. `of_prompt`: only the state of the last one is read, so of a
// stage that keeps nothing it alone runs there.
Rows Session::append(const Ids& ids, bool of_prompt) {
  TokenStates here = embed(ids);
  auto done = static_cast<int64_t>(suffix_.size());
  for (size_t number = 0; number < stages_.size(); ++number) {
    check_();
    int64_t first = layouts_[number].position + done;
    if (of_prompt && !stages_[number].keeps()) {
      first += static_cast<int64_t>(here.count()) - 1;
      here = last_of(here);
    }
    cache(number).keep(layouts_[number].slots + done);
    here.hidden = cache(number).append(here, text_positions(first, here.count()));
  }
  return std::move(here.hidden);
}

// Text tokens before the decoder, with zeros for the inputs that the embed graph does not give. `of_prompt`: they belong
// to a prompt, not to an answer.
TokenStates Session::embed(const Ids& ids, bool of_prompt) {
  TokenStates out = backend_.embed(ids);
  for (const TokenInput& each : m_.token_inputs)
    if (!each.of_text) out.inputs[each.name] = Rows(ids.size(), static_cast<size_t>(each.width));
  if (m_.model.sees_both_ways()) {
    Rows& group = out.inputs[names::kGroup] = Rows(ids.size(), 1);
    if (!of_prompt || !whole_prompt()) std::fill(group.data.begin(), group.data.end(), -1.0f);
  }
  return out;
}

std::unique_ptr<StageCache> Session::new_cache(size_t number, int64_t slots) {
  reading_.reset();  // it may be over the one that this replaces
  return backend_.stage(number, slots);
}

StageCache& Session::cache(size_t number) {
  const StageSpec& stage = stages_[number];
  if (stage.keeps()) return *segments_.at(key(number)).cache;
  Sources sources;
  for (int64_t layer : m_.model.sources(stage.first, stage.last)) {
    auto holds = [layer](const StageSpec& one) { return one.first <= layer && layer <= one.last; };
    auto earlier = std::find_if(stages_.begin(), stages_.end(), holds) - stages_.begin();
    sources[layer] = &cache(static_cast<size_t>(earlier));
  }
  if (!reading_ || sources_ != sources) {
    reading_ = backend_.reading(number, sources);
    sources_ = std::move(sources);
  }
  return *reading_;
}

// The number of image tokens that the suffix sees in stage `number`.
int64_t Session::image_count(size_t number) const {
  const Mask& present = layouts_[number].present;
  int64_t count = 0;
  for (size_t i = 0; i < present.size(); ++i) count += present[i] && prefix().is_vision[i];
  return count;
}

// What a policy may know before stage `number`.
Boundary Session::boundary(size_t number, const TokenStates& suffix, const Policy& policy) {
  const Rows& hidden = suffix.hidden;
  const RemainingPtr tokens = remaining_[number - 1];
  const Mask is_vision = tokens->is_vision();
  const Ids image_slots = indices_of(is_vision);
  const Mask present = take(tokens->present, indices_of(prefix().is_vision));
  auto scores_of = [this, image_slots](size_t stage, bool last_only) {
    auto [total, most] = cache(stage).attention(last_only);
    for (const Floats* values : {&total, &most})
      for (float value : *values)
        if (!std::isfinite(value))
          fail(Kind::bundle, "the attention of layer ", stages_[stage].last,
               " is not a number; use --reduce none and no --rest, or export at fp32");
    return Scores(take(total, image_slots), take(most, image_slots));
  };
  auto scores = [number, scores_of](bool last_only) { return scores_of(number - 1, last_only); };
  auto next_scores = [this, number, scores_of, &suffix] {
    run(number, suffix, true);
    return scores_of(number, true);
  };
  auto image_hidden = [this, number, image_slots] { return host(take(entering(number, 0), image_slots)); };
  auto keys = [this, number, image_slots, &hidden] {
    Rows all = cache(number - 1).keys();
    return std::pair(take(all, image_slots),
                     take(all, count_up(static_cast<int64_t>(all.count() - hidden.count()), hidden.count())));
  };
  // The first parts of them; where there are three, which have no order, the index in the prompt instead.
  auto positions = [this, tokens, image_slots, &hidden] {
    Ids image;
    if (m_.model.position_parts() > 1) {
      for (size_t i = 0; i < tokens->present.size(); ++i)
        if (tokens->present[i] && prefix().is_vision[i]) image.push_back(static_cast<int64_t>(i));
      return std::pair(image, count_up(static_cast<int64_t>(tokens->present.size()), hidden.count()));
    }
    for (int64_t slot : image_slots) image.push_back(tokens->positions[static_cast<size_t>(slot)].front());
    return std::pair(image, count_up(tokens->next_position, hidden.count()));
  };
  auto question_hidden = [&hidden] { return host(hidden); };
  return {stages_[number].first, question_hidden, prefix().images, present, scores, image_hidden, keys, positions,
          &policy.final_norm,    next_scores};
}

// ---- the prefix

// Takes another prefix; it enters the decoder when a question needs it.
void Session::replace_prefix(const Prompt& prompt) {
  Prefix prefix = empty_prefix();
  size_t length = prompt.prefix_length();
  if (length > 0) {
    auto end = static_cast<std::ptrdiff_t>(length);
    TokenStates tokens = embed(Ids(prompt.ids.begin(), prompt.ids.begin() + end), true);
    prefix.is_vision = Mask(prompt.is_vision.begin(), prompt.is_vision.begin() + end);
    for (const Encoder& encoder : prompt.encoders) {
      check_();
      prefix.images.push_back(encoder.encode());
    }
    size_t token = 0, count = 0;
    for (const ImagePtr& image : prefix.images) count += image->rows.count();
    check_rows("the vision graph", count, static_cast<size_t>(count_of(prefix.is_vision)));
    for (const ImagePtr& image : prefix.images)
      for (size_t i = 0; i < image->rows.count(); ++i) {
        while (!prefix.is_vision[token]) ++token;
        std::copy_n(image->rows.row(i), image->rows.width, tokens.hidden.row(token));
        for (const TokenInput& each : m_.token_inputs)
          if (each.of_images) {
            const Rows& given = image->patches.states.at(names::kTokenInput + each.name);
            std::copy_n(given.row(i), given.width, tokens.inputs.at(each.name).row(token));
          }
        ++token;
      }
    if (m_.model.two_way == TwoWay::images) {  // image tokens that follow each other are one
      float run = 0;
      for (size_t i = 0; i < length; ++i) {
        if (!prefix.is_vision[i]) continue;
        if (i == 0 || !prefix.is_vision[i - 1]) ++run;
        *tokens.inputs.at(names::kGroup).row(i) = run;
      }
    }
    std::tie(prefix.positions, prefix.next_position) = place(prefix.is_vision, prefix.images);
    prefix.hidden = std::move(tokens.hidden);
    prefix.inputs = std::move(tokens.inputs);
  }
  suffix_.clear();
  selection_.reset();
  prefix.key = prompt.prefix_key(whole_prompt());
  if (whole_prompt()) prefix.question = prefix.key;
  filed_ = std::min(filed_, prefix.agreement(this->prefix()));
  obstacle_ = prefix.difference(this->prefix());
  remaining_.assign(stages_.size(), Remaining::of(std::move(prefix)));
  holding_.clear();
}

void Session::begin(Prefix prefix, std::vector<std::unique_ptr<StageCache>> caches, std::vector<SharedRows> text) {
  reading_.reset();
  Mask is_text = prefix.is_vision;
  for (uint8_t& bit : is_text) bit = !bit;
  RemainingPtr tokens = Remaining::of(std::move(prefix));
  for (size_t number = 0; number < caches.size(); ++number)
    segments_[{number, true}] = {std::move(caches[number]), tokens, is_text, text[number], std::nullopt};
  remaining_.assign(stages_.size(), tokens);
  filed_ = tokens->size();
}

void Session::copy_prefix(Session& other) {
  const RemainingPtr& whole = other.remaining_.front();
  auto of_prefix = [&whole](const Segment& segment) { return segment.tokens->prefix == whole->prefix; };
  for (const auto& [place, segment] : other.segments_)
    if (of_prefix(segment) && segment.saved) return;  // some of it is not in its caches
  for (const auto& [place, segment] : other.segments_) {
    if (!of_prefix(segment) || !segment.holds(segment.tokens)) continue;
    std::unique_ptr<StageCache> copied = new_cache(place.first, segment.cache->capacity);
    copied->copy(*segment.cache, static_cast<int64_t>(segment.known.size()));
    segments_[place] = {std::move(copied), segment.tokens, segment.known, segment.states, std::nullopt};
  }
  remaining_.assign(stages_.size(), whole);
}

Prefix Session::empty_prefix() const {
  Prefix prefix;
  prefix.hidden = Rows(0, static_cast<size_t>(m_.model.hidden));
  return prefix;
}

std::vector<Segment*> Session::complete() {
  std::vector<Segment*> out;
  for (size_t number = 0; number < stages_.size(); ++number) {
    auto place = segments_.find({number, true});
    if (place == segments_.end() || !place->second.holds(remaining_.front())) break;
    out.push_back(&place->second);
  }
  return out;
}

// The number of stages that hold the whole prefix, or need not, since they keep nothing of it.
size_t Session::depth() {
  size_t depth = complete().size();
  return depth + (depth > 0 && depth < stages_.size() && !stages_[depth].keeps());
}

// The first stage that not all image tokens enter, or the number of stages.
size_t Session::first_pruned() const {
  return static_cast<size_t>(std::count_if(remaining_.begin(), remaining_.end(),
                                           [](const RemainingPtr& tokens) { return tokens->removals.empty(); }));
}

// Before a question: segments whole again, and hidden states held wherever the policy may drop tokens.
void Session::prepare(const Policy& policy) {
  for (auto& [place, segment] : segments_)
    if (segment.saved) restore(segment);
  std::set<int64_t> cuts = policy.token_cuts();
  std::optional<int64_t> exit = policy.exit();
  for (exit_ = 0; exit_ < stages_.size() && stages_[exit_].first != exit;) ++exit_;
  if (prefix().size() == 0) exit_ = stages_.size();
  for (size_t number = 0; number < stages_.size(); ++number)  // also for the questions to come, some of which go back to this K
    if (cuts.count(stages_[number].first) > 0) holding_.insert(number);
  remaining_.assign(stages_.size(), RemainingPtr(remaining_.front()));
  common_ = cut_back(0, exit_);
}

// Puts back what a segment has lost.
void Session::restore(Segment& segment) {
  const SavedKV saved = std::move(*segment.saved);
  const Mask known = segment.known;
  const SharedRows states = segment.states;
  segment.cut_back(RemainingPtr(segment.tokens), 0);
  auto size = static_cast<int64_t>(known.size());
  StageCache& here = *segment.cache;
  here.write(saved.survivors, here.read(count_up(0, saved.survivors.size())), size);
  here.write(saved.dropped, saved.kv, size);
  segment.known = known;
  segment.states = states;
}

// Slots of the context without those of tokens that never enter the stage.
int64_t Session::slots(size_t number) const {
  const Remaining& tokens = *remaining_[number];
  return capacity() - static_cast<int64_t>(tokens.prefix->size() - tokens.size());
}

// The segment of stage `number`, cut to what it has in common with the tokens that remain there; null if it has yet to be made.
Segment* Session::segment(size_t number) {
  const RemainingPtr tokens = remaining_[number];
  auto place = segments_.find(key(number));
  if (place == segments_.end()) return nullptr;
  Segment& segment = place->second;
  const int64_t room = segment.cache->capacity, wanted = slots(number);
  if (room < wanted || (room > wanted && !tokens->removals.empty() && count_of(tokens->is_vision()) == 0)) {
    reading_.reset();  // it may be over this one
    segments_.erase(place);  // freed before the next one is made
    return nullptr;
  }
  if (segment.tokens != tokens) {
    auto agreed = static_cast<int64_t>(std::min(segment.known.size(), tokens->agreement(*segment.tokens)));
    segment.cut_back(tokens, static_cast<size_t>(segment.cache->nearest(agreed)));
  }
  return &segment;
}

// Cuts segments of stages from `first` to before `end` so far that the rest of their tokens can run: from their hidden
// states after the stage before, which runs them again where these are not known any more. The number of tokens that
// stage `first` holds.
size_t Session::cut_back(size_t first, size_t end) {
  size_t following = remaining_[first]->size();  // the first token whose states the next stage needs
  for (size_t number = end; number-- > first;) {
    if (!stages_[number].keeps()) continue;
    const bool ranks = number + 1 < end && holding_.count(number + 1) > 0;
    if (ranks) following = 0;
    Segment* here = segment(number);
    size_t length = here ? here->known.size() : 0;
    for (size_t token = following; token < length; ++token) {
      if (here->known[token]) continue;
      const RemainingPtr& tokens = remaining_[number];
      auto from = here->holds(tokens) ? 0 : static_cast<int64_t>(tokens->begin_of_group(token));
      length = static_cast<size_t>(here->cache->nearest(from));
      here->cut_back(remaining_[number], length);
      drops_unread_ = drops_unread_ && ranks;  // who changes K once may do so again
    }
    following = length;
  }
  return following;
}

// The hidden states before stage `number` of the tokens that run there, from number `start` on.
Rows Session::entering(size_t number, size_t start) {
  const Remaining& tokens = *remaining_[number];
  if (number == 0)
    return take(prefix().hidden, count_up(static_cast<int64_t>(start), prefix().size() - start));
  const Mask& before = remaining_[number - 1]->present;
  Ids indices;
  int64_t place = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    if (tokens.present[i]) indices.push_back(place);
    place += before[i];
  }
  indices.erase(indices.begin(), indices.begin() + static_cast<std::ptrdiff_t>(start));
  return segments_.at(key(number - 1)).states_of(indices);
}

// What of the prefix stage `number` sees, and where a suffix follows it.
PrefixSlots Session::layout(size_t number) const {
  const Remaining& tokens = *remaining_[number];
  return {tokens.present, static_cast<int64_t>(tokens.size()), tokens.next_position};
}

// Cuts the cache of stage `number`, made if it is missing, to the prefix, so that a suffix follows it; false if that has
// yet to run.
bool Session::follow(size_t number) {
  Segment* here = segment(number);
  if (!here) {
    here = &segments_[key(number)];
    here->cache = new_cache(number, slots(number));
    here->tokens = remaining_[number];
    here->states = std::make_shared<const Rows>(0, static_cast<size_t>(m_.model.hidden));
  }
  if (!here->holds(remaining_[number])) return false;
  here->cache->keep(static_cast<int64_t>(here->known.size()));
  return true;
}

// Runs a suffix through stage `number`, and before it what continues of the prefix if it has yet to run: both in one run,
// which reads the weights once, but not with a long suffix, nor with one whose `query` is kept and that is to be `alone`
// there, as it always is of image tokens that see each other; always where the prefix sees the suffix. The suffix's hidden
// states.
Rows Session::run(size_t number, const TokenStates& suffix, bool query, bool alone) {
  const Remaining& tokens = *remaining_[number];
  if (!stages_[number].keeps()) {  // only the last token's hidden state is read
    const int64_t position = tokens.next_position + static_cast<int64_t>(suffix.count()) - 1;
    return cache(number).append(last_of(suffix), text_positions(position, 1));
  }
  if (!follow(number)) {
    alone = query && (alone || m_.model.two_way == TwoWay::images);
    if (whole_prompt() || (!alone && suffix.count() <= static_cast<size_t>(names::kQuestionRows)))
      return run_rest(number, suffix, query);
    run_rest(number, {Rows(0, suffix.hidden.width)}, false);
  }
  return cache(number).append(suffix, text_positions(tokens.next_position, suffix.count()), query);
}

// Runs what the segment of stage `number` lacks of the prefix, and a suffix after it, maybe none, whose hidden states it
// gives. Of the prefix only those are computed that are needed afterwards, where the engine gains by it.
Rows Session::run_rest(size_t number, const TokenStates& suffix, bool query) {
  const RemainingPtr tokens = remaining_[number];
  Segment& here = segments_.at(key(number));
  const size_t start = here.known.size(), count = tokens->size() - start;
  auto first = static_cast<std::ptrdiff_t>(start);
  here.cache->keep(static_cast<int64_t>(start));
  here.cache->mark(static_cast<int64_t>(tokens->size()));
  Ids running = indices_of(tokens->present);
  running.erase(running.begin(), running.begin() + first);
  TokenStates both{entering(number, start), take(tokens->prefix->inputs, running)};
  Positions positions(tokens->positions.begin() + first, tokens->positions.end());
  if (suffix.count() > 0) {
    vtxcore::append(both.hidden, suffix.hidden);
    for (auto& [name, rows] : both.inputs) vtxcore::append(rows, suffix.inputs.at(name));
    for (const Position& position : text_positions(tokens->next_position, suffix.count())) positions.push_back(position);
  }
  Mask known(count, 1);
  bool leaves = tokens->removals.empty() && here.cache->selects_outputs() && drops_unread_ && number + 1 == exit_ &&
                holding_.count(number + 1) == 0;
  Ids outputs;
  if (leaves) {
    const Mask is_vision = tokens->is_vision();
    for (size_t i = 0; i < count; ++i) known[i] = !is_vision[start + i];
    outputs = indices_of(known);
    for (size_t row = count; row < both.count(); ++row) outputs.push_back(static_cast<int64_t>(row));
  }
  Rows hidden = here.cache->append(both, positions, query, leaves ? &outputs : nullptr);
  auto of_prefix = static_cast<size_t>(count_of(known));
  Rows behind = take(hidden, count_up(static_cast<int64_t>(of_prefix), hidden.count() - of_prefix));
  cut(hidden, of_prefix);
  here.extend(std::move(hidden), known);
  if (number > 0 && holding_.count(number) == 0 && remaining_[number - 1] == tokens) segments_.at(key(number - 1)).leave_text();
  return behind;
}

// Some image tokens leave before stage `number`. What is left runs anew, but for what its segments hold of it.
const Remaining& Session::remove(size_t number, const Removal& removal) {
  const RemainingPtr left = remaining_[number - 1]->without(removal, number);
  cuts_.push_back({stages_[number].first, removal.by, take(left->present, indices_of(prefix().is_vision))});
  std::fill(remaining_.begin() + static_cast<std::ptrdiff_t>(number), remaining_.end(), left);
  cut_back(number, stages_.size());
  return *left;
}

// ---- caches that shrink after the prompt

// Leaves in the caches from layer `from` on only the survivors of the prefix, and the suffix (MustDrop section 3.5). What a
// stage with all image tokens loses is saved for the next question. While slots move its segment holds nothing, so that an
// exception costs a computation and leaves the session correct.
void Session::shrink(int64_t from, const Mask& survivors, size_t suffix) {
  for (size_t number = 0; number < stages_.size(); ++number) {
    if (stages_[number].first < from) continue;
    PrefixSlots& layout = layouts_[number];
    Ids kept, dropped;
    int64_t slot = 0;
    for (size_t i = 0; i < layout.present.size(); ++i)
      if (layout.present[i]) (survivors[i] ? kept : dropped).push_back(slot++);
    if (dropped.empty()) continue;
    Segment& here = segments_.at(key(number));
    StageCache& slots = *here.cache;
    const Mask known = here.known;
    const SharedRows states = here.states;
    SavedKV saved{kept, dropped, slots.read(dropped)};
    here.cut_back(RemainingPtr(here.tokens), 0);
    Ids moved = kept, behind = count_up(layout.slots, suffix);
    moved.insert(moved.end(), behind.begin(), behind.end());
    slots.write(count_up(0, moved.size()), slots.read(moved), static_cast<int64_t>(moved.size()));
    layout.slots = static_cast<int64_t>(kept.size());
    if (!here.tokens->removals.empty()) continue;
    here.known = known;
    here.states = states;
    here.saved = std::move(saved);
  }
}

// ---- the result

PrefillResult Session::result(Floats logits, bool reused) {
  PrefillResult out;
  out.logits = std::move(logits);
  out.reused_image = reused;
  out.vision_tokens = count_of(prefix().is_vision);
  Ids kept, slots;
  for (size_t number = 0; number < stages_.size(); ++number) {
    int64_t count = image_count(number);
    kept.push_back(count);
    for (int64_t layer = stages_[number].first; layer <= stages_[number].last; ++layer) {
      const Ids& cached = stages_[number].cached;  // the others have no slots
      slots.push_back(std::count(cached.begin(), cached.end(), layer) > 0 ? cache(number).length : 0);
    }
    if (count == 0 && out.vision_tokens > 0 && out.k == 0) out.k = stages_[number].first;
  }
  for (const Cut& cut : cuts_)
    if (cut.layer == rest_cut_ && count_of(cut.kept) > 0) out.k = cut.layer, out.rest = count_of(cut.kept);
  if (reused && reused_stages_ > 0) out.reused_layers = stages_[reused_stages_ - 1].last;
  bool ran = false;
  for (size_t number = reused_stages_; number < stages_.size(); ++number)
    ran |= stages_[number].keeps() && image_count(number) > 0;
  if (ran) out.not_reused = obstacle_;
  if (ran && obstacle_.empty()) out.not_reused = remaining_[reused_stages_]->removals.empty() ? "k" : "reduction";
  size_t served = reused ? (ran ? 0 : prefix().size()) : common_;
  out.reused_tokens = static_cast<int64_t>(reused_suffix_ + served);
  out.slots = slots;
  out.vision_kept = per_layer(kept);
  out.images = prefix().images;
  out.cuts = cuts_;
  if (selection_) out.selection = *selection_;
  return out;
}

// One value a stage, repeated for each of its layers.
Ids Session::per_layer(const Ids& values) const {
  Ids out;
  for (size_t i = 0; i < values.size(); ++i) out.insert(out.end(), static_cast<size_t>(stages_[i].layers()), values[i]);
  return out;
}

}  // namespace vtxcore
