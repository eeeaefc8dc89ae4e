#include "backends/openvino/weights.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/errors.hpp"

namespace vtxcore {
namespace {

constexpr char kOnDisk[] = "/var/tmp", kElse[] = "/tmp";

std::string temporary_folder() {
  const char* given = std::getenv("TMPDIR");
  if (given != nullptr && *given != 0) return given;
  return ::access(kOnDisk, W_OK) == 0 ? kOnDisk : kElse;
}

}  // namespace

WeightsOnDisk::WeightsOnDisk() : folder_(temporary_folder()) {
  std::string path = folder_ + "/vtx-XXXXXX";
  file_ = ::mkostemp(path.data(), O_CLOEXEC);
  if (file_ < 0) fail_with(errno);
  ::unlink(path.c_str());
}

WeightsOnDisk::~WeightsOnDisk() {
  for (auto [memory, bytes] : parts_) ::munmap(memory, bytes);
  if (file_ >= 0) ::close(file_);
}

int8_t* WeightsOnDisk::take(size_t bytes) {
  auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  parts_.reserve(parts_.size() + 1);
  // Room first: where it lacks, writing to the mapping would end the process.
  if (int error = ::posix_fallocate(file_, static_cast<off_t>(size_), static_cast<off_t>(bytes))) fail_with(error);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, static_cast<off_t>(size_));
  if (memory == MAP_FAILED) fail_with(errno);
  parts_.emplace_back(memory, bytes);
  size_ += (bytes + page - 1) / page * page;
  return static_cast<int8_t*>(memory);
}

void WeightsOnDisk::seal() {
  for (auto [memory, bytes] : parts_) ::mprotect(memory, bytes, PROT_READ);
}

void WeightsOnDisk::fail_with(int error) const {
  fail(Kind::device, folder_, " cannot take the weights in int8 (", std::strerror(error),
       "); set TMPDIR to a folder with room for a byte a weight, or leave out --compute int8");
}

}  // namespace vtxcore
