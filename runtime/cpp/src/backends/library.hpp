// Engines are found when a bundle is loaded: none is linked.
#pragma once

#include <string>
#include <vector>

namespace vtxcore {

// A shared library, loaded for as long as the process runs: engines do not survive being unloaded.
class Library {
 public:
  // `path`: a file or a directory that the application names, empty for the search: what the process has already
  // loaded, then the variable `variable` of the environment, then `names` where the system looks. `symbol` must be
  // there. Throws Error(device), saying where it looked.
  Library(const std::string& engine, const std::string& path, const char* variable, const std::vector<std::string>& names,
          const char* symbol);

  void* symbol(const char* name) const;  // null where there is none
  const std::string& where() const { return where_; }

 private:
  bool open(const std::string& name, const char* symbol);
  void* handle_ = nullptr;
  std::string where_, tried_;
};

// Cores that this process may use, which in a container are fewer than the machine has.
int cores();

}  // namespace vtxcore
