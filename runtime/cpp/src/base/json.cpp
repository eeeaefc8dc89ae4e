#include "base/json.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "base/utf8.hpp"

namespace vtxcore {
namespace {

constexpr int kMaxDepth = 64;

class Parser {
 public:
  Parser(std::string_view text, const std::string& what, Kind kind) : text_(text), what_(what), kind_(kind) {}

  Json whole() {
    if (size_t bad = first_invalid_utf8(text_); bad != std::string_view::npos)
      fail(kind_, what_, " is not UTF-8 text (byte ", grouped(static_cast<long long>(bad)), ")");
    Json value = parse(0);
    skip_space();
    if (at_ != text_.size()) unsound("something follows its end");
    return value;
  }

 private:
  [[noreturn]] void unsound(const std::string& why) {
    fail(kind_, what_, " is not sound JSON: ", why, " at byte ", grouped(static_cast<long long>(at_)));
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t'))
      ++at_;
  }

  bool take(char wanted) {
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json parse(int depth) {
    if (depth > kMaxDepth) fail(kind_, what_, " is nested deeper than the limit of ", kMaxDepth);
    skip_space();
    if (take('{')) return object(depth);
    if (take('[')) return array(depth);
    if (take('"')) return string();
    if (take_word("true")) return true;
    if (take_word("false")) return false;
    if (take_word("null")) return nullptr;
    return number();
  }

  Json object(int depth) {
    Json::Object members;
    skip_space();
    if (take('}')) return members;
    do {
      skip_space();
      if (!take('"')) unsound("a key is missing");
      std::string key = string();
      skip_space();
      if (!take(':')) unsound("a colon is missing");
      Json value = parse(depth + 1);
      members.emplace_back(std::move(key), std::move(value));
      skip_space();
    } while (take(','));
    if (!take('}')) unsound("an object does not end");
    check_unique(members);
    return members;
  }

  void check_unique(const Json::Object& members) {
    std::vector<std::string_view> keys;
    keys.reserve(members.size());
    for (const auto& [key, value] : members) keys.push_back(key);
    std::sort(keys.begin(), keys.end());
    auto twice = std::adjacent_find(keys.begin(), keys.end());
    if (twice != keys.end()) fail(kind_, what_, " is not sound JSON: '", shown(*twice), "' is duplicated");
  }

  Json array(int depth) {
    Json::Array items;
    skip_space();
    if (take(']')) return items;
    do {
      items.push_back(parse(depth + 1));
      skip_space();
    } while (take(','));
    if (!take(']')) unsound("a list does not end");
    return items;
  }

  uint32_t hex4() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      char c = at_ < text_.size() ? text_[at_] : '\0';
      uint32_t digit = c >= '0' && c <= '9'   ? static_cast<uint32_t>(c - '0')
                       : c >= 'a' && c <= 'f' ? static_cast<uint32_t>(c - 'a' + 10)
                       : c >= 'A' && c <= 'F' ? static_cast<uint32_t>(c - 'A' + 10)
                                              : 16;
      if (digit == 16) unsound("an escape is no hexadecimal number");
      value = 16 * value + digit;
    }
    return value;
  }

  void escape(std::string& out) {
    char c = at_ < text_.size() ? text_[at_++] : '\0';
    static constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
    if (size_t index = kFrom.find(c); c != '\0' && index != std::string_view::npos) {
      out += kTo[index];
      return;
    }
    if (c != 'u') unsound("an unknown escape");
    uint32_t code = hex4();
    if (code >= 0xD800 && code < 0xDC00 && take_word("\\u")) {
      uint32_t low = hex4();
      if (low < 0xDC00 || low > 0xDFFF) unsound("half of a surrogate pair");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else if (code >= 0xD800 && code <= 0xDFFF) {
      unsound("half of a surrogate pair");
    }
    append_utf8(out, code);
  }

  std::string string() {
    std::string out;
    while (true) {
      size_t start = at_;
      while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\' && static_cast<unsigned char>(text_[at_]) >= 0x20)
        ++at_;
      out.append(text_.substr(start, at_ - start));
      if (take('"')) return out;
      if (!take('\\')) unsound(at_ < text_.size() ? "a control character in a string" : "a string does not end");
      escape(out);
    }
  }

  size_t digits() {
    size_t start = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    return at_ - start;
  }

  Json number() {
    size_t start = at_;
    take('-');
    size_t first = at_;
    size_t whole = digits();
    if (whole == 0 || (whole > 1 && text_[first] == '0')) unsound("not a value");
    bool real = false;
    if (take('.')) {
      real = true;
      if (digits() == 0) unsound("not a number");
    }
    if (take('e') || take('E')) {
      real = true;
      if (!take('+')) take('-');
      if (digits() == 0) unsound("not a number");
    }
    std::string_view found = text_.substr(start, at_ - start);
    if (!real) {
      int64_t integer = 0;
      auto end = std::from_chars(found.data(), found.data() + found.size(), integer);
      if (end.ec == std::errc()) return integer;
    }
    double value = 0;
    auto end = std::from_chars(found.data(), found.data() + found.size(), value);
    if (end.ec == std::errc::result_out_of_range) value = std::strtod(std::string(found).c_str(), nullptr);
    return value;
  }

  static std::string shown(std::string_view name) { return std::string(name.size() <= 120 ? name : name.substr(0, 100)); }

  std::string_view text_;
  const std::string& what_;
  Kind kind_;
  size_t at_ = 0;
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

Json parse_json(std::string_view text, const std::string& what, Kind kind) { return Parser(text, what, kind).whole(); }

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
