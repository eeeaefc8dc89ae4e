#include "backends/engines.hpp"

#include "backends/openvino/backend.hpp"
#include "backends/ort/backend.hpp"
#include "backends/tensorrt/backend.hpp"

namespace vtxcore {

const std::vector<Engine>& engines() {
  static const std::vector<Engine> kEngines{
      ort_engine(),
      openvino_engine(),
      tensorrt_engine(),
  };
  return kEngines;
}

int loading_threads(const Manifest& m, int threads) {
  int64_t bytes = 0;
  for (const auto& [name, file] : m.files) bytes += file.bytes;
  return bytes <= names::kQuickBytes ? threads : 1;
}

}  // namespace vtxcore
