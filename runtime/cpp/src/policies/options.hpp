// The options of a method as its spec gives them, `key=value`: each is asked for once by name and type.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/tensors.hpp"

namespace vtxcore {

class SpecOptions {
 public:
  // `rest`: what follows the colon; `presets`: sets of options by name, written as they would be in a spec.
  SpecOptions(std::string method, const std::string& rest, const std::map<std::string, std::string>& presets);

  double number(const char* key, double otherwise);
  std::optional<double> number_or_off(const char* key, std::optional<double> otherwise);
  int64_t whole(const char* key, int64_t otherwise);
  Ids wholes(const char* key, Ids otherwise);
  std::string one_of(const char* key, const std::vector<std::string>& values);  // the first is the default
  // Throws Error(request) for an option that was not asked for.
  void done() const;

  const std::string& method() const { return method_; }

 private:
  std::optional<std::string> take(const char* key);
  std::string method_;
  std::map<std::string, std::string> given_;
  std::vector<std::string> known_;
};

// A number in a spec: without the fraction of a whole one, and without the plus of an exponent.
std::string spec_number(double value);

}  // namespace vtxcore
