#include "session/assemble.hpp"

#include <algorithm>
#include <iterator>

namespace vtxcore {

std::shared_ptr<const PromptText> selecting_text(Backend& backend, const Ids& ids, int64_t image_id, const Policy& policy,
                                                 const Selection* after, const std::function<Rows()>& embeddings) {
  auto entries = policy.entries();
  bool asked = std::any_of(entries.begin(), entries.end(), [](const auto& entry) { return entry->uses_question(); });
  auto last = std::find(ids.rbegin(), ids.rend(), image_id);
  if (!asked || last == ids.rend()) return nullptr;
  auto out = std::make_shared<PromptText>();
  std::copy_if(ids.begin(), last.base(), std::back_inserter(out->ids), [&](int64_t id) { return id != image_id; });
  auto before = static_cast<std::ptrdiff_t>(out->ids.size());
  if (after && after->policy == policy.key())
    out->ids.insert(out->ids.end(), after->ids.begin(), after->ids.end());
  else
    out->ids.insert(out->ids.end(), last.base(), ids.end());
  out->hidden = backend.embed(out->ids);
  out->after = Mask(out->ids.size(), 1);
  std::fill(out->after.begin(), out->after.begin() + before, uint8_t{0});
  if (policy.needs().text_tower) out->embeddings = embeddings();
  return out;
}

Prompt make_prompt(Ids ids, int64_t image_id, std::vector<Encoder> encoders, const Policy& policy,
                   const std::function<Ids(const Ids&)>& expand, const Check& check) {
  Prompt out{std::move(ids), {}, std::move(encoders), 0};
  if (!policy.entries().empty() && !out.encoders.empty()) {  // how many tokens an image has, only its pixels say
    Ids counts;
    for (const Encoder& encoder : out.encoders) {
      check();
      ImagePtr image = encoder.encode();
      counts.push_back(static_cast<int64_t>(image->rows.count()));
      out.skipped += image->positions() - counts.back();
    }
    out.ids = expand(counts);
  }
  for (int64_t id : out.ids) out.is_vision.push_back(id == image_id);
  return out;
}

}  // namespace vtxcore
