#include "api/kinds.hpp"

#include <algorithm>

#include "bundle/names.hpp"

namespace vtxcore {
namespace {

bool says_yes_or_no(const Json& value) {
  if (value.boolean() != nullptr) return true;
  if (value.string() == nullptr) return false;
  std::string text = *value.string();
  std::transform(text.begin(), text.end(), text.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? char(c + 32) : c; });
  return text == "yes" || text == "no";
}

// The kind of an answer that is one of these values.
const char* kind_of(const Json::Array& values) {
  return std::all_of(values.begin(), values.end(), says_yes_or_no) ? names::kYesNo : names::kChoice;
}

// The schemas of the values inside a value of this schema.
std::vector<const Json*> inner_of(const Json& schema) {
  std::vector<const Json*> out;
  if (const Json* properties = schema.find("properties"); properties && properties->object())
    for (const auto& [name, value] : *properties->object()) out.push_back(&value);
  for (const char* key : {"items", "additionalProperties"})
    if (const Json* value = schema.find(key); value && value->object()) out.push_back(value);
  for (const char* key : {"prefixItems", "anyOf", "oneOf", "allOf"})
    if (const Json* listed = schema.find(key); listed && listed->array())
      for (const Json& value : *listed->array()) out.push_back(&value);
  return out;
}

// The kind of a value of a schema's type; empty if `nested` values, or none, make up for it.
std::string kind_of_type(const Json& type, bool nested) {
  std::string name = type.string() ? *type.string() : "";
  if (name == "boolean") return names::kYesNo;
  if (name == "integer" || name == "number") return names::kNumber;
  bool inside = nested && (name == "object" || name == "array" || type.is_null());
  return inside || name == "null" ? "" : names::kText;
}

// The kinds of the values that a JSON schema leaves open; a text without a list of its values is quoted text.
std::set<std::string> kinds_of_schema(const Json& schema) {
  std::set<std::string> kinds;
  std::vector<const Json*> parts{&schema};
  while (!parts.empty()) {
    const Json& part = *parts.back();
    parts.pop_back();
    const Json *value = part.find("const"), *listed = part.find("enum");
    if (part.object() == nullptr) {
      kinds.insert(names::kText);
    } else if (value) {
      kinds.insert(kind_of(Json::Array{*value}));
    } else if (listed && listed->array()) {
      kinds.insert(kind_of(*listed->array()));
    } else {
      std::vector<const Json*> inner = inner_of(part);
      const Json* type = part.find("type");
      Json::Array types = type && type->array() ? *type->array() : Json::Array{type ? *type : Json()};
      bool nested = !inner.empty() && part.find("$ref") == nullptr;
      for (const Json& each : types) kinds.insert(kind_of_type(each, nested));
      parts.insert(parts.end(), inner.begin(), inner.end());
    }
  }
  kinds.erase("");
  return kinds.empty() ? std::set<std::string>{names::kChoice} : kinds;
}

}  // namespace

std::set<std::string> kinds_of(const std::optional<Guide>& guide) {
  if (guide && guide->kind == "choices") {
    std::vector<std::string> choices = guide->choices();
    return {kind_of(Json::Array(choices.begin(), choices.end()))};
  }
  if (guide && guide->kind == "schema") return kinds_of_schema(parse_json(guide->value, "the schema", Kind::request));
  return {names::kText};
}

std::pair<std::string, std::optional<Rest>> card_depth(const std::vector<KindDepth>& depths,
                                                       const std::optional<Guide>& guide, const ModelSpec& model) {
  const std::pair<std::string, std::optional<Rest>> full{"none", std::nullopt};
  std::set<std::string> kinds = kinds_of(guide);
  bool open = kinds.count(names::kText) > 0;
  int64_t k = 0;
  double rest = 0;
  for (const KindDepth& depth : depths) {
    bool asked = kinds.erase(depth.kind) > 0;
    if (!asked && !open) continue;
    if (!depth.k) return full;
    k = std::max(k, *depth.k), rest = std::max(rest, depth.rest);
  }
  if (!kinds.empty() || (rest > 0 && !unscored(model, k - 1).empty())) return full;
  return {std::to_string(k), rest > 0 ? std::optional(Rest{true, rest}) : std::nullopt};
}

}  // namespace vtxcore
