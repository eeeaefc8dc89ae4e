// Everything the library throws on purpose, and how its messages are put together.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace vtxcore {

// The classes of errors.py; the C ABI gives each its status.
enum class Kind { request, context, busy, closed, templates, image, bundle, device, late };

class Error : public std::runtime_error {
 public:
  Error(Kind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  Kind kind() const { return kind_; }

 private:
  Kind kind_;
};

inline std::string piece(std::string_view text) { return std::string(text); }
inline std::string piece(char letter) { return std::string(1, letter); }
inline std::string piece(const char* text) { return text; }
template <typename Number, typename = std::enable_if_t<std::is_arithmetic_v<Number>>>
std::string piece(Number number) {
  return std::to_string(number);
}

template <typename First, typename Second>
std::string piece(const std::pair<First, Second>& pair) {
  return "(" + piece(pair.first) + ", " + piece(pair.second) + ")";
}
inline std::string quoted(const std::string& text) { return "'" + text + "'"; }
template <typename Value>
std::string quoted(const Value& value) {
  return piece(value);
}
// As Python prints a list.
template <typename Value>
std::string piece(const std::vector<Value>& list) {
  std::string out;
  for (const Value& value : list) out += (out.empty() ? "" : ", ") + quoted(value);
  return "[" + out + "]";
}

// The parts side by side: cat("K = ", 3).
template <typename... Parts>
std::string cat(const Parts&... parts) {
  return (std::string() + ... + piece(parts));
}

template <typename... Parts>
[[noreturn]] void fail(Kind kind, const Parts&... parts) {
  throw Error(kind, cat(parts...));
}

// For libraries that are opened by name: `which` one, the names that were `tried`, and the way to name another.
[[noreturn]] inline void not_found(const std::string& which, const std::string& tried, const std::string& way) {
  fail(Kind::device, which, " was not found (", tried, "); install it, or name its library ", way);
}

// The parts one after the other, with `between` them.
template <typename List>
std::string listed(const List& list, const char* between = ", ") {
  std::string out;
  for (const auto& one : list) out += (out.empty() ? "" : between) + piece(one);
  return out;
}

// 1234567 as "1,234,567".
inline std::string grouped(long long number) {
  std::string digits = std::to_string(number < 0 ? -number : number);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return (number < 0 ? "-" : "") + digits;
}

}  // namespace vtxcore
