// The manifest's sections on a model that outputs actions: its expert, or its tokens that are bins.
#include <algorithm>
#include <cmath>
#include <set>

#include "bundle/fields.hpp"
#include "bundle/manifest.hpp"

namespace vtxcore {
namespace {

Floats numbers_or_none(Fields& fields, const std::string& key) {
  Floats out;
  if (!fields.has(key.c_str()) || fields.get(key.c_str()).is_null()) return out;
  for (const Json& item : fields.list(key.c_str())) out.push_back(static_cast<float>(fields.number_of(item, key.c_str())));
  return out;
}

std::optional<Statistics> read_statistics(Fields& fields, const std::string& what, int64_t most) {
  Statistics deviations{numbers_or_none(fields, what + "_mean"), numbers_or_none(fields, what + "_std"), false};
  Statistics ranges{numbers_or_none(fields, what + "_low"), numbers_or_none(fields, what + "_high"), true};
  for (const Statistics& one : {deviations, ranges}) {
    auto finite = [](float value) { return std::isfinite(value); };
    auto sound = [&](float value) { return std::isfinite(value) && (one.ranges || value >= 0); };
    if (one.first.size() != one.second.size() || static_cast<int64_t>(one.first.size()) > most ||
        !std::all_of(one.first.begin(), one.first.end(), finite) ||
        !std::all_of(one.second.begin(), one.second.end(), sound))
      fail(Kind::bundle, "vtx.json: action: the statistics of ", what, " are not up to ", most, " ",
           one.ranges ? "low" : "mean", " and as many ", one.ranges ? "high" : "std", " numbers; export again");
  }
  if (!deviations.first.empty() && !ranges.first.empty())
    fail(Kind::bundle, "vtx.json: action: ", what, " have both deviations and ranges; export again");
  if (!deviations.first.empty()) return deviations;
  return ranges.first.empty() ? std::nullopt : std::optional(std::move(ranges));
}

}  // namespace

ActionSpec read_action(const Json& value) {
  Fields fields(value, "vtx.json: action");
  ActionSpec a;
  for (const char* key : {"hidden", "intermediate", "heads"}) fields.whole(key, 1, names::kMaxSize);  // of the graph alone
  for (const char* key : {"eps", "min_period", "max_period"})
    if (double number = fields.number(key); !(number > 0 && std::isfinite(number)))
      fail(Kind::bundle, "vtx.json: action.", key, " is ", python_repr(number), ", not a positive number; export again");
  fields.text("activation");
  a.state = fields.whole("state", 1, names::kMaxSize), a.width = fields.whole("width", 1, names::kMaxSize);
  a.horizon = fields.whole("horizon", 1, names::kMaxSize), a.steps = fields.whole("steps", 1, names::kMaxSteps);
  if (fields.has("cameras")) a.cameras = fields.texts("cameras");
  if (std::set<std::string> once(a.cameras.begin(), a.cameras.end()); once.size() != a.cameras.size() || once.count(""))
    fail(Kind::bundle, "vtx.json: action: cameras ", a.cameras, " hold a name twice; export again");
  if (fields.has("state_in")) a.state_in = fields.text("state_in");
  if (a.state_in != "expert" && a.state_in != "prompt" && a.state_in != "text")
    fail(Kind::bundle, "vtx.json: action: state_in is '", a.state_in.substr(0, 40),
         "', unknown to this vtx, which has expert, prompt, text; ", kUpgrade);
  for (const char* key : {"adaptive", "causal"})  // of the graph alone
    if (fields.has(key)) fields.flag(key);
  if (fields.has("self_every")) fields.whole("self_every", 1, names::kMaxSize);
  if (fields.has("absent_cameras")) a.absent_cameras = fields.flag("absent_cameras");
  if (fields.has("instruction_tokens")) a.instruction_tokens = fields.whole("instruction_tokens", 1, names::kMaxSize);
  a.of_states = read_statistics(fields, "state", a.state);
  a.of_actions = read_statistics(fields, "actions", a.width);
  fields.done();
  return a;
}

ActionBins read_bins(const Json& value) {
  Fields fields(value, "vtx.json: bins");
  ActionBins bins{fields.whole("vocab", 1, names::kMaxSize), fields.whole("edges", 2, names::kMaxBins), {}};
  const Json::Object* ranges = fields.get("ranges").object();
  if (ranges == nullptr) fields.wrong<int>("ranges", "an object");
  if (ranges->empty() || bins.edges > bins.vocab)
    fail(Kind::bundle, "vtx.json: bins: ", bins.edges, " edges, ", bins.vocab, " tokens and ", ranges->size(),
         " data sets; they must be 2 to ", names::kMaxBins, " edges, no more than tokens, and at least one data set; ",
         "export again");
  for (const auto& [name, written] : *ranges) {
    Fields stated(written, "vtx.json: bins.ranges");
    ActionRange range{name, {}, {}, {}};
    for (auto [key, into] : {std::pair("low", &range.low), std::pair("high", &range.high)})
      for (const Json& item : stated.list(key)) into->push_back(stated.number_of(item, key));
    for (const Json& item : stated.list("mask")) {
      if (item.boolean() == nullptr) stated.wrong<int>("mask", "a list of true and false");
      range.mask.push_back(*item.boolean());
    }
    stated.done();
    auto sound = [](double number) { return std::abs(number) <= names::kWidest; };
    size_t count = range.low.size();
    if (count < 1 || count > static_cast<size_t>(names::kMaxNumbers) || range.high.size() != count ||
        range.mask.size() != count || !std::all_of(range.low.begin(), range.low.end(), sound) ||
        !std::all_of(range.high.begin(), range.high.end(), sound))
      fail(Kind::bundle, "vtx.json: bins: a range of ", count, " low and ", range.high.size(), " high numbers and ",
           range.mask.size(), " of its mask; they must be as many of each, 1 to ", names::kMaxNumbers,
           ", and from -1e+30 to 1e+30; export again");
    bins.ranges.push_back(std::move(range));
  }
  fields.done();
  return bins;
}

}  // namespace vtxcore
