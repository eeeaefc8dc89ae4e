// Safetensors files small enough to be read whole: one hardened reader, and a writer for traces.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/tensors.hpp"

namespace vtxcore {

// A tensor's stored bits. `dtype` is the format's word, such as F32.
struct Tensor {
  std::string dtype;
  Ids shape;
  std::string bytes;

  // The values, which must be of this type.
  template <typename Value>
  std::vector<Value> values() const {
    std::vector<Value> out(bytes.size() / sizeof(Value));
    if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size() * sizeof(Value));
    return out;
  }
};

using Tensors = std::map<std::string, Tensor>;

using Metadata = std::map<std::string, std::string>;

// The tensors in a file's `content`, and its free-form metadata. Throws Error(bundle) for anything but a sound file.
Tensors unpack(const std::string& content, const std::string& name, Metadata* metadata = nullptr);

template <typename Value>
Tensor tensor_of(const char* dtype, Ids shape, const std::vector<Value>& values) {
  Tensor out{dtype, std::move(shape), std::string(values.size() * sizeof(Value), '\0')};
  if (!values.empty()) std::memcpy(out.bytes.data(), values.data(), out.bytes.size());
  return out;
}

// Positions [n, parts]; of one part [n], where the three are equal.
inline Tensor tensor_of(const Positions& positions, int64_t parts) {
  Ids flat, shape{static_cast<int64_t>(positions.size())};
  for (const Position& each : positions) flat.insert(flat.end(), each.begin(), each.begin() + parts);
  if (parts > 1) shape.push_back(parts);
  return tensor_of("I64", std::move(shape), flat);
}

// The bytes of a file that holds these tensors.
std::string pack(const Tensors& tensors, const Metadata& metadata = {});

}  // namespace vtxcore
