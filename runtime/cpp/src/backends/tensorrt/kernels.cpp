#include "backends/tensorrt/kernels.hpp"

#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "bundle/fingerprint.hpp"

namespace vtxcore {

KernelCache::KernelCache(const Bundle& bundle, const std::string& target, tensorrt::Runtime& runtime) : runtime_(runtime) {
  if (bundle.key() || !runtime.compiles()) return;
  std::string name = cat(kEngineFolder, "/", target, "/", names::kKernels);
  directory_ = cat(bundle.folder(), "/", kEngineFolder, "/", target);
  Folder folder(bundle.folder());
  if (!folder.exists(name)) return;
  try {
    saved_ = folder.read(name, names::kMaxKernels);
  } catch (const Error&) {
    return;  // kernels are compiled anew, and written over it
  }
  runtime.set_kernels(saved_.data(), saved_.size());
}

KernelCache::~KernelCache() {
  try {
    save();
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory to keep them, so they are compiled again
  }
}

// Under another name first, so that no process reads half of it.
void KernelCache::save() {
  if (directory_.empty()) return;
  size_t bytes = 0;
  const void* content = runtime_.kernels(&bytes);
  if (content == nullptr || bytes == 0 || bytes > static_cast<size_t>(names::kMaxKernels)) return;
  std::string kernels(static_cast<const char*>(content), bytes);
  if (kernels == saved_) return;
  std::string path = cat(directory_, "/", names::kKernels), hidden = cat(directory_, "/.", names::kKernels, ".", ::getpid());
  std::ofstream file(hidden, std::ios::binary);
  file.write(kernels.data(), static_cast<std::streamsize>(kernels.size()));
  file.close();
  if (!file || std::rename(hidden.c_str(), path.c_str()) != 0) ::unlink(hidden.c_str());
}

}  // namespace vtxcore
