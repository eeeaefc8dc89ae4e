#include "bundle/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "bundle/sha256.hpp"

namespace vtxcore {
namespace {

constexpr size_t kBlock = size_t{1} << 20;

std::string resolved(const std::string& path) {
  std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr), &std::free);
  return real ? std::string(real.get()) : std::string();
}

std::vector<std::string> parts_of(const std::string& path) {
  std::vector<std::string> parts;
  size_t start = 0;
  while (start <= path.size()) {
    size_t end = std::min(path.find('/', start), path.size());
    if (end > start && path.substr(start, end - start) != ".") parts.push_back(path.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

// Opens root/parts following no link below `root`; -1 and errno where that fails.
int open_below(const std::string& root, const std::vector<std::string>& parts) {
  if (parts.empty()) {
    errno = EISDIR;
    return -1;
  }
  int folder = ::open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  for (size_t i = 0; folder >= 0 && i < parts.size(); ++i) {
    bool last = i + 1 == parts.size();
    int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | (last ? O_NONBLOCK : O_DIRECTORY);
    int inner = ::openat(folder, parts[i].c_str(), flags);
    int problem = errno;
    ::close(folder);
    errno = problem;
    folder = inner;
  }
  return folder;
}

}  // namespace

File::File(int descriptor, std::string name, Kind kind) : descriptor_(descriptor), name_(std::move(name)), kind_(kind) {
  struct stat status;
  bool known = ::fstat(descriptor_, &status) == 0;
  if (!known || !S_ISREG(status.st_mode)) {
    bool directory = known && S_ISDIR(status.st_mode);
    ::close(descriptor_);
    fail(kind_, name_, " is ", directory ? "a directory" : "a device or a pipe", ", a regular file is needed");
  }
  identity_ = {static_cast<uint64_t>(status.st_dev), static_cast<uint64_t>(status.st_ino), status.st_size,
               int64_t{status.st_mtim.tv_sec} * 1000000000 + status.st_mtim.tv_nsec};
}

File::File(File&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), name_(std::move(other.name_)), kind_(other.kind_),
      identity_(other.identity_) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

size_t File::read_some(char* into, size_t most) {
  while (true) {
    ssize_t count = ::read(descriptor_, into, most);
    if (count >= 0) return static_cast<size_t>(count);
    if (errno != EINTR) fail(kind_, name_, " cannot be read (", std::strerror(errno), "); check the disk");
  }
}

std::string File::read_all() {
  std::string content(static_cast<size_t>(size()), '\0');
  size_t done = 0;
  while (done < content.size()) {
    size_t count = read_some(content.data() + done, content.size() - done);
    if (count == 0)
      fail(kind_, name_, " shrank from ", grouped(size()), " to ", grouped(static_cast<long long>(done)),
           " bytes while it was read; try again");
    done += count;
  }
  return content;
}

std::string File::sha256() {
  Sha256 hash;
  std::vector<char> block(kBlock);
  ::lseek(descriptor_, 0, SEEK_SET);
  while (size_t count = read_some(block.data(), block.size())) hash.update(block.data(), count);
  ::lseek(descriptor_, 0, SEEK_SET);
  return hash.hex();
}

bool Folder::exists(const std::string& name) const {
  struct stat status;
  return ::lstat((path_ + "/" + name).c_str(), &status) == 0;
}

int Folder::descriptor(const std::string& name, bool links) const {
  std::string root = resolved(path_);
  if (root.empty()) return -1;
  if (!links) return open_below(root, parts_of(name));
  std::string target = resolved(path_ + "/" + name);
  if (target.empty()) return -1;
  std::string inside = root == "/" ? root : root + "/";
  if (target.compare(0, inside.size(), inside) != 0)
    fail(Kind::bundle, name, " is a link that leaves the bundle, to ", target,
         "; if you trust it, use a copy of the bundle with files in place of links: cp -rL ", path_, " COPY");
  return open_below(root, parts_of(target.substr(inside.size())));
}

File Folder::open(const std::string& name, int64_t limit, bool links) const {
  errno = 0;
  int found = name.find('\0') == std::string::npos ? descriptor(name, links) : -1;
  if (found < 0) {
    int problem = errno;
    if (problem == ENOENT && !exists(name))
      fail(Kind::bundle, name, " is missing from the bundle ", path_, "; ", kCopyAgain);
    fail(Kind::bundle, name, " cannot be read (", std::strerror(problem), "); ", kCopyAgain);
  }
  File file(found, name, Kind::bundle);
  if (limit >= 0 && file.size() > limit)
    fail(Kind::bundle, name, " holds ", grouped(file.size()), " bytes, the limit for such a file is ", grouped(limit));
  return file;
}

std::string Folder::read(const std::string& name, int64_t limit, bool links) const {
  return open(name, limit, links).read_all();
}

std::string read_named(const std::string& path, int64_t limit, Kind kind) {
  int found = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (found < 0) fail(kind, "cannot read ", path, ": ", std::strerror(errno), "; check the path");
  File file(found, path, kind);
  if (file.size() > limit)
    fail(kind, path, " holds ", grouped(file.size()), " bytes, the limit for such a file is ", grouped(limit));
  return file.read_all();
}

}  // namespace vtxcore
