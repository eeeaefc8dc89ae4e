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

}  // namespace vtxcore
