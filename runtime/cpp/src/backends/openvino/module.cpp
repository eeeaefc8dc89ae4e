// libvtx_openvino.so: the bridge over OpenVINO's C++ API.
#include "backends/openvino/bridge.hpp"
#include "backends/openvino/rewrites.hpp"

namespace vtxcore::openvino {
namespace {

ov::element::Type element(Type type) {
  switch (type) {
    case Type::f32: return ov::element::f32;
    case Type::f16: return ov::element::f16;
    case Type::bf16: return ov::element::bf16;
    case Type::u8: return ov::element::u8;
    case Type::i32: return ov::element::i32;
    case Type::i64: return ov::element::i64;
  }
  return ov::element::dynamic;
}

std::vector<PortView> views(const std::vector<ov::Output<const ov::Node>>& ports) {
  std::vector<PortView> out;
  for (const auto& port : ports) {
    PortView view{{port.get_names().begin(), port.get_names().end()}, port.get_element_type().get_type_name(), {}};
    for (const ov::Dimension& size : port.get_partial_shape())
      view.shape.push_back(size.is_dynamic() ? -1 : size.get_length());
    out.push_back(std::move(view));
  }
  return out;
}

class OvRequest : public Request {
 public:
  explicit OvRequest(ov::InferRequest request) : request_(std::move(request)) {}

  void set(const std::string& name, Type type, const std::vector<int64_t>& shape, void* data) override {
    static uint8_t nothing[8];  // an empty tensor's memory
    request_.set_tensor(name, ov::Tensor(element(type), ov::Shape(shape.begin(), shape.end()), data ? data : nothing));
  }

  // Not by `infer`: where memory runs out, OpenVINO 2026.4 returns from it without an error, and the outputs are those
  // of the run before. `wait` raises.
  void run() override {
    request_.start_async();
    request_.wait();
  }

  TensorView get(const std::string& name) override {
    ov::Tensor tensor = request_.get_tensor(name);
    ov::Shape shape = tensor.get_shape();
    const ov::Tensor& read = tensor;
    return {std::vector<int64_t>(shape.begin(), shape.end()), read.data()};
  }

 private:
  ov::InferRequest request_;
};

class OvCompiled : public Compiled {
 public:
  explicit OvCompiled(ov::CompiledModel compiled) : compiled_(std::move(compiled)) {}
  std::unique_ptr<Request> request() override { return std::make_unique<OvRequest>(compiled_.create_infer_request()); }

 private:
  ov::CompiledModel compiled_;
};

class OvModel : public Model {
 public:
  OvModel(ov::Core core, std::shared_ptr<ov::Model> model) : core_(std::move(core)), model_(std::move(model)) {}

  std::vector<PortView> inputs() const override { return views(std::const_pointer_cast<const ov::Model>(model_)->inputs()); }
  std::vector<PortView> outputs() const override {
    return views(std::const_pointer_cast<const ov::Model>(model_)->outputs());
  }
  void keep_narrow(const std::string& compute) override { openvino::keep_narrow(*model_, compute); }
  int64_t weight_block() const override { return openvino::weight_block(*model_); }
  void page_caches(const std::vector<int64_t>& layers, int64_t heads, const std::set<int64_t>& sliding, bool windows,
                   bool both_ways, const std::map<int64_t, std::vector<float>>& key_scales) override {
    openvino::page_caches(*model_, layers, heads, sliding, windows, both_ways, key_scales);
  }
  void choose_rows(bool whole) override { openvino::choose_rows(*model_, whole); }
  std::vector<int64_t> split_states() override { return openvino::split_states(*model_); }
  void multiply_integers() override { openvino::multiply_integers(*model_); }
  void bring_to_int8(WeightMemory& memory) override { openvino::bring_to_int8(*model_, memory); }
  void reshape(const std::string& input, const std::vector<int64_t>& shape) override {
    model_->reshape({{input, ov::PartialShape(std::vector<ov::Dimension>(shape.begin(), shape.end()))}});
  }
  std::unique_ptr<Compiled> compile(const std::map<std::string, std::string>& settings) override {
    return std::make_unique<OvCompiled>(core_.compile_model(model_, "CPU", ov::AnyMap(settings.begin(), settings.end())));
  }
  std::unique_ptr<Dropping> letting_go() const override { return openvino::letting_go(*model_); }

 private:
  ov::Core core_;
  std::shared_ptr<ov::Model> model_;
};

class OvCore : public Core {
 public:
  std::string version() const override { return ov::get_openvino_version().buildNumber; }
  std::string capabilities() const override {
    std::string out;
    for (const std::string& word : core_.get_property("CPU", ov::device::capabilities))
      out += (out.empty() ? "" : ", ") + word;
    return out;
  }
  std::unique_ptr<Model> read(const std::string& path) override {
    return std::make_unique<OvModel>(core_, core_.read_model(path));
  }

 private:
  ov::Core core_;
};

}  // namespace
}  // namespace vtxcore::openvino

extern "C" __attribute__((visibility("default"))) vtxcore::openvino::Core* vtx_openvino_core(int version) {
  if (version != vtxcore::openvino::kBridgeVersion) return nullptr;
  return new vtxcore::openvino::OvCore;
}
