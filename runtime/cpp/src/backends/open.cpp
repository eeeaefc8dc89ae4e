#include "backends/open.hpp"

#include "backends/ort/backend.hpp"

namespace vtxcore {

std::unique_ptr<Backend> open_backend(const Bundle& bundle, const std::string& device, int threads,
                                      const std::string& library) {
  if (device == "cpu" || device == "auto") return open_ort(bundle, threads, library);
  fail(Kind::device, "device '", device.substr(0, 40), "' is not available in this libvtx; it runs on: auto, cpu");
}

}  // namespace vtxcore
