#include "base/json.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "base/utf8.hpp"
#include "nlohmann/json.hpp"

namespace vtxcore {
namespace {

constexpr size_t kMaxDepth = 64;

// Builds a value from nlohmann's events, which come without recursion, and refuses what Python's reader refuses.
class Builder {
 public:
  Builder(std::string_view text, const std::string& what, Kind kind) : text_(text), what_(what), kind_(kind) {}

  Json whole() {
    if (size_t bad = first_invalid_utf8(text_); bad != std::string_view::npos)
      fail(kind_, what_, " is not UTF-8 text (byte ", grouped(static_cast<long long>(bad)), ")");
    nlohmann::json::sax_parse(text_.begin(), text_.end(), this);
    return std::move(root_);
  }

  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(int64_t value) { return add(value); }
  bool number_unsigned(uint64_t value) {
    return value > kMostInteger ? add(static_cast<double>(value)) : add(int64_t(value));
  }
  bool number_float(double value, const std::string&) { return add(value); }
  bool string(std::string& value) { return add(std::move(value)); }
  bool binary(std::vector<std::uint8_t>&) { return false; }
  bool start_object(size_t) { return open(Json::Object()); }
  bool start_array(size_t) { return open(Json::Array()); }
  bool end_array() { return close(); }

  bool key(std::string& name) {
    open_.back().object()->emplace_back(std::move(name), Json());
    return true;
  }

  bool end_object() {
    std::vector<std::string_view> keys;
    for (const auto& [name, value] : *open_.back().object()) keys.push_back(name);
    std::sort(keys.begin(), keys.end());
    auto twice = std::adjacent_find(keys.begin(), keys.end());
    if (twice != keys.end())
      fail(kind_, what_, " is not sound JSON: '", twice->substr(0, twice->size() <= 120 ? 120 : 100), "' is duplicated");
    return close();
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& error) {
    std::string why =
        error.what();  // [name] parse error at line 1, column 2: syntax error while parsing value - reason; more
    size_t start = why.find("] ") + 2;
    if (size_t found = why.find(" - ", start); found != std::string::npos) start = found + 3;
    why = why.substr(start, why.find(';', start) - start);
    fail(kind_, what_, " is not sound JSON: ", why, " at byte ", grouped(static_cast<long long>(position)));
  }

 private:
  bool add(Json value) {
    Json* parent = open_.empty() ? nullptr : &open_.back();
    if (parent == nullptr)
      root_ = std::move(value);
    else if (parent->object() != nullptr)
      parent->object()->back().second = std::move(value);
    else
      parent->array()->push_back(std::move(value));
    return true;
  }
  bool open(Json value) {
    if (open_.size() >= kMaxDepth) fail(kind_, what_, " is nested deeper than the limit of ", kMaxDepth);
    open_.push_back(std::move(value));
    return true;
  }
  bool close() {
    Json done = std::move(open_.back());
    open_.pop_back();
    return add(std::move(done));
  }

  static constexpr uint64_t kMostInteger = std::numeric_limits<int64_t>::max();
  std::string_view text_;
  const std::string& what_;
  Kind kind_;
  std::vector<Json> open_;
  Json root_;
};

void dump_string(std::string& out, const std::string& text) {
  static constexpr char kHex[] = "0123456789abcdef";
  out += '"';
  for (char c : text) {
    auto byte = static_cast<unsigned char>(c);
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      case '\b': out += "\\b"; break;
      case '\f': out += "\\f"; break;
      default:
        if (byte >= 0x20) {
          out += c;
        } else {
          out += "\\u00";
          out += kHex[byte >> 4];
          out += kHex[byte & 15];
        }
    }
  }
  out += '"';
}

void dump_to(std::string& out, const Json& value) {
  if (value.is_null()) {
    out += "null";
  } else if (const bool* b = value.boolean()) {
    out += *b ? "true" : "false";
  } else if (const int64_t* i = value.integer()) {
    out += std::to_string(*i);
  } else if (const double* d = value.real()) {
    out += std::isnan(*d) ? "NaN" : std::isinf(*d) ? (*d > 0 ? "Infinity" : "-Infinity") : python_repr(*d);
  } else if (const std::string* s = value.string()) {
    dump_string(out, *s);
  } else if (const Json::Array* items = value.array()) {
    out += '[';
    for (size_t n = 0; n < items->size(); ++n) {
      if (n) out += ", ";
      dump_to(out, (*items)[n]);
    }
    out += ']';
  } else {
    out += '{';
    bool first = true;
    for (const auto& [key, item] : *value.object()) {
      if (!first) out += ", ";
      first = false;
      dump_string(out, key);
      out += ": ";
      dump_to(out, item);
    }
    out += '}';
  }
}

}  // namespace

Json::Value Json::copied(const Value& value) {
  return std::visit([](auto copy) { return Value(std::move(copy)); }, value);
}

const Json* Json::find(std::string_view key) const {
  const Object* members = object();
  if (members == nullptr) return nullptr;
  for (const auto& [name, value] : *members)
    if (name == key) return &value;
  return nullptr;
}

std::string Json::text(std::string_view key) const {
  const Json* found = find(key);
  return found && found->string() ? *found->string() : "";
}

bool Json::flag(std::string_view key, bool otherwise) const {
  const Json* found = find(key);
  return found && found->boolean() ? *found->boolean() : otherwise;
}

bool Json::operator==(const Json& other) const {
  const Object *mine = object(), *theirs = other.object();
  if (mine == nullptr || theirs == nullptr) return value_ == other.value_;
  if (mine->size() != theirs->size()) return false;
  return std::all_of(mine->begin(), mine->end(), [&](const auto& member) {
    const Json* found = other.find(member.first);
    return found != nullptr && *found == member.second;
  });
}

std::string Json::dump() const {
  std::string out;
  dump_to(out, *this);
  return out;
}

Json parse_json(std::string_view text, const std::string& what, Kind kind) { return Builder(text, what, kind).whole(); }

std::string python_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
  std::string_view text(buffer, static_cast<size_t>(end.ptr - buffer));
  bool negative = text.front() == '-';
  if (negative) text.remove_prefix(1);
  size_t mark = text.find('e');
  int exponent = std::atoi(std::string(text.substr(mark + 1)).c_str());
  std::string digits(1, text[0]);
  if (mark > 2) digits += text.substr(2, mark - 2);
  auto length = static_cast<int>(digits.size());
  std::string out;
  if (exponent < -4 || exponent >= 16) {
    out = digits.substr(0, 1) + (length > 1 ? "." + digits.substr(1) : "") + (exponent < 0 ? "e-" : "e+");
    std::string power = std::to_string(std::abs(exponent));
    out += (power.size() < 2 ? "0" : "") + power;
  } else if (exponent < 0) {
    out = "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  } else if (length <= exponent + 1) {
    out = digits + std::string(static_cast<size_t>(exponent + 1 - length), '0') + ".0";
  } else {
    out = digits.substr(0, static_cast<size_t>(exponent + 1)) + "." + digits.substr(static_cast<size_t>(exponent + 1));
  }
  return (negative ? "-" : "") + out;
}

}  // namespace vtxcore
