// JSON that nobody vouches for: a strict parser with limits, and a writer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/errors.hpp"

namespace vtxcore {

class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // in the file's order

  Json() = default;
  Json(std::nullptr_t) {}
  Json(bool value) : value_(value) {}
  Json(int value) : value_(int64_t{value}) {}
  Json(int64_t value) : value_(value) {}
  Json(size_t value) : value_(static_cast<int64_t>(value)) {}
  Json(double value) : value_(value) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(Array value) : value_(std::move(value)) {}
  Json(Object value) : value_(std::move(value)) {}
  // By hand: where memory ends while a variant is copied, libstdc++ (12) destroys what was never made.
  Json(const Json& other) : value_(copied(other.value_)) {}
  Json& operator=(const Json& other) { return *this = Json(other); }
  Json(Json&&) noexcept = default;
  Json& operator=(Json&&) noexcept = default;
  ~Json() = default;

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  const bool* boolean() const { return std::get_if<bool>(&value_); }
  const int64_t* integer() const { return std::get_if<int64_t>(&value_); }
  const double* real() const { return std::get_if<double>(&value_); }
  const std::string* string() const { return std::get_if<std::string>(&value_); }
  const Array* array() const { return std::get_if<Array>(&value_); }
  Array* array() { return std::get_if<Array>(&value_); }
  const Object* object() const { return std::get_if<Object>(&value_); }
  Object* object() { return std::get_if<Object>(&value_); }

  // The value of a key, null where this is no object or has no such key. Linear: for objects of a few keys.
  const Json* find(std::string_view key) const;

  // The member of this key, or what is given where there is none of this type.
  std::string text(std::string_view key) const;
  bool flag(std::string_view key, bool otherwise = false) const;

  // Equal in type and value; the order of keys does not count.
  bool operator==(const Json& other) const;
  bool operator!=(const Json& other) const { return !(*this == other); }

  // As json.dumps(value, ensure_ascii=False) of Python writes it.
  std::string dump() const;

 private:
  using Value = std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object>;
  static Value copied(const Value& value);
  Value value_;
};

// Parses UTF-8 JSON; `what` names it in messages. Refuses what Python's reader refuses: a key given twice, NaN,
// Infinity, half a surrogate pair, text that is not UTF-8, and more than 64 levels. Throws Error of `kind`.
Json parse_json(std::string_view text, const std::string& what, Kind kind);

// A float as Python's repr writes it: the shortest digits that give the same number again.
std::string python_repr(double value);

}  // namespace vtxcore
