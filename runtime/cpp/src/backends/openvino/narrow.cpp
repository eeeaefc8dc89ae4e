#include "backends/openvino/rewrites.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <openvino/opsets/opset13.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "bundle/names.hpp"

namespace vtxcore::openvino {
namespace {

namespace ops = ov::opset13;
using Value = ov::Output<ov::Node>;
using NodePtr = std::shared_ptr<ov::Node>;

constexpr char kMark[] = "decompression_0";  // the plugin leaves a conversion that bears this to the operator that reads it
constexpr std::chrono::milliseconds kPause(20);  // between two looks: little is read anew meanwhile

std::string kind(const Value& value) { return value.get_node()->get_type_info().name; }

std::set<std::string> readers(const NodePtr& node) {
  std::set<std::string> out;
  for (const auto& reader : node->output(0).get_target_inputs()) out.insert(reader.get_node()->get_type_info().name);
  return out;
}

bool is_narrow_matrix(const Value& value) {
  bool narrow = value.get_element_type() == ov::element::f16 || value.get_element_type() == ov::element::bf16;
  return narrow && kind(value) == "Constant" && value.get_partial_shape().size() == 2;
}

// Marks as widened, where its rows are, a table whose rows are widened once they are gathered: it stays narrow.
void widen_table(const NodePtr& gather) {
  auto wide = std::make_shared<ops::Convert>(gather->input_value(0), ov::element::f32);
  wide->get_rt_info()[kMark] = "";
  auto rows = std::make_shared<ops::Gather>(wide, gather->input_value(1), gather->input_value(2));
  for (const auto& reader : gather->output(0).get_target_inputs())
    for (auto& end : reader.get_node()->output(0).get_target_inputs()) end.replace_source_output(rows->output(0));
}

// Rows of a narrow table whose numbers are in the graph become a constant. To gather them while it compiles, OpenVINO would
// widen the whole table: Gemma 4 E2B's inputs to layers, of which the tower's graph reads one row, from 4.7 to 9.4 GB.
void gather_known_rows(const NodePtr& gather, const ops::Constant& numbers) {
  auto table = ov::as_type_ptr<ops::Constant>(gather->get_input_node_shared_ptr(0));
  const size_t width = table->get_shape()[1];
  const auto* values = static_cast<const uint16_t*>(table->get_data_ptr());
  std::vector<uint16_t> rows;
  for (int64_t row : numbers.cast_vector<int64_t>())
    rows.insert(rows.end(), values + static_cast<size_t>(row) * width, values + (static_cast<size_t>(row) + 1) * width);
  ov::Shape shape = numbers.get_shape();
  shape.push_back(width);
  auto known = std::make_shared<ops::Constant>(table->get_element_type(), shape, rows.data());
  for (auto& end : gather->output(0).get_target_inputs()) end.replace_source_output(known->output(0));
}

// Has whoever multiplies by a widened bfloat16 matrix multiply by the matrix itself.
void multiply_in_bfloat16(const NodePtr& widened) {
  for (const auto& reader : widened->output(0).get_target_inputs()) {
    auto product = ov::as_type_ptr<ops::MatMul>(reader.get_node()->shared_from_this());
    auto rows = std::make_shared<ops::Convert>(product->input_value(0), ov::element::bf16);
    auto narrow =
        std::make_shared<ops::MatMul>(rows, widened->input_value(0), product->get_transpose_a(), product->get_transpose_b());
    auto wide = std::make_shared<ops::Convert>(narrow, ov::element::f32);
    wide->output(0).get_tensor().set_names(product->output(0).get_names());  // of a graph's output
    for (auto& end : product->output(0).get_target_inputs()) end.replace_source_output(wide->output(0));
  }
}

// Whether a product, but for its bias, is an output of the graph.
bool is_given_out(const NodePtr& product) {
  const ov::Node* node = product.get();
  while (std::set<std::string>{"MatMul", "Add", "Multiply"}.count(node->get_type_name())) {
    auto ends = node->output(0).get_target_inputs();
    if (ends.size() != 1) return false;
    node = ends.begin()->get_node();
  }
  return std::string(node->get_type_name()) == "Result";
}

// Leaves out the joining of [images, rows, width] to [images * rows, width] before a product with scaled integers.
// OpenVINO moves such a joining behind the product, and multiplies the integers by their scales when it does. Rows
// whose number only the image says, in towers at its own size, stay as they are: OpenVINO keeps their integers, and what
// follows has no axis of images. Neither has what a graph gives out.
void multiply_unshaped(const NodePtr& product) {
  Value joined = product->input_value(0);
  Value rows = joined.get_node()->input_value(0);
  ov::PartialShape before = rows.get_partial_shape(), after = joined.get_partial_shape();
  if (before.rank().is_static() && after.rank().is_static() && before.size() == 3 && after.size() == 2 &&
      before[1].is_static() && before[2] == after[1] && after[1].is_static() && !is_given_out(product))
    product->input(0).replace_source_output(rows);
}

using Mapping = std::pair<uintptr_t, size_t>;  // first address and size

// Each shared file mapping, never written to, that a constant of the model lies in. The model keeps them mapped as long
// as it is there, so nothing else can come to lie at these addresses.
std::vector<Mapping> mapped(const ov::Model& model) {
  std::set<uintptr_t> places;
  for (const NodePtr& node : model.get_ordered_ops())
    if (auto constant = ov::as_type_ptr<ops::Constant>(node))
      places.insert(reinterpret_cast<uintptr_t>(constant->get_data_ptr()));
  std::vector<Mapping> out;
  std::ifstream lines("/proc/self/maps");
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string bounds, rights, offset, device, inode;
    words >> bounds >> rights >> offset >> device >> inode;
    unsigned long long first = 0, end = 0;
    if (rights != "r--s" || inode == "0" || std::sscanf(bounds.c_str(), "%llx-%llx", &first, &end) != 2) continue;
    auto place = places.lower_bound(first);
    if (place != places.end() && *place < end) out.emplace_back(first, end - first);
  }
  return out;
}

class Watcher : public Dropping {
 public:
  explicit Watcher(std::vector<Mapping> mappings) : mappings_(std::move(mappings)), thread_([this] { watch(); }) {}
  ~Watcher() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    woken_.notify_one();
    thread_.join();
    drop();
  }

 private:
  void watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!woken_.wait_for(lock, kPause, [this] { return done_; })) drop();
  }
  void drop() {  // where it is refused, pages stay: nothing but memory is lost
    for (auto [first, size] : mappings_) ::madvise(reinterpret_cast<void*>(first), size, MADV_DONTNEED);
  }

  std::vector<Mapping> mappings_;
  std::mutex mutex_;
  std::condition_variable woken_;
  bool done_ = false;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace

void keep_narrow(ov::Model& model, const std::string& compute) {
  for (const NodePtr& node : model.get_ordered_ops()) {
    std::string type = node->get_type_info().name;
    if (type == "Convert" && is_narrow_matrix(node->input_value(0)) && readers(node) == std::set<std::string>{"MatMul"}) {
      if (compute == "bf16" && node->get_input_element_type(0) == ov::element::bf16)
        multiply_in_bfloat16(node);
      else
        node->get_rt_info()[kMark] = "";
    } else if (type == "Gather" && is_narrow_matrix(node->input_value(0)) &&
               readers(node) == std::set<std::string>{"Convert"}) {
      if (auto numbers = ov::as_type_ptr<ops::Constant>(node->get_input_node_shared_ptr(1)))
        gather_known_rows(node, *numbers);
      else
        widen_table(node);
    } else if (type == "MatMul" && kind(node->input_value(0)) == "Reshape" && kind(node->input_value(1)) == "Multiply")
      multiply_unshaped(node);
  }
  model.validate_nodes_and_infer_types();
}

int64_t weight_block(const ov::Model& model) {
  int64_t least = 0;
  for (const NodePtr& node : model.get_ordered_ops()) {
    const ov::element::Type type = node->get_output_element_type(0);
    if (kind(node) != "Constant" || (type != ov::element::i4 && type != ov::element::i8)) continue;
    for (const auto& reader : node->output(0).get_target_inputs()) {
      const ov::Node& apart = *reader.get_node();
      if (std::string(apart.get_type_info().name) != "Reshape") continue;
      int64_t block = apart.get_output_partial_shape(0).rbegin()->get_length();
      if (block >= names::kQuantisedRowsInt4) least = least == 0 ? block : std::min(least, block);
    }
  }
  return least;
}

std::unique_ptr<Dropping> letting_go(const ov::Model& model) {
  std::vector<Mapping> mappings = mapped(model);
  if (mappings.empty()) return nullptr;
  return std::make_unique<Watcher>(std::move(mappings));
}

}  // namespace vtxcore::openvino
