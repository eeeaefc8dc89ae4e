// The one way to open a file of a bundle, which nobody vouches for.
//
// A link is followed only while it stays inside the folder, and only once: the file behind it is opened from the folder
// downwards without following anything. Pipes, devices and directories are never waited for or read.
#pragma once

#include <cstdint>
#include <string>

#include "base/errors.hpp"

namespace vtxcore {

inline constexpr char kCopyAgain[] = "copy the bundle again, or export it again";

// What tells a file from another one of the same name, and from itself before it was written to.
struct Identity {
  uint64_t device = 0, inode = 0;
  int64_t size = 0, mtime_ns = 0;
  bool operator==(const Identity& o) const {
    return device == o.device && inode == o.inode && size == o.size && mtime_ns == o.mtime_ns;
  }
};

// An open regular file; closed with the object.
class File {
 public:
  File(int descriptor, std::string name, Kind kind);
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();
  const Identity& identity() const { return identity_; }
  int descriptor() const { return descriptor_; }  // closed with the object
  int64_t size() const { return identity_.size; }
  std::string read_all();
  std::string sha256();

 private:
  size_t read_some(char* into, size_t most);

  int descriptor_;
  std::string name_;
  Kind kind_;
  Identity identity_;
};

// A bundle's directory. Throws Error(bundle).
class Folder {
 public:
  explicit Folder(std::string path) : path_(std::move(path)) {}
  const std::string& path() const { return path_; }
  // Whether anything is there by that name, a dangling link included.
  bool exists(const std::string& name) const;
  // `limit`: the most bytes, negative for any number. Without `links` no link is followed at all.
  File open(const std::string& name, int64_t limit = -1, bool links = true) const;
  std::string read(const std::string& name, int64_t limit, bool links = true) const;

 private:
  int descriptor(const std::string& name, bool links) const;
  std::string path_;
};

// A regular file that the user named, wherever it lies, of at most `limit` bytes. Throws Error of `kind`.
std::string read_named(const std::string& path, int64_t limit, Kind kind);

}  // namespace vtxcore
