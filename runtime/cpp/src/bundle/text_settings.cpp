#include <algorithm>

#include "bundle/fields.hpp"
#include "bundle/manifest.hpp"

namespace vtxcore {
namespace {

PromptExample read_example(const Json& value) {
  Fields fields(value, "vtx.json: text.examples");
  PromptExample example{{}, fields.text("text")};
  for (const Json& item : fields.list("turns")) {
    Fields turn(item, "vtx.json: text.examples.turns");
    example.turns.emplace_back(turn.text("role"), std::vector<std::optional<std::string>>());
    for (const Json& part : turn.list("parts")) {
      if (!part.is_null() && part.string() == nullptr) turn.wrong<int>("parts", "a list of strings or null");
      example.turns.back().second.push_back(part.is_null() ? std::nullopt : std::optional(*part.string()));
    }
    turn.done();
  }
  fields.done();
  return example;
}

BoxForm read_box_form(const Json& value) {
  Fields fields(value, "vtx.json: text.boxes");
  BoxForm form{fields.text("pattern"), fields.text("label"), fields.whole_or_null("scale", 1, names::kMaxId),
               fields.flag("rows_first")};
  fields.get("scale");
  const std::string& pattern = form.pattern;
  if (pattern.size() > static_cast<size_t>(names::kMaxPattern) || pattern.find_first_of("# ") == 0 ||
      std::count(pattern.begin(), pattern.end(), '#') != names::kCoordinates)
    fields.wrong<int>("pattern", "four numbers behind another character");
  if (form.label != "before" && form.label != "after" && form.label != "inside")
    fields.wrong<int>("label", "before, after or inside");
  fields.done();
  return form;
}

}  // namespace

TextSettings read_text_settings(const Json& value) {
  Fields fields(value, "vtx.json: text");
  TextSettings t;
  t.image_token = fields.text("image_token");
  if (t.image_token.empty()) fields.wrong<int>("image_token", "a string that is not empty");
  t.image_token_id = fields.whole("image_token_id", 0, names::kMaxId);
  if (fields.has("video_token")) t.video_token = fields.text_or_null("video_token");
  t.video_token_id = fields.whole_or_null("video_token_id", 0, names::kMaxId);
  if (t.video_token.has_value() != t.video_token_id.has_value() ||
      (t.video_token_id == t.image_token_id) != (t.video_token == t.image_token))
    fields.wrong<int>("video_token_id", "the id of video_token, as of image_token if that is it, or null");
  t.seg_token_id = fields.whole_or_null("seg_token_id", 0, names::kMaxId);
  t.bos_token = fields.text_or_null("bos_token"), t.unk_token = fields.text_or_null("unk_token");
  for (const char* key : {"bos_token", "eos_token", "pad_token", "unk_token"})
    if (std::optional<std::string> token = fields.text_or_null(key)) t.variables[key] = *token;
  t.variables["image_token"] = t.image_token;
  if (t.video_token) t.variables["video_token"] = *t.video_token;
  t.end_ids = fields.wholes("end_ids", 0, names::kMaxId);
  t.ids_before = fields.wholes("ids_before", 0, names::kMaxId);
  t.ids_after = fields.wholes("ids_after", 0, names::kMaxId);
  t.add_special_tokens = fields.flag("add_special_tokens");
  const Json::Object* control = fields.get("control_tokens").object();
  if (control == nullptr) fields.wrong<int>("control_tokens", "ids by text");
  for (const auto& [token, id] : *control) {
    if (id.integer() == nullptr || *id.integer() < 0 || *id.integer() > names::kMaxId || token.empty())
      fields.wrong<int>("control_tokens", "ids by text");
    t.control_tokens.emplace(token, *id.integer());
  }
  if (!fields.get("length_bound").is_null()) {
    Fields bound(fields.get("length_bound"), "vtx.json: text.length_bound");
    t.characters_per_token = bound.whole("characters_per_token", 1, names::kMaxId);
    t.bound_normalized = bound.flag("normalized");
    bound.done();
  }
  if (fields.has("boxes") && !fields.get("boxes").is_null()) t.boxes = read_box_form(fields.get("boxes"));
  for (const Json& example : fields.list("examples")) t.examples.push_back(read_example(example));
  fields.done();
  return t;
}

}  // namespace vtxcore
