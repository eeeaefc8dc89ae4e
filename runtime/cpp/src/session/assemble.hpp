// A question's prompt: its text where image tokens are selected by it, and its ids once their number is known.
#pragma once

#include <functional>
#include <memory>

#include "session/session.hpp"

namespace vtxcore {

// The text by which a policy's entries select image tokens, in a chat that of the first turn, `after`; null where none of
// them looks at it. `ids` are the prompt's. `embeddings` gives the question's by the bundle's text tower; it is called where
// the policy needs that.
std::shared_ptr<const PromptText> selecting_text(Backend& backend, const Ids& ids, int64_t image_id, const Policy& policy,
                                                 const Selection* after, const std::function<Rows()>& embeddings);

// The prompt of `ids`, which hold all tokens of every image, or of those ids that the policy's entries leave: `expand`
// gives the ids for numbers of tokens. `check` is called before every image and may throw, to stop there.
Prompt make_prompt(Ids ids, int64_t image_id, std::vector<Encoder> encoders, const Policy& policy,
                   const std::function<Ids(const Ids&)>& expand, const Check& check);

}  // namespace vtxcore
