// What a program tells systemd of itself (sd_notify's protocol, without its library): that it is ready, and that it lives.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string>

// Sends e.g. READY=1 or WATCHDOG=1; nothing where no supervisor listens.
inline void notify(const std::string& state) {
  const char* place = std::getenv("NOTIFY_SOCKET");
  sockaddr_un address{};
  if (place == nullptr || *place == '\0') return;
  std::string path = place;
  if (path.size() >= sizeof address.sun_path) return;
  address.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), address.sun_path);
  if (path[0] == '@') address.sun_path[0] = '\0';  // an abstract socket
  int socket = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return;
  auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  (void)::sendto(socket, state.data(), state.size(), MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&address), length);
  ::close(socket);
}
