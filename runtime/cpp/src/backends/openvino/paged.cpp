#include "backends/openvino/rewrites.hpp"

#include <openvino/opsets/opset13.hpp>
#include <openvino/pass/sdpa_to_paged_attention.hpp>

#include <map>
#include <set>

#include "bundle/names.hpp"

namespace vtxcore::openvino {
namespace {

namespace ops = ov::opset13;
using Value = ov::Output<ov::Node>;
using NodePtr = std::shared_ptr<ov::Node>;

constexpr char kFix[] = "; export the bundle again";
// Inputs of the operator by their number: three tensors of rows, two caches, four places, the scale, the window, and
constexpr size_t kScaleInput = 9, kWindowInput = 10, kFilledInput = 12, kImagesInput = 25;

Value constant(const std::vector<int64_t>& values) {
  return ops::Constant::create(ov::element::i64, ov::Shape{values.size()}, values);
}

std::shared_ptr<ops::Parameter> parameter(const std::string& name, const ov::PartialShape& shape, ov::element::Type type) {
  auto made = std::make_shared<ops::Parameter>(type, shape);
  made->set_friendly_name(name);
  made->output(0).set_names({name});
  return made;
}

// A cache as models of language keep theirs: what was there before, chosen by `beam`, and the new rows behind it.
std::pair<Value, std::shared_ptr<ops::Assign>> stateful(const char* name, const Value& rows, const Value& beam) {
  auto info = ov::op::util::VariableInfo{ov::PartialShape{-1, 1, -1, 1}, ov::element::f32, name};
  auto variable = std::make_shared<ov::op::util::Variable>(info);
  auto empty = ops::Constant::create(ov::element::f32, ov::Shape{1, 1, 0, 1}, std::vector<float>{});
  auto before = std::make_shared<ops::ReadValue>(empty, variable);
  auto axis = ops::Constant::create(ov::element::i64, ov::Shape{}, {0});
  auto chosen = std::make_shared<ops::Gather>(before, beam, axis);
  auto grown = std::make_shared<ops::Concat>(ov::OutputVector{chosen, rows}, 2);
  return {grown, std::make_shared<ops::Assign>(grown, variable)};
}

// An operator of this release's own making, with all of its inputs: whatever it can do besides is not used. Its class is
// not among OpenVINO's public headers, but the pass that makes it is, so one is made from a model of one layer.
NodePtr make_template() {
  auto embeds = parameter("inputs_embeds", {-1, -1, 1}, ov::element::f32);
  auto mask = parameter("attention_mask", {-1, -1}, ov::element::f32);
  auto positions = parameter("position_ids", {-1, -1}, ov::element::i64);
  auto beam = parameter("beam_idx", {-1}, ov::element::i32);
  auto heads = std::make_shared<ops::Unsqueeze>(embeds, constant({1}));  // [batch, 1, tokens, 1]
  auto [keys, keep_keys] = stateful("k", heads, beam);
  auto [values, keep_values] = stateful("v", heads, beam);
  auto bias = std::make_shared<ops::Unsqueeze>(mask, constant({1, 2}));
  auto attention = std::make_shared<ops::ScaledDotProductAttention>(heads, keys, values, bias, false);
  auto model = std::make_shared<ov::Model>(ov::ResultVector{std::make_shared<ops::Result>(attention)},
                                           ov::SinkVector{keep_keys, keep_values},
                                           ov::ParameterVector{embeds, mask, positions, beam});
  ov::pass::SDPAToPagedAttention().run_on_model(model);
  for (const NodePtr& node : model->get_ordered_ops())
    if (std::string(node->get_type_info().name) == "PagedAttentionExtension" && node->get_input_size() > kFilledInput)
      return node;
  throw std::runtime_error("this release of OpenVINO cannot attend over blocks; take a newer one");
}

// The two inputs of the operator that gives `value`, which must be of this kind.
std::pair<Value, Value> inputs(const Value& value, const std::string& kind) {
  const ov::Node* node = value.get_node();
  if (node->get_type_info().name != kind || node->get_input_size() < 2)
    throw std::runtime_error(std::string("a ") + node->get_type_info().name + " stands where attention has its " + kind +
                             kFix);
  return {node->input_value(0), node->input_value(1)};
}

// The only operator that reads an attention, or what was made of it.
NodePtr only_reader(const Value& value) {
  auto readers = value.get_target_inputs();
  if (readers.size() != 1)
    throw std::runtime_error(std::to_string(readers.size()) + " operators read a layer's attention" + kFix);
  return readers.begin()->get_node()->shared_from_this();
}

bool is_one_of(const NodePtr& node, const std::set<std::string>& kinds) {
  return kinds.count(node->get_type_info().name) > 0;
}

// The reader of a value; of a norm, which reads it for its size too, the division by the size.
NodePtr reader_or_norm(const Value& value) {
  std::vector<NodePtr> divisions;
  for (const auto& reader : value.get_target_inputs()) {
    NodePtr node = reader.get_node()->shared_from_this();
    if (is_one_of(node, {"Divide"})) divisions.push_back(node);
  }
  return divisions.size() == 1 ? divisions.front() : only_reader(value);
}

[[noreturn]] void refuse(const NodePtr& node) {
  throw std::runtime_error(std::string("a ") + node->get_type_info().name + " stands behind a layer's attention" + kFix);
}

// Lets an input [tokens, width] read `rows` of what it read.
void gather(ov::Input<ov::Node> reader, const Value& rows) {
  auto first_axis = ops::Constant::create(ov::element::i32, ov::Shape{}, {0});
  reader.replace_source_output(std::make_shared<ops::Gather>(reader.get_source_output(), rows, first_axis));
}

// Whether a value is an input of tokens beside their hidden states, in the arithmetic's type too.
bool is_token_input(Value value) {
  if (is_one_of(value.get_node_shared_ptr(), {"Convert"})) value = value.get_node()->input_value(0);
  const auto& called = value.get_names();
  return std::any_of(called.begin(), called.end(),
                     [](const std::string& name) { return name.rfind(names::kTokenInput, 0) == 0; });
}

class Pager {
 public:
  Pager(ov::Model& model, int64_t heads)
      : model_(model), heads_(heads), template_(make_template()), begins_(say(names::kPagedBegins, {2})), of_all_(say_slots("")) {}

  // Has inputs for windows, and for tokens that see each other both ways.
  void add_windows() {
    window_ = say(names::kPagedWindow, {});
    of_sliding_ = say_slots(names::kPagedSliding);
  }
  void add_images() {
    images_ = say(names::kPagedImages, {-1});
    if (template_->get_input_size() <= kImagesInput)
      throw std::runtime_error("this release of OpenVINO cannot attend over blocks; take a newer one");
  }

  void page(int64_t layer, const NodePtr& softmax, bool slides, const std::vector<float>* scales) {
    auto [products, scale] = inputs(inputs(softmax->input_value(0), "Add").first, "Multiply");
    Value query = inputs(products, "MatMul").first;
    auto readers = softmax->output(0).get_target_inputs();
    if (readers.size() != 1) throw std::runtime_error(std::string("attention is read more than once") + kFix);
    NodePtr attended = readers.begin()->get_node()->shared_from_this();
    std::string number = std::to_string(layer);
    ov::PartialShape sizes = model_.input(names::kPastKey + number).get_partial_shape();
    int64_t kv_heads = sizes[1].get_length(), head_dim = sizes[3].get_length();
    auto [key, keys] = cache(names::kPastKey + number, names::kPresentKey + number);
    auto [value, values] = cache(names::kPastValue + number, names::kPresentValue + number);
    if (scales != nullptr) {
      query = scaled(query, *scales, heads_, head_dim, false);
      key = scaled(key, *scales, kv_heads, head_dim, true);
    }
    const Slots& slots = slides ? of_sliding_ : of_all_;
    ov::OutputVector given = template_->input_values();
    ov::OutputVector ours{joined(query, heads_, head_dim),
                          joined(key, kv_heads, head_dim),
                          joined(value, kv_heads, head_dim),
                          keys,
                          values,
                          slots.past,
                          begins_,
                          slots.blocks,
                          slots.block_begins};
    std::copy(ours.begin(), ours.end(), given.begin());
    given[kScaleInput] = scale;
    given[kFilledInput] = slots.filled;
    if (slides) given[kWindowInput] = window_;
    if (images_.get_node()) given[kImagesInput] = images_;
    NodePtr attention = template_->clone_with_new_inputs(given);
    auto& info = attention->get_rt_info();
    info["num_k_heads"] = info["num_v_heads"] = kv_heads;
    info["k_head_size"] = info["v_head_size"] = head_dim;
    auto apart = std::make_shared<ops::Reshape>(attention->output(0), constant({1, -1, heads_, head_dim}), false);
    auto turned = std::make_shared<ops::Transpose>(apart, constant({0, 2, 1, 3}));
    lead(attended->output(0), turned->output(0));
  }

 private:
  // Inputs that say where the slots of a run are.
  struct Slots {
    Value past, blocks, block_begins, filled;
  };

  Slots say_slots(const std::string& prefix) {
    return {say(prefix + names::kPagedPast, {1}), say(prefix + names::kPagedBlocks, {-1}),
            say(prefix + names::kPagedBlockBegins, {2}), say(prefix + names::kPagedFilled, {})};
  }

  Value say(const std::string& name, const ov::PartialShape& shape) { return add(parameter(name, shape, ov::element::i32)); }

  Value add(const std::shared_ptr<ops::Parameter>& made) {
    model_.add_parameters({made});
    return made->output(0);
  }

  // The rows that a cache grew by, [1, kv_heads, rows, head_dim], and the input that now holds them in blocks.
  std::pair<Value, Value> cache(const std::string& past, const std::string& present) {
    auto given = ov::as_type_ptr<ops::Parameter>(model_.input(past).get_node_shared_ptr());
    auto result = ov::as_type_ptr<ops::Result>(model_.output(present).get_node_shared_ptr());
    if (!given || !result) throw std::runtime_error(past + " is not a cache that grows" + kFix);
    Value grown = result->input_value(0);
    if (ov::is_type<ops::Convert>(grown.get_node())) grown = grown.get_node()->input_value(0);  // to the bundle's KV type
    Value rows = inputs(grown, "Concat").second;
    model_.remove_result(result);
    model_.remove_parameter(given);
    return {rows, add(parameter(past, {-1, -1, -1, -1}, ov::element::dynamic))};
  }

  // [1, heads, rows, head_dim] to [rows, heads * head_dim].
  static Value joined(const Value& x, int64_t heads, int64_t head_dim) {
    auto turned = std::make_shared<ops::Transpose>(x, constant({0, 2, 1, 3}));
    return std::make_shared<ops::Reshape>(turned, constant({-1, heads * head_dim}), false);
  }

  // x [1, heads, rows, head_dim] times, or divided by, scales [kv_heads, head_dim], each for heads / kv_heads heads.
  static Value scaled(const Value& x, const std::vector<float>& scales, int64_t heads, int64_t head_dim, bool divided) {
    const auto dim = static_cast<size_t>(head_dim), count = static_cast<size_t>(heads);
    const size_t sharing = count / (scales.size() / dim);
    std::vector<float> factors(count * dim);
    for (size_t i = 0; i < factors.size(); ++i) {
      const float scale = scales[i / dim / sharing * dim + i % dim];
      factors[i] = divided ? 1 / scale : scale;
    }
    auto constant = ops::Constant::create(ov::element::f32, ov::Shape{1, count, 1, dim}, factors);
    return std::make_shared<ops::Multiply>(x, constant)->output(0);
  }

  // Lets everything that reads `old` read `now`.
  static void lead(const Value& old, const Value& now) {
    for (auto& reader : old.get_target_inputs()) reader.replace_source_output(now);
  }

  ov::Model& model_;
  int64_t heads_;
  NodePtr template_;
  Value begins_, window_, images_;
  Slots of_all_, of_sliding_;
};

}  // namespace

void page_caches(ov::Model& model, const std::vector<int64_t>& layers, int64_t heads, const std::set<int64_t>& sliding,
                 bool windows, bool both_ways, const std::map<int64_t, std::vector<float>>& key_scales) {
  std::vector<NodePtr> softmaxes;
  for (const NodePtr& node : model.get_ordered_ops())
    if (std::string(node->get_type_info().name) == "Softmax") softmaxes.push_back(node);
  if (softmaxes.size() != layers.size())
    throw std::runtime_error(std::to_string(softmaxes.size()) + " layers attend where " + std::to_string(layers.size()) +
                             " are said to" + kFix);
  Pager pager(model, heads);
  if (windows) pager.add_windows();
  if (both_ways) pager.add_images();
  for (size_t i = 0; i < layers.size(); ++i) {
    auto scales = key_scales.find(layers[i]);
    pager.page(layers[i], softmaxes[i], sliding.count(layers[i]) > 0,
               scales == key_scales.end() ? nullptr : &scales->second);
  }
  std::vector<const char*> unread;  // masks are made of them
  if (windows) unread.push_back(names::kFirstSlot);
  if (both_ways) unread.push_back(names::kSeenSlots);
  for (const char* name : unread)
    model.remove_parameter(ov::as_type_ptr<ops::Parameter>(model.input(name).get_node_shared_ptr()));
  model.validate_nodes_and_infer_types();
}

void choose_rows(ov::Model& model, bool whole) {
  auto chosen = parameter(names::kPagedRows, {-1}, ov::element::i32);
  model.add_parameters({chosen});
  if (whole) {
    gather(model.output(names::kHiddenOut).get_node_shared_ptr()->input(0), chosen);
    model.validate_nodes_and_infer_types();
    return;
  }
  Value value;
  std::vector<NodePtr> behind;  // the last attention
  for (const NodePtr& node : model.get_ordered_ops()) {
    if (is_one_of(node, {"PagedAttentionExtension"})) value = node->output(0), behind.clear();
    behind.push_back(node);
  }
  for (const NodePtr& node : behind)
    for (auto& input : node->inputs())
      if (is_one_of(node, {"Add", "Multiply"}) && is_token_input(input.get_source_output())) gather(input, chosen);
  NodePtr reader = only_reader(value);
  for (; !is_one_of(reader, {"MatMul"}); reader = only_reader(value)) {
    if (!is_one_of(reader, {"Reshape", "Transpose", "Squeeze", "Convert", "Multiply"})) refuse(reader);
    value = reader->output(0);
  }
  gather(reader->input(0), chosen);
  value = reader->output(0);
  for (reader = reader_or_norm(value); is_one_of(reader, {"Convert", "Multiply", "Add", "Divide"});
       reader = reader_or_norm(value)) {
    for (const auto& input : reader->inputs()) {
      if (!is_one_of(reader, {"Add"})) break;
      if (input.get_source_output() == value || input.get_partial_shape().size() != 2) continue;  // a bias has one axis
      gather(input, chosen);                                                                      // the residual sum
      model.validate_nodes_and_infer_types();
      return;
    }
    value = reader->output(0);
  }
  refuse(reader);
}

namespace {

// What is joined by an operator of this kind, or the value itself.
std::vector<Value> joined(const Value& value, const char* kind) {
  if (!is_one_of(value.get_node_shared_ptr(), {kind})) return {value};
  return value.get_node()->input_values();
}

}  // namespace

std::vector<int64_t> split_states(ov::Model& model) {
  std::shared_ptr<ops::Result> whole;
  for (const auto& result : model.get_results())
    if (result->output(0).get_names().count(names::kStateOut) > 0) whole = result;
  if (!whole) return {};
  std::vector<int64_t> widths;
  ov::ResultVector parts;
  for (const Value& layer : joined(whole->input_value(0), "Concat")) {
    if (!is_one_of(layer.get_node_shared_ptr(), {"Unsqueeze"})) return {};
    for (const Value& part : joined(layer.get_node()->input_value(0), "Concat")) {
      const ov::PartialShape& shape = part.get_partial_shape();
      if (shape.rank() != 3 || shape[2].is_dynamic()) return {};
      parts.push_back(std::make_shared<ops::Result>(part));
      parts.back()->output(0).get_tensor().add_names({std::string(names::kStateOut) + "." + std::to_string(widths.size())});
      widths.push_back(shape[2].get_length());
    }
  }
  model.remove_result(whole);
  model.add_results(parts);
  model.validate_nodes_and_infer_types();
  return widths;
}

}  // namespace vtxcore::openvino
