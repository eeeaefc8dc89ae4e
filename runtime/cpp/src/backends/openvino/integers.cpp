#include "backends/openvino/rewrites.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <openvino/opsets/opset13.hpp>
#include <optional>
#include <set>

#include "bundle/names.hpp"

namespace vtxcore::openvino {
namespace {

namespace ops = ov::opset13;
using Value = ov::Output<ov::Node>;
using NodePtr = std::shared_ptr<ov::Node>;
using ConstantPtr = std::shared_ptr<ops::Constant>;

constexpr auto kLargest = static_cast<float>(names::kLargestInteger);  // of those that stand for a hidden state
constexpr float kLeast = 1e-30F;                                       // a hidden state of zeros is divided by this

std::string kind(const NodePtr& node) { return node->get_type_info().name; }

NodePtr scalar(float value) { return ops::Constant::create(ov::element::f32, ov::Shape{}, {value}); }

// The constant that a value is, but for its shape and its type; null if it is none.
ConstantPtr constant(const Value& value) {
  NodePtr node = value.get_node_shared_ptr();
  while (std::set<std::string>{"Convert", "Reshape", "Unsqueeze"}.count(kind(node)))
    node = node->input_value(0).get_node_shared_ptr();
  return ov::as_type_ptr<ops::Constant>(node);
}

struct Quantised {
  ConstantPtr integers, scales;
};

// The constants of a matrix of `type` [out, in] that `product` is by, and of its scales; none if it is another.
std::optional<Quantised> matrix_of(ov::element::Type type, const NodePtr& product) {
  if (kind(product) != "MatMul") return std::nullopt;
  NodePtr weights = product->input_value(1).get_node_shared_ptr();
  if (kind(weights) == "Reshape") weights = weights->input_value(0).get_node_shared_ptr();
  if (kind(weights) != "Multiply") return std::nullopt;
  Quantised found{constant(weights->input_value(0)), constant(weights->input_value(1))};
  if (!found.integers || !found.scales || found.integers->get_element_type() != type) return std::nullopt;
  return found;
}

// Integers from -127 to 127 in place of hidden states [..., width], and what they are to be multiplied by.
struct Rounded {
  Value integers, scale;
};

Rounded rounded(const Value& hidden) {
  auto axis = ops::Constant::create(ov::element::i64, ov::Shape{1}, {-1});
  NodePtr largest = std::make_shared<ops::ReduceMax>(std::make_shared<ops::Abs>(hidden), axis, true);
  largest = std::make_shared<ops::Maximum>(largest, scalar(kLeast));
  auto scaled = std::make_shared<ops::Multiply>(hidden, std::make_shared<ops::Divide>(scalar(kLargest), largest));
  NodePtr low = scalar(-kLargest - 1), high = scalar(kLargest);
  auto levels = static_cast<size_t>(2 * names::kLargestInteger + 2);
  auto integers = std::make_shared<ops::FakeQuantize>(scaled, low, high, low, high, levels);
  return {integers, std::make_shared<ops::Multiply>(largest, scalar(static_cast<float>(1.0 / names::kLargestInteger)))};
}

void multiply(const NodePtr& node, const Rounded& rows) {
  auto product = ov::as_type_ptr<ops::MatMul>(node);
  auto whole = std::make_shared<ops::MatMul>(rows.integers, product->input_value(1), product->get_transpose_a(),
                                             product->get_transpose_b());
  auto exact = std::make_shared<ops::Multiply>(whole, rows.scale);
  exact->output(0).get_tensor().set_names(product->output(0).get_names());  // of a graph's output
  for (auto& end : product->output(0).get_target_inputs()) end.replace_source_output(exact->output(0));
}

int low_half(uint8_t octet) { return static_cast<int8_t>(static_cast<uint8_t>(octet << 4)) >> 4; }
int high_half(uint8_t octet) { return static_cast<int8_t>(octet) >> 4; }

// A row of int4, two an octet, the lower half first, in int8; its scale.
float in_int8(const uint8_t* octets, const float* scales, size_t blocks, size_t width, int8_t* out) {
  const size_t block = width / blocks;
  for (size_t i = 0; i < width / 2; ++i) {
    out[2 * i] = static_cast<int8_t>(low_half(octets[i]));
    out[2 * i + 1] = static_cast<int8_t>(high_half(octets[i]));
  }
  float largest = 0;
  for (size_t b = 0; b < blocks; ++b) {
    int most = 0;
    for (size_t i = b * block; i < (b + 1) * block; ++i) most = std::max(most, std::abs(static_cast<int>(out[i])));
    largest = std::max(largest, static_cast<float>(most) * scales[b]);
  }
  const float scale = largest > 0 ? largest / kLargest : 1;
  for (size_t b = 0; b < blocks; ++b) {
    const float factor = scales[b] / scale;
    for (size_t i = b * block; i < (b + 1) * block; ++i)
      out[i] = static_cast<int8_t>(std::lrint(static_cast<float>(out[i]) * factor));
  }
  return scale;
}

// The matrix [out, in] as the product of its new integers and their scales.
NodePtr in_int8(const Quantised& matrix, WeightMemory& memory) {
  const std::vector<float> scales = matrix.scales->cast_vector<float>();
  const size_t count = ov::shape_size(matrix.integers->get_shape()), rows = matrix.scales->get_shape().at(0);
  const size_t width = count / rows, blocks = scales.size() / rows;
  auto* octets = static_cast<const uint8_t*>(matrix.integers->get_data_ptr());
  int8_t* integers = memory.take(count);
  std::vector<float> wide(rows);
  for (size_t row = 0; row < rows; ++row)
    wide[row] = in_int8(octets + row * (width / 2), scales.data() + row * blocks, blocks, width, integers + row * width);
  auto made = std::make_shared<ops::Constant>(ov::Tensor(ov::element::i8, ov::Shape{rows, width}, integers));
  auto by = ops::Constant::create(ov::element::f32, ov::Shape{rows, 1}, wide);
  return std::make_shared<ops::Multiply>(std::make_shared<ops::Convert>(made, ov::element::f32), by);
}

}  // namespace

void multiply_integers(ov::Model& model) {
  std::map<Value, Rounded> known;  // several matrices multiply the same hidden states
  for (const NodePtr& product : model.get_ordered_ops()) {
    if (!matrix_of(ov::element::i8, product)) continue;
    Value hidden = product->input_value(0);
    auto found = known.find(hidden);
    if (found == known.end()) found = known.emplace(hidden, rounded(hidden)).first;
    multiply(product, found->second);
  }
  model.validate_nodes_and_infer_types();
}

void bring_to_int8(ov::Model& model, WeightMemory& memory) {
  for (const NodePtr& product : model.get_ordered_ops())
    if (auto matrix = matrix_of(ov::element::i4, product))
      product->input(1).replace_source_output(in_int8(*matrix, memory)->output(0));
  model.validate_nodes_and_infer_types();
}

}  // namespace vtxcore::openvino
