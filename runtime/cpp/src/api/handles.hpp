// What the C ABI hands out: numbers instead of addresses. None is given twice, so that one which was freed, or is of
// another kind, is told from one that lives; and what is freed while a call uses it lives until that call returns.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace vtxcore {

inline std::uintptr_t next_handle() noexcept {
  static std::atomic<std::uintptr_t> last{0};
  return ++last;
}

// The living objects of one kind. May be used from any thread.
template <typename Object>
class Handles {
 public:
  // Never destroyed: a program may free its handles while it ends.
  static Handles& all() {
    static auto* handles = new Handles;
    return *handles;
  }

  Object* add(std::shared_ptr<Object> object) {
    auto* handle = reinterpret_cast<Object*>(next_handle());  // NOLINT(performance-no-int-to-ptr): never followed
    std::lock_guard<std::mutex> lock(mutex_);
    objects_.emplace(handle, std::move(object));
    return handle;
  }

  // Null if there is none.
  std::shared_ptr<Object> find(const Object* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  // The same, and it lives no longer than what is returned and the calls that use it.
  std::shared_ptr<Object> take(const Object* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const Object*, std::shared_ptr<Object>> objects_;
};

}  // namespace vtxcore
