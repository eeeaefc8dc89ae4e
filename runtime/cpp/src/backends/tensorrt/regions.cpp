#include "backends/tensorrt/regions.hpp"

#include <algorithm>
#include <stdexcept>

namespace vtxcore {

KVLayout::KVLayout(const ModelSpec& model, const StageSpec& spec, int64_t number_bytes) {
  for (int64_t layer : spec.cached) {
    auto row = static_cast<size_t>(model.kv_heads * model.heads_of(layer) * number_bytes);
    auto found = std::find_if(layers_.begin(), layers_.end(), [row](const auto& each) { return each.first == row; });
    if (found == layers_.end()) found = layers_.insert(layers_.end(), {row, Ids()});
    found->second.push_back(layer);
  }
}

Regions KVLayout::regions(uint8_t* address, size_t slots, bool packed) const {
  Regions out;
  for (const auto& [row, layers] : layers_) {
    out.push_back({layers, row, address, packed ? slots * row : aligned(slots * row)});
    address = out.back().end();
  }
  return out;
}

size_t KVLayout::bytes(size_t slots, bool packed) const {
  size_t total = 0;
  for (const auto& [row, layers] : layers_) total += 2 * layers.size() * (packed ? slots * row : aligned(slots * row));
  return total;
}

bool KVLayout::written_in_place() const {
  return std::all_of(layers_.begin(), layers_.end(), [](const auto& each) { return each.first % kAlignment == 0; });
}

Regions from_slot(Regions regions, int64_t slot) {
  for (Region& region : regions) region.address += static_cast<size_t>(slot) * region.row;
  return regions;
}

uint8_t* part_of(const Regions& regions, int64_t layer, bool values) {
  for (const Region& region : regions) {
    auto found = std::find(region.layers.begin(), region.layers.end(), layer) - region.layers.begin();
    auto number = static_cast<size_t>(found);
    if (number < region.layers.size()) return region.address + (2 * number + (values ? 1 : 0)) * region.pitch;
  }
  throw std::logic_error("a layer that keeps no K and V in this stage");
}

void copy_slots(Cuda& cuda, const Regions& to, const Regions& from, size_t slots) {
  for (size_t i = 0; i < to.size(); ++i)
    cuda.copy_rows(to[i].address, to[i].pitch, from[i].address, from[i].pitch, slots * to[i].row, to[i].parts());
}

}  // namespace vtxcore
