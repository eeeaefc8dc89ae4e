#include "session/prefix_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>

#include "bundle/names.hpp"
#include "bundle/safetensors.hpp"
#include "bundle/seal.hpp"
#include "bundle/sha256.hpp"

namespace vtxcore {
namespace {

// The bundle and the engine that a file is bound to, by the name of each part.
std::vector<std::pair<std::string, std::string>> binding(const Bundle& bundle, const Backend& backend) {
  return {{"format", names::kPrefixFormat},
          {"bundle", bundle.digest()},
          {"engine", cat(backend.device, " ", backend.compute, " ", backend.dialect)}};
}

// Of each tensor its name, its type and shape as numpy prints them, and its bytes.
std::string checksum(const Tensors& tensors) {
  static const std::map<std::string, const char*> kNumpy{{"BOOL", "|b1"}, {"I8", "|i1"},  {"U8", "|u1"},  {"U16", "<u2"},
                                                         {"F16", "<f2"},  {"F32", "<f4"}, {"I64", "<i8"}, {"F64", "<f8"}};
  Sha256 hash;
  for (const auto& [name, tensor] : tensors) {
    auto type = kNumpy.find(tensor.dtype);
    std::string head = cat(name, " ", type == kNumpy.end() ? "?" : type->second, " (", listed(tensor.shape),
                           tensor.shape.size() == 1 ? "," : "", ")\n");
    hash.update(head.data(), head.size());
    hash.update(tensor.bytes.data(), tensor.bytes.size());
  }
  return hash.hex();
}

Tensor rows_tensor(const Rows& given, size_t count) {
  const Rows rows = host(given);
  return tensor_of("F32", {static_cast<int64_t>(count), static_cast<int64_t>(rows.width)},
                   Floats(rows.data.begin(), rows.data.begin() + static_cast<std::ptrdiff_t>(count * rows.width)));
}

Rows rows_of(const Tensor& tensor) {
  Rows rows;
  rows.width = static_cast<size_t>(tensor.shape[1]), rows.data = tensor.values<float>();
  return rows;
}

void replace_file(const std::string& path, const std::string& content) {
  std::string partial = cat(path, ".", ::getpid(), ".part");
  int file = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  bool done = file >= 0;
  for (size_t at = 0; done && at < content.size();) {
    ssize_t wrote = ::write(file, content.data() + at, content.size() - at);
    done = wrote > 0 || (wrote < 0 && errno == EINTR);
    if (wrote > 0) at += static_cast<size_t>(wrote);
  }
  done = done && ::fsync(file) == 0;
  int reason = errno;
  if (file >= 0) ::close(file);
  if (done && std::rename(partial.c_str(), path.c_str()) != 0) done = false, reason = errno;
  if (done) return;
  ::unlink(partial.c_str());
  fail(Kind::request, "cannot write ", path, ": ", std::generic_category().message(reason));
}

std::string name_of(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// The command that signs a file.
std::string sign(const std::string& name) {
  return cat("openssl pkeyutl -sign -rawin -inkey KEY -in ", name, " -out ", name, kSignature);
}

void check_signature(const std::string& path, const std::string& content, const PublicKey& key) {
  std::string name = name_of(path), signature = path + kSignature;
  if (::access(signature.c_str(), F_OK) != 0)
    fail(Kind::bundle, name, " is not signed, and a signature by ", key.name(), " is required; sign it: ", sign(name));
  if (!key.has_signed(content, read_named(signature, kSignatureBytes, Kind::bundle)))
    fail(Kind::bundle, "the signature of ", name, " does not fit it and ", key.name(),
         ": it was altered, or signed with another key; remove it");
}

}  // namespace

void save_prefix(const std::string& path, const Bundle& bundle, const Backend& backend, Session& session) {
  const Prefix& prefix = session.prefix();
  Ids of_images = indices_of(prefix.is_vision);
  size_t last = prefix.images.empty() ? 0 : prefix.images.back()->rows.count(), count = 0;
  std::vector<Segment*> segments = session.complete();
  bool whole = std::none_of(segments.begin(), segments.end(), [](const Segment* each) { return each->saved.has_value(); });
  if (last > 0 && whole && !segments.empty())
    count = static_cast<size_t>(of_images[of_images.size() - last]);
  if (count == 0)
    fail(Kind::request,
         "the caches do not hold what stands before the prompt's last image; leave the prefix file out with this ",
         "reduction");
  if (session.filed() >= count) return;
  if (bundle.key())
    fail(Kind::request, name_of(path), " is not written, as it must be signed, and the key that signs is not here; write ",
         "it where no signature is required, and sign it: ", sign(name_of(path)));
  const ModelSpec& model = bundle.manifest().model;
  auto size = static_cast<int64_t>(count);
  auto end = static_cast<std::ptrdiff_t>(count);
  Tensors tensors{
      {"ids", {"I64", {size}, prefix.key.substr(0, count * sizeof(int64_t))}},
      {"is_vision", tensor_of("BOOL", {size}, Mask(prefix.is_vision.begin(), prefix.is_vision.begin() + end))},
      {"positions", tensor_of({prefix.positions.begin(), prefix.positions.begin() + end}, model.position_parts())},
      {"hidden", rows_tensor(prefix.hidden, count)}};
  for (const auto& [name, rows] : prefix.inputs) tensors["input " + name] = rows_tensor(rows, count);
  const Ids text = indices_of(Mask(prefix.is_vision.begin(), prefix.is_vision.begin() + end), false);
  const std::vector<StageSpec>& stages = bundle.manifest().stages;
  for (size_t number = 0; number < segments.size(); ++number) {
    tensors[cat("text ", number)] = rows_tensor(segments[number]->states_of(text), text.size());
    StageCache& cache = *segments[number]->cache;
    SavedSlots kv;
    for (size_t index = 0, at = 0; index < stages[number].cached.size(); ++index) {
      std::optional<LayerForm> form = cache.layer_form(size, index);
      if (!form)
        fail(Kind::request, "on ", backend.device, " K and V stay on the GPU and cannot be saved; leave the file out");
      if (index == 0) kv = cache.read_kv(count_up(0, count));
      const size_t bytes = form->bytes();
      tensors[cat("kv ", stages[number].cached[index])] = {
          form->dtype,
          form->shape,
          {kv.begin() + static_cast<std::ptrdiff_t>(at), kv.begin() + static_cast<std::ptrdiff_t>(at + bytes)}};
      at += bytes;
    }
  }
  Metadata metadata;
  for (const auto& [name, value] : binding(bundle, backend)) metadata[name] = value;
  metadata["sha256"] = checksum(tensors);
  replace_file(path, pack(tensors, metadata));
  session.note_filed(count);
}

void load_prefix(const std::string& path, const Bundle& bundle, Backend& backend, Session& session) {
  const Manifest& m = bundle.manifest();
  int64_t width = 0;
  for (const TokenInput& each : m.token_inputs) width += each.width;
  int64_t rows = static_cast<int64_t>(m.stages.size()) + 3 + width / m.model.hidden;
  constexpr int64_t kEnough = int64_t{1} << 40;
  int64_t most = (1 << 20) + std::min(kEnough, product({2, m.max_context, m.model.layers, backend.kv_slot_bytes})) +
                 std::min(kEnough, product({4, m.max_context, m.model.hidden, rows}));
  std::string content = read_named(path, most, Kind::bundle), name = name_of(path);
  if (bundle.key()) check_signature(path, content, *bundle.key());
  Metadata metadata;
  Tensors tensors = unpack(content, name, &metadata);
  for (const auto& [part, value] : binding(bundle, backend))
    if (metadata[part] != value) fail(Kind::bundle, name, " was written for another ", part, "; remove it");
  if (metadata["sha256"] != checksum(tensors)) fail(Kind::bundle, name, " is damaged (its SHA-256 differs); remove it");

  // What the file must have, by the number of its tokens and of the stages that they ran through.
  auto wrong = [&](const std::string& reason) {
    fail(Kind::bundle, name, " does not hold a prompt of this bundle (", reason, "); remove it");
  };
  const Tensor &mask = tensors["is_vision"], &hidden = tensors["hidden"];
  int64_t count = hidden.shape.empty() ? 0 : hidden.shape.front();
  auto depth = static_cast<size_t>(std::count_if(tensors.begin(), tensors.end(),
                                                 [](const auto& each) { return each.first.compare(0, 5, "text ") == 0; }));
  auto keeping = static_cast<size_t>(
      std::count_if(m.stages.begin(), m.stages.end(), [](const StageSpec& stage) { return stage.keeps(); }));
  if (count < 1 || count >= m.max_context || depth < 1 || depth > keeping)
    wrong(cat("it has ", count, " tokens and ", depth, " stages"));
  Prefix prefix;
  for (char bit : mask.bytes) prefix.is_vision.push_back(bit != 0);
  int64_t text = count - count_of(prefix.is_vision), parts = m.model.position_parts();
  std::map<std::string, LayerForm> forms{{"ids", {"I64", {count}}},
                                         {"is_vision", {"BOOL", {count}}},
                                         {"positions", {"I64", parts > 1 ? Ids{count, parts} : Ids{count}}},
                                         {"hidden", {"F32", {count, m.model.hidden}}}};
  std::vector<std::string> inputs;
  for (const TokenInput& each : m.token_inputs) {
    inputs.push_back(each.name);
    forms["input " + each.name] = {"F32", {count, each.width}};
  }
  if (m.model.sees_both_ways()) {
    inputs.emplace_back(names::kGroup);
    forms[std::string("input ") + names::kGroup] = {"F32", {count, 1}};
  }
  std::vector<std::unique_ptr<StageCache>> caches;
  for (size_t number = 0; number < depth; ++number) {
    forms[cat("text ", number)] = {"F32", {text, m.model.hidden}};
    caches.push_back(backend.stage(number, m.max_context));
    for (size_t index = 0; index < m.stages[number].cached.size(); ++index) {
      std::optional<LayerForm> form = caches.back()->layer_form(count, index);
      if (!form)
        fail(Kind::request, "on ", backend.device, " K and V stay on the GPU and cannot be saved; leave the file out");
      forms[cat("kv ", m.stages[number].cached[index])] = *form;
    }
  }
  for (const auto& [key, form] : forms)
    if (auto tensor = tensors.find(key);
        tensor == tensors.end() || tensor->second.dtype != form.dtype || tensor->second.shape != form.shape)
      wrong(cat(key, " is missing or has another size or type"));
  for (const auto& [key, tensor] : tensors)
    if (forms.count(key) == 0) wrong(cat("it has ", key.substr(0, 80)));

  prefix.key = tensors["ids"].bytes + "|a file";  // which no prompt has
  Ids positions = tensors["positions"].values<int64_t>();
  for (auto first = positions.begin(); first != positions.end(); first += parts)
    prefix.positions.push_back({*first, first[parts / 2], first[parts - 1]});
  prefix.next_position = *std::max_element(positions.begin(), positions.end()) + 1;
  prefix.hidden = rows_of(hidden);
  for (const std::string& each : inputs) prefix.inputs[each] = rows_of(tensors["input " + each]);
  std::vector<SharedRows> of_text;
  for (size_t number = 0; number < depth; ++number) {
    of_text.push_back(std::make_shared<const Rows>(rows_of(tensors[cat("text ", number)])));
    SavedSlots kv;
    for (int64_t layer : m.stages[number].cached) {
      const std::string& bytes = tensors[cat("kv ", layer)].bytes;
      kv.insert(kv.end(), bytes.begin(), bytes.end());
    }
    caches[number]->write_kv(count_up(0, static_cast<size_t>(count)), kv, prefix.positions, count);
  }
  session.begin(std::move(prefix), std::move(caches), std::move(of_text));
}

}  // namespace vtxcore
