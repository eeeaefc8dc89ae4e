// The methods that Python declares (methods.inc), and the values that a spec gives to the options of one.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/tensors.hpp"
#include "policies/policy.hpp"

namespace vtxcore {

enum class OptionType { whole, number, layers, choice };

struct OptionLimits {
  double least, most;
  bool above, or_count;  // without `least`; also whole numbers of at least 2
  const char* fix;
};

struct OptionSpec {
  const char* name;
  OptionType type;
  bool optional;  // may be off
  const char* value;
  std::vector<const char*> choices;
  OptionLimits limits;
};

// Whether an option has a value, written as in a spec; with `equal` false, whether it has another.
struct Condition {
  const char *option, *value;
  bool equal;
};

// `layers`: the option that names the layers of cuts, queries or shrinks; of all others `when` they are needed.
struct NeedSpec {
  const char *need, *layers;
  std::vector<Condition> when;
};

struct Conflict {
  std::vector<Condition> values;
  const char* message;
};

struct MethodSpec {
  const char* name;
  std::vector<OptionSpec> options;
  std::vector<std::pair<const char*, const char*>> presets;
  std::vector<NeedSpec> needs;
  std::vector<Conflict> conflicts;
};

// A number in a spec: without the fraction of a whole one, and without the plus of an exponent.
std::string spec_number(double value);

// The options of one method, checked.
class MethodOptions {
 public:
  // `rest`: what follows the colon of a spec. Throws Error(request).
  MethodOptions(const MethodSpec& method, const std::string& rest);

  const char* method() const { return method_->name; }
  bool off(const char* name) const { return text(name) == "off"; }
  double number(const char* name) const { return values_.at(name).number; }
  int64_t whole(const char* name) const { return layers(name).front(); }
  const Ids& layers(const char* name) const { return values_.at(name).wholes; }
  const std::string& text(const char* name) const { return values_.at(name).text; }
  std::string spec() const;  // canonical, every option spelled out
  Needs needs() const;

 private:
  struct Value {
    std::string text;
    double number = 0;
    Ids wholes;
  };
  static Value read(const OptionSpec& option, const std::string& text, const std::string& where);
  void check() const;
  bool all_of(const std::vector<Condition>& conditions) const;

  const MethodSpec* method_;
  std::map<std::string, Value> values_;
};

// A method that Python declares; its name, spec and needs are those of its options.
class Reduction : public Method {
 public:
  explicit Reduction(MethodOptions options) : options_(std::move(options)), needs_(options_.needs()) {}
  std::string name() const final { return options_.method(); }
  std::string spec() const final { return options_.spec(); }
  Needs needs() const final { return needs_; }

 protected:
  const MethodOptions options_;

 private:
  const Needs needs_;
};

// A reduction that works on an image before it enters the decoder.
class EntryReduction : public Reduction, public Entry, public std::enable_shared_from_this<EntryReduction> {
 public:
  using Reduction::Reduction;
  std::string key() const final { return spec(); }
  std::shared_ptr<const Entry> entry() const override { return shared_from_this(); }
};

// The methods that libvtx computes, by name: each file in methods/ adds its own by a `Registered` at namespace scope.
using MakeMethod = MethodPtr (*)(MethodOptions);
std::map<std::string, MakeMethod>& method_register();

template <typename Kind>
struct Registered {
  explicit Registered(const char* name) {
    method_register()[name] = [](MethodOptions options) -> MethodPtr { return std::make_shared<Kind>(std::move(options)); };
  }
};

}  // namespace vtxcore
