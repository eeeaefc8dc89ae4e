#include "backends/library.hpp"

#include <dlfcn.h>
#include <glob.h>
#include <sched.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <thread>

#include "base/errors.hpp"

namespace vtxcore {
namespace {

// The file itself, or in a directory the ones of these names, whatever version follows.
std::vector<std::string> files_of(const std::string& path, const std::vector<std::string>& names) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) return {path};
  std::vector<std::string> found;
  for (const std::string& name : names) {
    std::string pattern = path + "/" + name + "*";
    glob_t matches{};
    std::unique_ptr<glob_t, void (*)(glob_t*)> held(&matches, ::globfree);
    if (::glob(pattern.c_str(), 0, nullptr, &matches) == 0)
      for (size_t i = 0; i < matches.gl_pathc; ++i) found.emplace_back(matches.gl_pathv[i]);
  }
  return found.empty() ? std::vector<std::string>{path} : found;
}

}  // namespace

Library::Library(const std::string& engine, const std::string& path, const char* variable,
                 const std::vector<std::string>& names, const char* symbol) {
  if (!path.empty()) {
    for (const std::string& file : files_of(path, names))
      if (open(file, symbol)) return;
  } else {
    if (::dlsym(RTLD_DEFAULT, symbol) != nullptr) {
      handle_ = RTLD_DEFAULT;
      where_ = "the process";
      return;
    }
    const char* named = std::getenv(variable);
    std::vector<std::string> candidates = named && *named ? files_of(named, names) : names;
    for (const std::string& file : candidates)
      if (open(file, symbol)) return;
  }
  fail(Kind::device, engine, " was not found (", tried_, "); name its library with the option library or in ", variable);
}

bool Library::open(const std::string& name, const char* symbol) {
  void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr && ::dlsym(handle, symbol) != nullptr) {
    handle_ = handle;
    where_ = name;
    return true;
  }
  const char* problem = handle == nullptr ? ::dlerror() : nullptr;
  tried_ += (tried_.empty() ? "" : "; ") + (problem ? std::string(problem) : name + " has no " + symbol);
  if (handle != nullptr) ::dlclose(handle);
  return false;
}

void* Library::symbol(const char* name) const { return ::dlsym(handle_, name); }

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace vtxcore
