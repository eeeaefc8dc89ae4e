// The manifest's section on the expert of a model that answers with actions.
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
  Statistics found{numbers_or_none(fields, what + "_mean"), numbers_or_none(fields, what + "_std")};
  auto finite = [](float value) { return std::isfinite(value); };
  auto deviation = [](float value) { return std::isfinite(value) && value >= 0; };
  if (found.mean.size() != found.std.size() || static_cast<int64_t>(found.mean.size()) > most ||
      !std::all_of(found.mean.begin(), found.mean.end(), finite) ||
      !std::all_of(found.std.begin(), found.std.end(), deviation))
    fail(Kind::bundle, "vtx.json: action: the statistics of ", what, " are not up to ", most,
         " means and as many deviations; export again");
  return found.mean.empty() ? std::nullopt : std::optional(std::move(found));
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
  a.of_states = read_statistics(fields, "state", a.state);
  a.of_actions = read_statistics(fields, "actions", a.width);
  fields.done();
  return a;
}

}  // namespace vtxcore
