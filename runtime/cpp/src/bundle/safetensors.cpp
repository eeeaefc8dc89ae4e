#include "bundle/safetensors.hpp"

#include <algorithm>
#include <limits>

#include "base/json.hpp"

namespace vtxcore {
namespace {

constexpr uint64_t kMaxHeader = uint64_t{8} << 20;
constexpr size_t kMaxTensors = 50000, kMaxDims = 32;
constexpr char kAgain[] = "; download it again";

struct Place {
  std::string name;
  int64_t begin, end;
};

int64_t bytes_of(const std::string& dtype) {
  static const std::map<std::string, int64_t> kKnown{{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"U16", 2}, {"I16", 2},
                                                     {"BF16", 2}, {"F16", 2}, {"U32", 4}, {"I32", 4}, {"F32", 4},
                                                     {"U64", 8},  {"I64", 8}, {"F64", 8}, {"C64", 8}};
  auto found = kKnown.find(dtype);
  return found == kKnown.end() ? 0 : found->second;
}

// The sizes in a list of JSON; false if it is none.
bool read_sizes(const Json* value, Ids& out) {
  const Json::Array* items = value == nullptr ? nullptr : value->array();
  if (items == nullptr) return false;
  for (const Json& item : *items) {
    const int64_t* size = item.integer();
    if (size == nullptr || *size < 0) return false;
    out.push_back(*size);
  }
  return true;
}

// Bytes of a tensor, or -1 where no file holds so many.
int64_t bytes_of(const Ids& shape, int64_t each) {
  int64_t total = each;
  bool empty = false;
  for (int64_t size : shape) {
    if (size == 0) {
      empty = true;
      continue;
    }
    if (total > std::numeric_limits<int64_t>::max() / size) return -1;
    total *= size;
  }
  return empty ? 0 : total;
}

Place read_entry(const std::string& key, const Json& entry, const std::string& name, Tensor& out) {
  std::string where = cat("tensor '", key.substr(0, 120), "' in ", name);
  const Json* dtype = entry.find("dtype");
  if (dtype == nullptr || dtype->string() == nullptr)
    fail(Kind::bundle, where, " is not described as the format demands", kAgain);
  out.dtype = *dtype->string();
  int64_t each = bytes_of(out.dtype);
  if (each == 0) fail(Kind::bundle, where, " has dtype '", out.dtype.substr(0, 20), "', which vtx does not know");
  Ids offsets;
  if (!read_sizes(entry.find("shape"), out.shape) || out.shape.size() > kMaxDims)
    fail(Kind::bundle, where, " has no valid shape (at most ", kMaxDims, " non-negative integers)");
  if (!read_sizes(entry.find("data_offsets"), offsets) || offsets.size() != 2 || offsets[0] > offsets[1])
    fail(Kind::bundle, where, " has no valid data_offsets (two integers, begin <= end)");
  int64_t needed = bytes_of(out.shape, each);
  if (needed < 0) fail(Kind::bundle, where, ": shape ", out.shape, " needs more bytes than any file holds");
  if (needed != offsets[1] - offsets[0])
    fail(Kind::bundle, where, " has ", grouped(offsets[1] - offsets[0]), " bytes, dtype ", out.dtype, " and shape ",
         out.shape, " need ", grouped(needed), kAgain);
  return {key, offsets[0], offsets[1]};
}

// The tensors must follow each other without overlap or gap, and end where the file ends.
void check_coverage(std::vector<Place>& places, int64_t start, int64_t size, const std::string& name) {
  std::sort(places.begin(), places.end(),
            [](const Place& a, const Place& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  int64_t end = start;
  for (const Place& place : places) {
    if (start + place.begin != end)
      fail(Kind::bundle, "tensor '", place.name.substr(0, 120), "' in ", name, " ",
           start + place.begin < end ? "overlaps the tensor before it" : "leaves a gap before it",
           "; the format forbids that: ", "download it again");
    end = start + place.end;
  }
  if (end > size) fail(Kind::bundle, name, " holds ", grouped(size), " bytes, its header says ", grouped(end), kAgain);
  if (end < size) fail(Kind::bundle, name, " holds ", grouped(size - end), " bytes after its last tensor", kAgain);
}

}  // namespace

Tensors unpack(const std::string& content, const std::string& name, Metadata* metadata) {
  uint64_t length = 0;
  if (content.size() < 8)
    fail(Kind::bundle, name, " holds ", content.size(), " bytes, a safetensors file has at least 8", kAgain);
  for (size_t i = 0; i < 8; ++i) length |= uint64_t{static_cast<unsigned char>(content[i])} << 8 * i;
  if (length > kMaxHeader)
    fail(Kind::bundle, name, " announces a header of ", length, " bytes, vtx reads at most ",
         grouped(static_cast<long long>(kMaxHeader)),
         "; it is not a safetensors file, or is damaged: ", "download it again");
  if (length == 0 || 8 + length > content.size())
    fail(Kind::bundle, name, " holds ", content.size(), " bytes and announces a header of ", length,
         "; it is cut off: download it again");
  Json header = parse_json(std::string_view(content).substr(8, length), "the header of " + name, Kind::bundle);
  const Json::Object* entries = header.object();
  if (entries == nullptr) fail(Kind::bundle, "the header of ", name, " is not an object", kAgain);
  if (entries->size() > kMaxTensors)
    fail(Kind::bundle, name, " lists ", entries->size(), " tensors, vtx reads at most ", kMaxTensors, " in a file");
  Tensors found;
  std::vector<Place> places;
  for (const auto& [key, entry] : *entries) {
    if (key == "__metadata__") {
      for (const auto& [about, value] : entry.object() && metadata ? *entry.object() : Json::Object())
        (*metadata)[about] = value.string() ? *value.string() : "";
      continue;
    }
    places.push_back(read_entry(key, entry, name, found[key]));
  }
  auto start = static_cast<int64_t>(8 + length);
  check_coverage(places, start, static_cast<int64_t>(content.size()), name);
  for (const Place& place : places)
    found[place.name].bytes =
        content.substr(static_cast<size_t>(start + place.begin), static_cast<size_t>(place.end - place.begin));
  return found;
}

std::string pack(const Tensors& tensors, const Metadata& metadata) {
  Json::Object header;
  if (!metadata.empty()) header.emplace_back("__metadata__", Json::Object(metadata.begin(), metadata.end()));
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    Json::Array shape(tensor.shape.begin(), tensor.shape.end());
    Json::Array offsets{data.size(), data.size() + tensor.bytes.size()};
    header.emplace_back(name, Json::Object{{"dtype", tensor.dtype}, {"shape", shape}, {"data_offsets", offsets}});
    data += tensor.bytes;
  }
  std::string text = Json(header).dump();
  text.append((64 - (8 + text.size()) % 64) % 64, ' ');
  std::string out;
  for (size_t i = 0; i < 8; ++i) out += static_cast<char>(text.size() >> 8 * i);
  return out + text + data;
}

}  // namespace vtxcore
