#include "bundle/card.hpp"

#include "bundle/fields.hpp"
#include "bundle/seal.hpp"

namespace vtxcore {
namespace {

constexpr char kCard[] = "card.json", kCardFormat[] = "vtx-card-1", kFitAgain[] = "run vtx-fit again, or remove card.json";
constexpr int64_t kMaxCard = int64_t{1} << 20;

std::string read_k(Fields& fields) {
  const Json& value = fields.get("k");
  if (value.is_null()) return "none";
  if (value.integer() != nullptr) return std::to_string(fields.whole("k"));
  return fields.text("k");
}

std::optional<std::string> read_rest_of(Fields& fields) {
  if (!fields.has("rest") || fields.get("rest").is_null()) return std::nullopt;
  return fields.get("rest").integer() != nullptr ? std::to_string(fields.whole("rest")) : fields.text("rest");
}

std::vector<KindDepth> read_kinds(Fields& card) {
  std::vector<KindDepth> out;
  if (!card.has("kinds")) return out;
  for (const Json& value : card.list("kinds")) {
    Fields fields(value, cat(kCard, ": kinds"));
    out.push_back({fields.text("kind"), fields.whole_or_null("k", 1), fields.number("rest")});
  }
  return out;
}

std::optional<double> read_threshold(Fields& card) {
  if (!card.has("accept") || card.get("accept").is_null()) return std::nullopt;
  return Fields(card.get("accept"), cat(kCard, ": accept")).number("threshold");
}

}  // namespace

std::optional<Card> read_card(const Bundle& bundle) {
  Folder folder(bundle.folder());
  if (!folder.exists(kCard)) return std::nullopt;
  // It is written after the bundle was signed, so its signature is its own, by the same key.
  std::string fix = cat(kFitAgain, bundle.key() ? " (--sign KEY)" : "");
  Json value = parse_json(read_sealed(folder, kCard, kMaxCard, fix, bundle.key()), kCard, Kind::bundle);
  if (value.text("format") != kCardFormat)
    fail(Kind::bundle, kCard, " has format '", value.text("format").substr(0, 40), "', this vtx reads ", kCardFormat, "; ",
         kUpgrade);
  if (value.text("manifest") != bundle.digest())
    fail(Kind::bundle, kCard, " was made for another vtx.json than the one in ", bundle.folder(), "; ", kFitAgain);
  Fields card(value, kCard);
  Fields chosen(card.get("chosen"), cat(kCard, ": chosen"));
  Fields how(chosen.get("configuration"), cat(kCard, ": chosen: configuration"));
  return Card{how.text("device"),
              how.text("compute"),
              how.text("reduce"),
              read_k(how),
              how.whole_or_null("max_tiles", 1).value_or(0),
              how.whole_or_null("max_pixels", 1).value_or(0),
              read_rest_of(how),
              read_kinds(card),
              read_threshold(card)};
}

}  // namespace vtxcore
