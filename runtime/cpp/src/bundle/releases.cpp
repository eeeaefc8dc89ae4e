#include "bundle/releases.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <system_error>

#include "base/errors.hpp"
#include "bundle/sha256.hpp"

namespace vtxcore {
namespace {

namespace fs = std::filesystem;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

fs::path of_key(const PublicKey& key) {
  fs::path state = variable("VTX_STATE");
  if (state.empty()) {
    std::string given = variable("XDG_STATE_HOME");
    state = (given.empty() ? fs::path(variable("HOME")) / ".local" / "state" : fs::path(given)) / "vtx";
  }
  return state / "releases" / key.fingerprint();
}

fs::path of_name(const PublicKey& key, const std::string& name) { return of_key(key) / sha256_hex(name).substr(0, 32); }

// This day in UTC, as YYYY-MM-DD.
std::string today() {
  std::time_t now = std::time(nullptr);
  std::tm utc{};
  char text[11] = "";
  gmtime_r(&now, &utc);
  std::strftime(text, sizeof text, "%Y-%m-%d", &utc);
  return text;
}

// The highest number among the files of a directory, 0 if there is none.
int64_t newest(const fs::path& folder) {
  int64_t found = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    std::string name = entry.path().filename().string();
    bool number = !name.empty() && name.size() < 17 && name.find_first_not_of("0123456789") == std::string::npos;
    if (number) found = std::max<int64_t>(found, std::stoll(name));
  }
  return found;
}

}  // namespace

void check_release(const std::optional<BundleRelease>& release, const PublicKey& key, const std::string& folder) {
  if (std::string now = today(); release && !release->until.empty() && now > release->until)
    fail(Kind::bundle, "the bundle ", folder, " may be used until ", release->until, ", and this device's clock says ", now,
         " (UTC); use a newer bundle, or set the clock");
  fs::path noted = release ? of_name(key, release->name) : of_key(key);
  try {
    if (!fs::exists(noted)) return;
    if (!release) {
      if (fs::is_empty(noted)) return;
      fail(Kind::bundle, "the bundle ", folder, " has no release number, and this device has answered with bundles of ",
           key.name(), " that have one; export it with --release, or remove ", noted.string());
    }
    int64_t seen = newest(noted);
    if (release->number < seen)
      fail(Kind::bundle, "the bundle ", folder, " is release ", release->number, " of ", release->name,
           ", and this device has answered with release ", seen, "; use a newer bundle, or remove ", noted.string(),
           " to go back");
  } catch (const fs::filesystem_error& e) {
    fail(Kind::device, "the releases in ", noted.string(), " cannot be read (", e.code().message(), "); set VTX_STATE");
  }
}

void note_release(const BundleRelease& release, const PublicKey& key) {
  fs::path folder = of_name(key, release.name), file = folder / std::to_string(release.number);
  try {
    fs::create_directories(folder);
    int64_t before = newest(folder);
    if (before >= release.number) return;
    int made = ::open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (made < 0 || ::fsync(made) != 0) {
      int number = errno;
      if (made >= 0) ::close(made);
      throw fs::filesystem_error("", std::error_code(number, std::generic_category()));
    }
    ::close(made);
    std::error_code ignored;
    fs::remove(folder / std::to_string(before), ignored);
  } catch (const fs::filesystem_error& e) {
    fail(Kind::device, "release ", release.number, " of ", release.name, " cannot be noted in ", folder.string(), " (",
         e.code().message(), "); set VTX_STATE to a directory that this user may write to");
  }
}

}  // namespace vtxcore
