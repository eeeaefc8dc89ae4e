// Specs of reductions, `name:preset,key=value` joined by `+`, to methods and back.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/utf8.hpp"
#include "policies/methods/reductions.hpp"
#include "policies/options.hpp"
#include "policies/policy.hpp"

namespace vtxcore {
namespace {

constexpr size_t kMaxSpec = 1000;
constexpr int64_t kMaxNumber = 1000000000;

std::vector<std::string> split(const std::string& text, char mark) {
  std::vector<std::string> out{""};
  for (char c : text)
    if (c == mark)
      out.emplace_back();
    else
      out.back() += c;
  return out;
}

std::string trimmed(const std::string& text) { return std::string(strip(text, true, true)); }

// name and the rest behind `mark`; second: whether the mark is there.
std::pair<std::string, std::optional<std::string>> parted(const std::string& text, char mark) {
  size_t at = text.find(mark);
  if (at == std::string::npos) return {trimmed(text), std::nullopt};
  return {trimmed(text.substr(0, at)), trimmed(text.substr(at + 1))};
}

MethodPtr one_method(const std::string& text) {
  auto [name, rest] = parted(text, ':');
  for (const MethodKind& kind : method_kinds()) {
    if (kind.name != name) continue;
    SpecOptions options(name, rest.value_or(""), kind.presets);
    MethodPtr method = kind.make(options);
    options.done();
    return method;
  }
  std::string known;
  for (const MethodKind& kind : method_kinds()) known += std::string(kind.name) + ", ";
  fail(Kind::request, "no reduction is called '", name.substr(0, 40), "'; there are ", known, "and none");
}

void check_together(const std::vector<MethodPtr>& parts) {
  std::map<std::string, std::string> setting;
  for (size_t i = 0; i < parts.size(); ++i) {
    for (size_t j = 0; j < i; ++j)
      if (parts[i]->name() == parts[j]->name())
        fail(Kind::request, parts[i]->name(), " stands twice in --reduce ", to_spec(parts), "; name it once");
    std::shared_ptr<const Entry> entry = parts[i]->entry();
    for (const auto& [input, value] : entry ? entry->vision_inputs() : Extras()) {
      auto [held, fresh] = setting.emplace(input, parts[i]->name());
      if (!fresh)
        fail(Kind::request, held->second, " and ", parts[i]->name(), " both set ", input, "; leave one out, or give ", input,
             "=off");
    }
    if (i > 0 && !parts[i - 1]->needs().cuts.empty() && parts[i]->needs().cuts.empty())
      fail(Kind::request, parts[i]->name(), " works before the decoder and ", parts[i - 1]->name(), " within it; write ",
           parts[i]->name(), " first");
  }
}

int64_t first_cut(const MethodPtr& part) {
  std::set<int64_t> cuts = part->needs().cuts;
  return cuts.empty() ? 0 : *cuts.begin();
}

}  // namespace

std::vector<MethodPtr> parse_spec(const std::string& text) {
  if (text.size() > kMaxSpec)
    fail(Kind::request, "the reduction spec has ", text.size(), " characters, the limit is ", kMaxSpec, "; shorten it");
  std::vector<MethodPtr> parts;
  if (trimmed(text) != "none")
    for (const std::string& part : split(text, '+')) parts.push_back(one_method(part));
  check_together(parts);
  std::stable_sort(parts.begin(), parts.end(),
                   [](const MethodPtr& a, const MethodPtr& b) { return first_cut(a) < first_cut(b); });
  return parts;
}

std::string to_spec(const std::vector<MethodPtr>& parts) {
  std::string out;
  for (const MethodPtr& part : parts) out += (out.empty() ? "" : "+") + part->spec();
  return out.empty() ? "none" : out;
}

std::string spec_number(double value) {
  std::string text = python_repr(value);
  if (text.size() > 2 && text.compare(text.size() - 2, 2, ".0") == 0) text.resize(text.size() - 2);
  if (size_t plus = text.find("e+"); plus != std::string::npos) text.erase(plus + 1, 1);
  return text;
}

SpecOptions::SpecOptions(std::string method, const std::string& rest, const std::map<std::string, std::string>& presets)
    : method_(std::move(method)) {
  std::vector<std::string> items = rest.empty() ? std::vector<std::string>() : split(rest, ',');
  std::set<std::string> seen;
  for (size_t n = 0; n < items.size(); ++n) {
    auto [key, value] = parted(items[n], '=');
    if (!value && n == 0) {
      auto preset = presets.find(key);
      if (preset == presets.end()) fail(Kind::request, method_, " has no preset '", key.substr(0, 40), "'; write key=value");
      for (const std::string& item : split(preset->second, ',')) {
        auto [name, text] = parted(item, '=');
        given_[name] = *text;
      }
      continue;
    }
    if (!value) fail(Kind::request, method_, " has no option '", key.substr(0, 40), "'");
    if (!seen.insert(key).second) fail(Kind::request, method_, ": ", key, " is given twice; give it once");
    given_[key] = *value;
  }
}

std::optional<std::string> SpecOptions::take(const char* key) {
  known_.emplace_back(key);
  auto found = given_.find(key);
  return found == given_.end() ? std::nullopt : std::optional(found->second);
}

double SpecOptions::number(const char* key, double otherwise) {
  std::optional<std::string> text = take(key);
  if (!text) return otherwise;
  double value = NAN;
  size_t plus = !text->empty() && (*text)[0] == '+' ? 1 : 0;
  auto end = std::from_chars(text->data() + plus, text->data() + text->size(), value);
  if (end.ec != std::errc() || end.ptr != text->data() + text->size() || !std::isfinite(value))
    fail(Kind::request, method_, ": ", key, " is '", text->substr(0, 40), "'; give a number");
  return value;
}

std::optional<double> SpecOptions::number_or_off(const char* key, std::optional<double> otherwise) {
  auto found = given_.find(key);
  if (found != given_.end() && found->second == "off") {
    take(key);
    return std::nullopt;
  }
  if (found == given_.end()) {
    take(key);
    return otherwise;
  }
  return number(key, 0);
}

namespace {

int64_t whole_of(const std::string& text, const std::string& where) {
  int64_t value = 0;
  size_t plus = !text.empty() && text[0] == '+' ? 1 : 0;
  auto end = std::from_chars(text.data() + plus, text.data() + text.size(), value);
  if (end.ec != std::errc() || end.ptr != text.data() + text.size() || value > kMaxNumber || value < -kMaxNumber)
    fail(Kind::request, where, " is '", text.substr(0, 40), "'; give a whole number up to ", grouped(kMaxNumber));
  return value;
}

}  // namespace

int64_t SpecOptions::whole(const char* key, int64_t otherwise) {
  std::optional<std::string> text = take(key);
  return text ? whole_of(*text, cat(method_, ": ", key)) : otherwise;
}

Ids SpecOptions::wholes(const char* key, Ids otherwise) {
  std::optional<std::string> text = take(key);
  if (!text) return otherwise;
  Ids out;
  for (const std::string& part : split(*text, '/')) out.push_back(whole_of(part, cat(method_, ": ", key)));
  return out;
}

std::string SpecOptions::one_of(const char* key, const std::vector<std::string>& values) {
  std::optional<std::string> text = take(key);
  if (!text) return values.front();
  if (std::find(values.begin(), values.end(), *text) != values.end()) return *text;
  std::string list;
  for (const std::string& value : values) list += (list.empty() ? "" : ", ") + value;
  fail(Kind::request, method_, ": ", key, " is '", text->substr(0, 40), "'; it is one of ", list);
}

void SpecOptions::done() const {
  std::string list;
  for (const std::string& key : known_) list += (list.empty() ? "" : ", ") + key;
  for (const auto& [key, value] : given_)
    if (std::find(known_.begin(), known_.end(), key) == known_.end())
      fail(Kind::request, method_, " has no option '", key.substr(0, 40), "'; it has ", list.empty() ? "none" : list);
}

}  // namespace vtxcore
