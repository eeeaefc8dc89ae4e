#include "backends/loading.hpp"

#include <dlfcn.h>
#include <glob.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <memory>
#include <numeric>
#include <system_error>
#include <thread>

#include "base/errors.hpp"
#include "bundle/names.hpp"

namespace vtxcore {
namespace {

constexpr double kSpare = 2;  // times what a bundle needs

// Bytes in memory of a byte of weights on disk, at most: floats may be widened to float32, and int4 held in int8, too.
double growth(const std::string& precision, const std::string& compute) {
  if (precision == "fp16" || precision == "bf16") return compute == "bf16" ? 1 : 2;
  if (precision == "int4") return compute == "int8" ? 3 : 1.5;
  return precision == "int8" ? 1.5 : 1;
}

}  // namespace

std::optional<int64_t> available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  int64_t count = 0;
  while (file >> word)
    if (word == "MemAvailable:" && file >> count) return count * 1024;
  return std::nullopt;
}

std::string size_text(int64_t count) {
  static const char* const kUnits[] = {"kB", "MB", "GB", "TB"};
  if (count < 1000) return std::to_string(count) + " B";
  auto power = std::min<size_t>(4, (std::to_string(count).size() - 1) / 3);
  char text[40];
  std::snprintf(text, sizeof text, "%.3g %s", static_cast<double>(count) / std::pow(1000.0, static_cast<double>(power)),
                kUnits[power - 1]);
  return text;
}

std::string memory_in_words() {
  std::string words;
  if (std::optional<int64_t> free = available_memory()) words = size_text(*free) + " free";
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    if (!words.empty()) words += ", ";
    words += "limit of this process " + size_text(static_cast<int64_t>(limit.rlim_cur));
  }
  return words.empty() ? "free memory unknown" : words;
}

bool is_roomy(const Manifest& m, const std::string& compute) {
  int64_t bytes = 0;
  for (const auto& [name, file] : m.files) bytes += file.bytes;
  if (bytes <= names::kQuickBytes) return true;
  std::optional<int64_t> free = available_memory();
  return free && static_cast<double>(*free) >= kSpare * growth(m.precision, compute) * static_cast<double>(bytes);
}

void Loads::add(int64_t size, std::function<void()> load) {
  sizes.push_back(size);
  work.push_back(std::move(load));
}

// Throws what the first of them, the largest first, threw; the others have ended by then.
void Loads::run(int threads) {
  std::vector<size_t> order(work.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::atomic<size_t> next{0};
  std::vector<std::exception_ptr> problems(work.size());
  auto take = [&] {
    for (size_t i = next++; i < order.size(); i = next++) {
      try {
        work[order[i]]();
      } catch (...) {
        problems[i] = std::current_exception();
      }
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(work.size());
  try {
    for (size_t i = 1; i < work.size() && static_cast<int>(i) < threads; ++i) helpers.emplace_back(take);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): neither threads nor memory for more; these do all of it
  }
  take();
  for (std::thread& helper : helpers) helper.join();
  for (const std::exception_ptr& problem : problems)
    if (problem) std::rethrow_exception(problem);
}

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

// Whether what the process has at this address is of another library than one of these names: TensorRT and TensorRT-RTX have
// the same symbols. What is linked into a program has its name.
bool of_another_library(void* address, const std::vector<std::string>& names) {
  Dl_info info;
  if (::dladdr(address, &info) == 0 || info.dli_fname == nullptr) return false;
  std::string path = info.dli_fname, file = path.substr(path.rfind('/') + 1);
  if (file.compare(0, 3, "lib") != 0 || file.find(".so") == std::string::npos) return false;
  return std::none_of(names.begin(), names.end(), [&](const std::string& name) {
    size_t stem = name.find('.');
    return file.compare(0, stem, name, 0, stem) == 0 && (file[stem] == '.' || file[stem] == '-');
  });
}

}  // namespace

Library::Library(const std::string& engine, const std::string& path, const char* variable,
                 const std::vector<std::string>& names, const char* symbol) {
  if (!path.empty()) {
    for (const std::string& file : files_of(path, names))
      if (open(file, symbol)) return;
  } else {
    if (void* found = ::dlsym(RTLD_DEFAULT, symbol); found != nullptr && !of_another_library(found, names)) {
      handle_ = RTLD_DEFAULT;
      where_ = "the process";
      return;
    }
    const char* named = std::getenv(variable);
    std::vector<std::string> candidates = named && *named ? files_of(named, names) : names;
    for (const std::string& file : candidates)
      if (open(file, symbol)) return;
  }
  not_found(engine, tried_, cat("with the option library or in ", variable));
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

void plugin_failure(const std::string& plugin, const std::string& reason, const std::string& engine) {
  fail(Kind::device, "the plug-in ", plugin, " cannot be loaded (", reason, "); build libvtx where CMake finds ", engine,
       ", or use device cpu");
}

std::string own_directory() {
  Dl_info info;
  static const int here = 0;
  if (::dladdr(&here, &info) == 0 || info.dli_fname == nullptr) return ".";
  std::string file = info.dli_fname;
  size_t slash = file.rfind('/');
  return slash == std::string::npos ? "." : file.substr(0, slash);
}

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int threads_of(int wanted) { return wanted > 0 ? std::min(wanted, cores()) : cores(); }

}  // namespace vtxcore
