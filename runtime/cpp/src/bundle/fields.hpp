// The members of a JSON object, each asked for once by name and type; what is left over is an error.
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "base/tensors.hpp"

namespace vtxcore {

inline constexpr char kDamaged[] = "the bundle was altered or made by another vtx, export again";
inline constexpr char kUpgrade[] = "use a newer libvtx";

class Fields {
 public:
  Fields(const Json& value, std::string where) : object_(value.object()), where_(std::move(where)) {
    if (object_ == nullptr) fail(Kind::bundle, where_, " is not an object; ", kDamaged);
    if (value.find("") != nullptr) fail(Kind::bundle, where_, ": unknown key ''; ", kDamaged);
    value_ = &value;
  }

  // Whether a key is there; for fields that came after their file's format.
  bool has(const char* key) const { return value_->find(key) != nullptr; }

  const Json& get(const char* key) {
    const Json* found = value_->find(key);
    if (found == nullptr) fail(Kind::bundle, where_, ": key '", key, "' is missing; ", kDamaged);
    asked_.insert(key);
    return *found;
  }

  std::string text(const char* key) {
    const std::string* found = get(key).string();
    return found ? *found : wrong<std::string>(key, "str");
  }

  std::optional<std::string> text_or_null(const char* key) {
    return get(key).is_null() ? std::nullopt : std::optional(text(key));
  }

  // None where the key is missing or null.
  std::optional<int64_t> whole_or_null(const char* key, int64_t least, int64_t most = (int64_t{1} << 31) - 1) {
    return has(key) && !get(key).is_null() ? std::optional(whole(key, least, most)) : std::nullopt;
  }

  bool flag(const char* key) {
    const bool* found = get(key).boolean();
    return found ? *found : wrong<bool>(key, "bool");
  }

  int64_t whole(const char* key, int64_t least = 1, int64_t most = (int64_t{1} << 31) - 1) {
    const int64_t* found = get(key).integer();
    if (found == nullptr) return wrong<int64_t>(key, "int");
    if (*found < least || *found > most)
      fail(Kind::bundle, where_, ".", key, " is ", *found, ", outside ", least, "..", most, "; export again");
    return *found;
  }

  double number(const char* key) { return number_of(get(key), key); }

  double number_of(const Json& value, const char* key) {
    if (const int64_t* whole = value.integer()) return static_cast<double>(*whole);
    const double* real = value.real();
    return real ? *real : wrong<double>(key, "float");
  }

  double positive(const char* key) {
    double value = number(key);
    if (!(value > 0 && std::isfinite(value)))
      fail(Kind::bundle, where_, ".", key, " is ", value, ", not a positive number; export again");
    return value;
  }

  const Json::Array& list(const char* key) {
    const Json::Array* found = get(key).array();
    if (found == nullptr) wrong<int>(key, "a list");
    return *found;
  }

  Ids wholes(const char* key, int64_t least, int64_t most) {
    Ids out;
    for (const Json& item : list(key)) {
      const int64_t* value = item.integer();
      if (value == nullptr || *value < least || *value > most) wrong<int>(key, "a list of numbers in range");
      out.push_back(*value);
    }
    return out;
  }

  std::vector<std::string> texts(const char* key) {
    std::vector<std::string> out;
    for (const Json& item : list(key)) {
      if (item.string() == nullptr) wrong<int>(key, "a list of strings");
      out.push_back(*item.string());
    }
    return out;
  }

  // Every key must have been asked for.
  void done() const {
    for (const auto& [key, value] : *object_)
      if (asked_.count(key) == 0) fail(Kind::bundle, where_, ": unknown key '", key.substr(0, 60), "'; ", kDamaged);
  }

  template <typename Value>
  [[noreturn]] Value wrong(const char* key, const char* wanted) const {
    const Json* found = value_->find(key);
    fail(Kind::bundle, where_, ": ", key, " is '", found ? found->dump().substr(0, 60) : "", "', not ", wanted, "; ",
         kDamaged);
  }

  const std::string& where() const { return where_; }

 private:
  const Json::Object* object_;
  const Json* value_;
  std::string where_;
  std::set<std::string> asked_;
};

}  // namespace vtxcore
