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
    : backend_(backend), m_(manifest), stages_(manifest.stages), first_pruned_(manifest.stages.size()) {
  if (manifest.action) fail(Kind::request, manifest.model.name, " outputs actions, not text; use act, or vtx-run --act");
  prefix_ = empty_prefix();
}

PrefillResult Session::prefill(const Prompt& prompt, const Policy& policy, const Selection* after, const Check& check) {
  check_room(static_cast<int64_t>(prompt.ids.size()) + prompt.skipped, count_of(prompt.is_vision));
  if (prompt.prefix_length() == prompt.ids.size())
    fail(Kind::request, "the prompt ends with an image and leaves no token to answer from; export with a --chat-template ",
         "that prints the question, or ASSISTANT:, after the images");
  check_ = check;
  bool known = prompt.prefix_key(whole_prompt()) == prefix_.key;
  bool reused = known && prompt.prefix_length() > 0 && prefix_.depth() > 0;
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
  first_pruned_ = stages_.size();
  cuts_.clear();
  layouts_.clear();
  size_t depth = prefix_.depth();  // with the stage that need not run, since it keeps nothing of the prefix
  if (depth > 0 && depth < stages_.size() && !stages_[depth].keeps()) ++depth;
  std::optional<Mask> survivors;
  TokenStates here = embed(selection.ids, true);
  for (size_t number = 0; number < stages_.size(); ++number) {
    if (number > 0 && image_count(number - 1) > 0) {
      if (std::optional<Removal> removal = policy.ask(boundary(number, here, policy))) {
        const PrunedPrefix& pruned = remove(number, *removal);
        if (removal->shrinks) survivors = pruned.present;
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
  reused_stages_ = std::min(depth, first_pruned_);
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
  if (stage.keeps()) return *(number < first_pruned_ ? full_ : pruned_).at(number);
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
  for (size_t i = 0; i < present.size(); ++i) count += present[i] && prefix_.is_vision[i];
  return count;
}

// What a policy may know before stage `number`.
Boundary Session::boundary(size_t number, const TokenStates& suffix, const Policy& policy) {
  const Rows& hidden = suffix.hidden;
  const Mask& before = layouts_[number - 1].present;
  Ids slots, image_slots;
  Mask present;
  for (size_t i = 0; i < before.size(); ++i) {
    if (prefix_.is_vision[i]) present.push_back(before[i]);
    if (!before[i]) continue;
    if (prefix_.is_vision[i]) image_slots.push_back(static_cast<int64_t>(slots.size()));
    slots.push_back(static_cast<int64_t>(i));
  }
  int64_t first = layouts_[number - 1].position;
  bool pruned = first_pruned_ < stages_.size();
  auto here = [this, number, pruned] { return pruned ? *pruned_prefix_ : PrunedPrefix::whole(prefix_, number); };
  auto of_image = [this](const PrunedPrefix& at) {
    Ids which;
    int64_t token = 0;
    for (size_t i = 0; i < at.present.size(); ++i)
      if (at.present[i]) {
        if (prefix_.is_vision[i]) which.push_back(token);
        ++token;
      }
    return which;
  };
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
    std::optional<PrunedPrefix> before_run = pruned_prefix_;
    run(number, suffix, true);
    if (number >= first_pruned_) pruned_prefix_ = std::move(before_run);  // for its attention alone: what stays runs anew
    return scores_of(number, true);
  };
  auto image_hidden = [here, of_image] {
    PrunedPrefix at = here();
    return host(take(*at.hidden, of_image(at)));
  };
  auto keys = [this, number, image_slots, &hidden] {
    Rows all = cache(number - 1).keys();
    return std::pair(take(all, image_slots),
                     take(all, count_up(static_cast<int64_t>(all.count() - hidden.count()), hidden.count())));
  };
  // The first parts of them; where there are three, which have no order, the index in the prompt instead.
  auto positions = [this, here, of_image, first, &hidden] {
    PrunedPrefix at = here();
    Ids image;
    if (m_.model.position_parts() > 1) {
      for (size_t i = 0; i < at.present.size(); ++i)
        if (at.present[i] && prefix_.is_vision[i]) image.push_back(static_cast<int64_t>(i));
      return std::pair(image, count_up(static_cast<int64_t>(at.present.size()), hidden.count()));
    }
    for (int64_t token : of_image(at)) image.push_back(at.positions[static_cast<size_t>(token)].front());
    return std::pair(image, count_up(first, hidden.count()));
  };
  auto question_hidden = [&hidden] { return host(hidden); };
  return {stages_[number].first, question_hidden, prefix_.images, present, scores, image_hidden, keys, positions,
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
    prefix.boundaries = {std::make_shared<Rows>(std::move(tokens.hidden))};
    prefix.inputs = std::move(tokens.inputs);
  }
  suffix_.clear();
  selection_.reset();
  prefix.key = prompt.prefix_key(whole_prompt());
  if (continues_) prefix.follow(prefix_);
  former_ = prefix.common > 0 ? std::move(pruned_prefix_) : std::nullopt;
  pruned_prefix_.reset();
  prefix_ = std::move(prefix);
  continues_ = false;
  holding_.clear();
}

void Session::begin(Prefix prefix, std::vector<std::unique_ptr<StageCache>> caches) {
  reading_.reset();
  for (size_t number = 0; number < caches.size(); ++number) full_[number] = std::move(caches[number]);
  prefix_ = std::move(prefix);
  continue_prefix();
}

void Session::copy_prefix(Session& other) {
  continues_ = other.continues_;
  if (other.prefix_.size() == 0 || !other.prefix_.saved_kv.empty()) return;  // some of it is not in its caches
  Prefix prefix = other.prefix_;
  auto size = static_cast<int64_t>(prefix.size());
  for (size_t number = 0; number < prefix.depth(); ++number) {
    full_[number] = new_cache(number, capacity());
    full_[number]->copy(*other.full_.at(number), size);
  }
  prefix.begun.resize(std::min(prefix.begun.size(), prefix.depth()));
  prefix.filed = 0;
  prefix_ = std::move(prefix);
}

Prefix Session::empty_prefix() const {
  Prefix prefix;
  prefix.boundaries = {std::make_shared<Rows>(0, static_cast<size_t>(m_.model.hidden))};
  return prefix;
}

// Before a question: full caches whole again, and hidden states held wherever the policy may drop tokens.
void Session::prepare(const Policy& policy) {
  if (!prefix_.saved_kv.empty()) {  // put back what full stages have lost
    Prefix prefix = std::move(prefix_);
    prefix_ = empty_prefix();
    auto size = static_cast<int64_t>(prefix.size());
    for (const SavedKV& saved : prefix.saved_kv) {
      StageCache& here = *full_.at(saved.stage);
      here.write(saved.survivors, here.read(count_up(0, saved.survivors.size())), size);
      here.write(saved.dropped, saved.kv, size);
    }
    prefix.saved_kv.clear();
    prefix_ = std::move(prefix);
  }
  std::set<int64_t> cuts = policy.token_cuts();
  std::optional<int64_t> exit = policy.exit();
  for (exit_ = 0; exit_ < stages_.size() && stages_[exit_].first != exit;) ++exit_;
  bool ranks = std::any_of(stages_.begin(), stages_.end(), [&](const StageSpec& s) { return cuts.count(s.first) > 0; });
  if (prefix_.common > 0 && (ranks || prefix_.begun.size() < exit_))
    prefix_.run_from(
        static_cast<size_t>(std::find(prefix_.is_vision.begin(), prefix_.is_vision.end(), 1) - prefix_.is_vision.begin()));
  size_t lacking = stages_.size();
  for (size_t number = 0; number < stages_.size(); ++number) {
    if (cuts.count(stages_[number].first) == 0) continue;
    holding_.insert(number);  // also for the questions to come, some of which go back to this K
    if (!prefix_.held(number)) lacking = std::min(lacking, number);
  }
  if (size_t depth = prefix_.depth(); depth < exit_ && !prefix_.held(depth)) {
    lacking = std::min(lacking, depth);  // image tokens were to leave there, and now go on
    drops_unread_ = false;               // who changes K once may do so again
  }
  if (lacking < stages_.size()) prefix_.rewind(lacking);
}

// What of the prefix stage `number` sees, and where a suffix follows it.
PrefixSlots Session::layout(size_t number) const {
  if (number >= first_pruned_) return {pruned_prefix_->present, pruned_prefix_->size(), pruned_prefix_->next_position};
  return {Mask(prefix_.size(), 1), static_cast<int64_t>(prefix_.size()), prefix_.next_position};
}

// Runs a suffix through stage `number`, and before it what continues of the prefix if it has yet to run: both in one run,
// which reads the weights once, but not with a long suffix, nor with one whose `query` is kept and that is to be `alone`
// there, as it always is of image tokens that see each other; always where the prefix sees the suffix. The suffix's hidden
// states.
Rows Session::run(size_t number, const TokenStates& suffix, bool query, bool alone) {
  if (!stages_[number].keeps()) {  // only the last token's hidden state is read
    const int64_t position = layout(number).position + static_cast<int64_t>(suffix.count()) - 1;
    return cache(number).append(last_of(suffix), text_positions(position, 1));
  }
  bool whole = number < first_pruned_;
  PrunedPrefix* pruned = whole ? nullptr : &*pruned_prefix_;
  std::unique_ptr<StageCache>& cached = (whole ? full_ : pruned_)[number];
  bool due = (whole ? prefix_.depth() : pruned->depth) <= number;
  if (whole && !cached) cached = new_cache(number, capacity());
  if (!whole && due) {  // no slot for tokens that never enter it
    int64_t wanted = capacity() - (static_cast<int64_t>(prefix_.size()) - pruned->size());
    bool withdrawn = pruned->size() == static_cast<int64_t>(prefix_.text_size());
    if (!cached || cached->capacity < wanted || (withdrawn && cached->capacity > wanted)) {
      cached.reset();  // freed before the next one is made
      cached = new_cache(number, wanted);
    }
  }
  StageCache& here = *cached;
  PrefixSlots slots = layout(number);
  if (due) {
    const Rows& states = whole ? *prefix_.boundaries.back() : *pruned->hidden;
    size_t start = whole ? prefix_.start() : pruned->common, count = static_cast<size_t>(slots.slots) - start;
    here.keep(static_cast<int64_t>(start));
    here.mark(slots.slots);
    Rows found(0, states.width), behind;
    if (count > 0) {  // all of it may be in the cache
      alone = query && (alone || m_.model.two_way == TwoWay::images);
      bool joins = whole_prompt() || (!alone && suffix.count() <= static_cast<size_t>(names::kQuestionRows));
      auto first = static_cast<std::ptrdiff_t>(start);
      Ids running = indices_of(slots.present);
      Positions positions = whole ? prefix_.positions : pruned->positions;
      running.erase(running.begin(), running.begin() + first);
      positions.erase(positions.begin(), positions.begin() + first);
      TokenStates both{take(states, count_up(static_cast<int64_t>(states.count() - count), count)),
                       take(prefix_.inputs, running)};
      if (joins) {
        vtxcore::append(both.hidden, suffix.hidden);
        for (auto& [name, rows] : both.inputs) vtxcore::append(rows, suffix.inputs.at(name));
        for (const Position& position : text_positions(slots.position, suffix.count())) positions.push_back(position);
      }
      bool leaves =
          whole && here.selects_outputs() && drops_unread_ && number + 1 == exit_ && holding_.count(number + 1) == 0;
      Ids outputs = leaves ? indices_of(Mask(prefix_.is_vision.begin() + first, prefix_.is_vision.end()), false) : Ids();
      size_t own = leaves ? outputs.size() : count;
      for (size_t row = count; row < both.count(); ++row) outputs.push_back(static_cast<int64_t>(row));
      found = here.append(both, positions, query && joins, leaves ? &outputs : nullptr);
      behind = take(found, count_up(static_cast<int64_t>(own), found.count() - own));
      cut(found, own);
    }
    if (whole)
      prefix_.deepen(std::move(found), holding_.count(number) > 0);
    else
      pruned->hidden = std::make_shared<Rows>(std::move(found)), ++pruned->depth;
    if (behind.count() > 0) return behind;
  }
  here.keep(slots.slots);
  return here.append(suffix, text_positions(slots.position, suffix.count()), query);
}

// Some image tokens leave before stage `number`. What is left runs anew, unless they left before as well.
const PrunedPrefix& Session::remove(size_t number, const Removal& removal) {
  bool first = first_pruned_ == stages_.size();
  PrunedPrefix here = first || !pruned_prefix_ ? PrunedPrefix::whole(prefix_, number) : *pruned_prefix_;
  PrunedPrefix pruned = here.without(removal, prefix_.is_vision);
  bool again = first && pruned_prefix_ && pruned_prefix_->removals == pruned.removals && count_of(removal.kept) == 0;
  Mask kept;
  for (size_t i = 0; i < pruned.present.size(); ++i)
    if (prefix_.is_vision[i]) kept.push_back(pruned.present[i]);
  cuts_.push_back({stages_[number].first, removal.by, kept});
  if (!again) {
    bool held = former_.has_value();
    int64_t room = capacity() - (static_cast<int64_t>(prefix_.size()) - pruned.size());
    for (size_t stage = number; stage < stages_.size(); ++stage)
      held = held && pruned_.count(stage) > 0 && pruned_.at(stage)->capacity == room;
    if (held) pruned.follow(*former_, prefix_.common, stages_.size());
    former_.reset();
    pruned_prefix_ = std::move(pruned);
  }
  if (first) first_pruned_ = number;
  return *pruned_prefix_;
}

// ---- caches that shrink after the prompt

// Leaves in the caches from layer `from` on only the survivors of the prefix, and the suffix (MustDrop section 3.5).
// What a full stage loses is saved for the next question. Until all is done the session knows no prefix, so that an
// exception costs a computation and leaves the session correct.
void Session::shrink(int64_t from, const Mask& survivors, size_t suffix) {
  Prefix prefix = std::move(prefix_);
  prefix_ = empty_prefix();
  pruned_prefix_.reset();
  std::vector<PrefixSlots> layouts = layouts_;
  prefix.saved_kv.clear();
  for (size_t number = 0; number < stages_.size(); ++number) {
    if (stages_[number].first < from) continue;
    PrefixSlots& layout = layouts[number];
    Ids kept, dropped;
    int64_t slot = 0;
    for (size_t i = 0; i < layout.present.size(); ++i)
      if (layout.present[i]) (survivors[i] ? kept : dropped).push_back(slot++);
    if (dropped.empty()) continue;
    StageCache& here = cache(number);
    if (number < first_pruned_) prefix.saved_kv.push_back({number, kept, dropped, here.read(dropped)});
    Ids moved = kept, behind = count_up(layout.slots, suffix);
    moved.insert(moved.end(), behind.begin(), behind.end());
    here.write(count_up(0, moved.size()), here.read(moved), static_cast<int64_t>(moved.size()));
    layout.slots = static_cast<int64_t>(kept.size());
  }
  layouts_ = std::move(layouts);
  prefix_ = std::move(prefix);
}

// ---- the result

PrefillResult Session::result(Floats logits, bool reused) {
  PrefillResult out;
  out.logits = std::move(logits);
  out.reused_image = reused;
  out.vision_tokens = count_of(prefix_.is_vision);
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
  size_t served = reused ? (ran ? 0 : prefix_.size()) : prefix_.common;
  out.reused_tokens = static_cast<int64_t>(reused_suffix_ + served);
  out.slots = slots;
  out.vision_kept = per_layer(kept);
  out.images = prefix_.images;
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
