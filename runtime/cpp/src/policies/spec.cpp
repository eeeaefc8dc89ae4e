// Specs of reductions, `name:preset,key=value` joined by `+`, to methods and back.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>

#include "base/utf8.hpp"
#include "policies/options.hpp"

namespace vtxcore {
namespace {

constexpr size_t kMaxSpec = 1000;
constexpr int64_t kMaxNumber = 1000000000;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

const std::vector<MethodSpec>& method_specs() {
  static const std::vector<MethodSpec> kMethods{
#include "policies/methods.inc"
  };
  return kMethods;
}

std::vector<std::string> split(const std::string& text, char mark) {
  std::vector<std::string> out{""};
  for (char c : text)
    if (c == mark)
      out.emplace_back();
    else
      out.back() += c;
  return out;
}

template <typename List, typename Name>
std::string joined(const List& list, Name name) {
  std::string out;
  for (const auto& one : list) out += (out.empty() ? "" : ", ") + std::string(name(one));
  return out;
}

std::string trimmed(const std::string& text) { return std::string(strip(text, true, true)); }

// Name and the rest behind `mark`; third: whether the mark is there.
std::tuple<std::string, std::string, bool> parted(const std::string& text, char mark) {
  size_t at = text.find(mark);
  if (at == std::string::npos) return {trimmed(text), "", false};
  return {trimmed(text.substr(0, at)), trimmed(text.substr(at + 1)), true};
}

template <typename List>
auto named(const List& list, const std::string& name) {
  return std::find_if(list.begin(), list.end(), [&](const auto& one) { return one.name == name; });
}

MethodPtr one_method(const std::string& text) {
  auto [name, rest, _] = parted(text, ':');
  auto method = named(method_specs(), name);
  if (method == method_specs().end())
    fail(Kind::request, "no reduction is called '", name.substr(0, 40), "'; there are ",
         joined(method_specs(), [](const MethodSpec& one) { return one.name; }), ", and none");
  auto make = method_register().find(name);
  if (make == method_register().end())
    fail(Kind::request, name, " is not built into libvtx, which has ",
         joined(method_register(), [](const auto& one) { return one.first; }), "; use one of these, or Python");
  return make->second(MethodOptions(*method, rest));
}

void check_together(const std::vector<MethodPtr>& parts) {
  auto name_of = [](const MethodPtr& part) { return part->name(); };
  for (const MethodPtr& part : parts)
    if (std::count_if(parts.begin(), parts.end(), [&](const MethodPtr& one) { return one->name() == part->name(); }) > 1) {
      std::string names;
      for (const MethodPtr& one : parts) names += (names.empty() ? "" : "+") + name_of(one);
      fail(Kind::request, part->name(), " is named twice in --reduce ", names, "; name it once");
    }
  std::map<std::string, std::string> setting;
  for (const MethodPtr& part : parts) {
    std::shared_ptr<const Entry> entry = part->entry();
    for (const auto& [input, value] : entry ? entry->vision_inputs() : Extras()) {
      auto [held, fresh] = setting.emplace(input, part->name());
      if (!fresh)
        fail(Kind::request, held->second, " and ", part->name(), " both set ", input, "; leave one out, or give ", input,
             "=off");
    }
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    Needs needs = parts[i]->needs();
    for (size_t place = 0; place < parts.size() && (needs.projector || !needs.tower_layers.empty()); ++place) {
      Needs other = parts[place]->needs();
      if (other.merging || (needs.projector && other.of_patches()))
        fail(Kind::request, parts[place]->name(), " and ", parts[i]->name(),
             " both work on the tower's patches; leave one out");
      if (place < i && parts[place]->entry())
        fail(Kind::request, parts[i]->name(), " works on all of the tower's patches; write it before ",
             parts[place]->name());
    }
  }
  for (size_t i = 1; i < parts.size(); ++i)
    if (!parts[i - 1]->needs().cuts.empty() && parts[i]->needs().cuts.empty())
      fail(Kind::request, parts[i]->name(), " works before the decoder and ", parts[i - 1]->name(), " within it; write ",
           parts[i]->name(), " first");
}

int64_t first_cut(const MethodPtr& part) {
  std::set<int64_t> cuts = part->needs().cuts;
  return cuts.empty() ? 0 : *cuts.begin();
}

}  // namespace

std::vector<MethodPtr> parse_spec(const std::string& text) {
  if (text.size() > kMaxSpec)
    fail(Kind::request, "the reduction spec has ", grouped(static_cast<int64_t>(text.size())), " characters, the limit is ",
         grouped(kMaxSpec), "; shorten it");
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

std::map<std::string, MakeMethod>& method_register() {
  static std::map<std::string, MakeMethod> methods;
  return methods;
}

MethodOptions::MethodOptions(const MethodSpec& method, const std::string& rest) : method_(&method) {
  for (const OptionSpec& option : method.options) values_[option.name] = read(option, option.value, "");
  std::set<std::string> given;
  std::vector<std::string> items = rest.empty() ? std::vector<std::string>() : split(rest, ',');
  for (size_t n = 0; n < items.size(); ++n) {
    auto [key, value, equals] = parted(items[n], '=');
    if (n == 0 && !equals) {
      auto preset = std::find_if(method.presets.begin(), method.presets.end(),
                                 [&, &name = key](const auto& one) { return one.first == name; });
      if (preset == method.presets.end())
        fail(Kind::request, method.name, " has no preset '", key.substr(0, 40), "'; ",
             method.presets.empty() ? "it has none; write key=value"
                                    : "it has " + joined(method.presets, [](const auto& one) { return one.first; }));
      for (const std::string& item : split(preset->second, ',')) {
        auto [name, text, _] = parted(item, '=');
        values_[name] = read(*named(method.options, name), text, "");
      }
      continue;
    }
    auto option = named(method.options, key);
    if (option == method.options.end() || !equals) {
      std::string names = joined(method.options, [](const OptionSpec& one) { return one.name; });
      fail(Kind::request, method.name, " has no option '", key.substr(0, 40), "'; it has ", names.empty() ? "none" : names);
    }
    if (!given.insert(key).second) fail(Kind::request, method.name, ": ", key, " is given twice; give it once");
    values_[key] = read(*option, value, cat(method.name, ": ", key, option->optional ? " (off turns it off)" : ""));
  }
  check();
}

MethodOptions::Value MethodOptions::read(const OptionSpec& option, const std::string& text, const std::string& where) {
  Value out;
  out.text = text;
  if (option.optional && text == "off") return out;
  if (option.type == OptionType::choice) {
    if (std::find(option.choices.begin(), option.choices.end(), text) == option.choices.end())
      fail(Kind::request, where, " is '", text.substr(0, 40), "'; it is one of ",
           joined(option.choices, [](const char* one) { return one; }));
    return out;
  }
  auto number = [&](const std::string& part, auto value) {
    std::string_view digits = strip(part, true, true);
    digits.remove_prefix(!digits.empty() && digits[0] == '+' ? 1 : 0);
    auto end = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    auto size = static_cast<double>(value);
    bool is_whole = option.type != OptionType::number;
    if (end.ec != std::errc() || end.ptr != digits.data() + digits.size() || !std::isfinite(size) ||
        (is_whole && std::abs(size) > kMaxNumber))
      fail(Kind::request, where, " is '", part.substr(0, 40), "'; give ",
           is_whole ? "a whole number up to " + grouped(kMaxNumber) : "a number");
    return value;
  };
  if (option.type == OptionType::number) {
    out.number = number(text, 0.0) + 0.0;  // never -0.0
    out.text = spec_number(out.number);
    return out;
  }
  out.text.clear();
  for (const std::string& part : option.type == OptionType::layers ? split(text, '/') : std::vector<std::string>{text}) {
    out.wholes.push_back(number(part, int64_t{0}));
    out.text += (out.text.empty() ? "" : "/") + std::to_string(out.wholes.back());
  }
  return out;
}

void MethodOptions::check() const {
  for (const OptionSpec& option : method_->options) {
    const Value& value = values_.at(option.name);
    const OptionLimits& limits = option.limits;
    auto allows = [&](double number) {
      if (limits.or_count && number >= 2 && number == std::floor(number)) return true;
      return (limits.above ? number > limits.least : number >= limits.least) && number <= limits.most;
    };
    const Ids& wholes = value.wholes;
    bool is_number = option.type == OptionType::number;
    bool fine =
        option.type == OptionType::choice || (option.optional && value.text == "off") ||
        (is_number ? allows(value.number)
                   : std::all_of(wholes.begin(), wholes.end(), [&](auto n) { return allows(static_cast<double>(n)); }) &&
                         std::adjacent_find(wholes.begin(), wholes.end(), std::greater_equal<>()) == wholes.end());
    if (!fine)
      fail(Kind::request, method_->name, ": ", option.name, " is ", is_number ? python_repr(value.number) : value.text, "; ",
           limits.fix);
  }
  for (const Conflict& conflict : method_->conflicts)
    if (all_of(conflict.values)) fail(Kind::request, method_->name, ": ", conflict.message);
}

bool MethodOptions::all_of(const std::vector<Condition>& conditions) const {
  return std::all_of(conditions.begin(), conditions.end(),
                     [&](const Condition& one) { return (text(one.option) == one.value) == one.equal; });
}

std::string MethodOptions::spec() const {
  std::string out = method_->name;
  for (const OptionSpec& option : method_->options)
    out += cat(&option == method_->options.data() ? ':' : ',', option.name, '=', text(option.name));
  return out;
}

Needs MethodOptions::needs() const {
  Needs needs;
  const std::map<std::string, bool*> flags{
      {"merging", &needs.merging},       {"attention", &needs.attention},   {"last_attention", &needs.last_attention},
      {"final_norm", &needs.final_norm}, {"text_tower", &needs.text_tower}, {"projector", &needs.projector},
  };
  for (const NeedSpec& one : method_->needs) {
    std::string need = one.need;
    if (auto flag = flags.find(need); flag != flags.end()) {
      *flag->second = all_of(one.when);
      continue;
    }
    for (int64_t layer : layers(one.layers)) {
      if (layer == 0) continue;
      if (need == "cuts") needs.cuts.insert(layer + 1);
      if (need == "queries") needs.queries.insert(layer);
      if (need == "ahead") needs.ahead.insert(layer + 1);
      if (need == "tower_layers") needs.tower_layers.insert(layer);
      if (need == "shrinks") needs.shrinks = std::min(needs.shrinks.value_or(layer), layer);
    }
  }
  return needs;
}

}  // namespace vtxcore
