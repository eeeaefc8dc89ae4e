#include "session/prefix.hpp"

namespace vtxcore {

size_t Prompt::prefix_length() const {
  for (size_t i = is_vision.size(); i > 0; --i)
    if (is_vision[i - 1]) return i;
  return 0;
}

std::string Prompt::prefix_key(bool whole) const {
  std::string key(reinterpret_cast<const char*>(ids.data()), (whole ? ids.size() : prefix_length()) * sizeof(int64_t));
  for (const Encoder& encoder : encoders) key += "|" + encoder.key;
  return key;
}

void Prefix::deepen(SharedRows hidden, bool hold) {
  if (!hold && depth() > 0) {
    const Rows& last = *boundaries.back();
    boundaries.back() = std::make_shared<Rows>(take(last, indices_of(is_vision, false)));
  }
  boundaries.push_back(std::move(hidden));
}

bool Prefix::held(size_t boundary) const { return boundary > depth() || boundaries[boundary]->count() == size(); }

void Prefix::rewind(size_t boundary) {
  while (!held(boundary)) --boundary;
  if (boundary < depth()) boundaries.resize(boundary + 1);
}

std::pair<Ids, int64_t> place(const Mask& is_vision, const Images& images) {
  if (std::none_of(images.begin(), images.end(), [](const ImagePtr& image) { return image->offsets.has_value(); }))
    return {count_up(0, is_vision.size()),
            static_cast<int64_t>(is_vision.size())};  // text may stand among an image's tokens
  Ids positions(is_vision.size());
  int64_t at = 0;
  size_t token = 0;
  for (const ImagePtr& image : images) {
    size_t count = image->rows.count();
    if (count > 0)
      while (!is_vision[token]) positions[token++] = at++;
    for (size_t i = 0; i < count; ++i)
      positions[token++] = at + (image->offsets ? (*image->offsets)[i] : static_cast<int64_t>(i));
    at += image->positions();
  }
  return {positions, at};
}

PrunedPrefix PrunedPrefix::whole(const Prefix& prefix, size_t boundary) {
  return {"", Mask(prefix.size(), 1), prefix.positions, prefix.next_position, prefix.boundaries[boundary], boundary};
}

PrunedPrefix PrunedPrefix::without(const Removal& removal, const Mask& is_vision) const {
  Mask stays(static_cast<size_t>(size()), 1);
  PrunedPrefix out{removals, present, {}, next_position, hidden, depth};
  size_t token = 0, image = 0;
  for (size_t i = 0; i < present.size(); ++i) {
    if (!present[i]) continue;
    if (is_vision[i]) stays[token] = removal.kept[image++];
    out.present[i] = stays[token++];
  }
  Ids which = indices_of(stays);
  if (hidden->count() == stays.size()) out.hidden = std::make_shared<Rows>(take(*hidden, which));
  if (out.hidden->count() != which.size()) fail(Kind::device, "image tokens continue whose hidden states were not held");
  out.positions = take(positions, which);
  if (removal.renumbers) {
    out.positions = count_up(0, which.size());
    out.next_position = static_cast<int64_t>(which.size());
  }
  out.removals += cat(depth, removal.renumbers ? "r" : "k") +
                  std::string(reinterpret_cast<const char*>(removal.kept.data()), removal.kept.size()) + ";";
  return out;
}

}  // namespace vtxcore
