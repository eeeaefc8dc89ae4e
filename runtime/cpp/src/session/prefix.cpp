#include "session/prefix.hpp"

#include <algorithm>

#include "bundle/names.hpp"

namespace vtxcore {
namespace {

// Which tokens `count` hidden states are of: all, all but the images' among the first `common` ones, or the text.
Mask tokens_of(const Mask& is_vision, size_t common, size_t count) {
  Mask all(is_vision.size(), 1), some = all, text = all;
  for (size_t i = 0; i < all.size(); ++i) {
    text[i] = !is_vision[i];
    some[i] = text[i] || i >= common;
  }
  for (const Mask& mask : {all, some})
    if (static_cast<size_t>(count_of(mask)) == count) return mask;
  return text;
}

// Of these hidden states those of the text among the first `count` tokens.
Rows text_of(const Rows& hidden, const Mask& is_vision, size_t common, size_t count) {
  Mask held = tokens_of(is_vision, common, hidden.count());
  Ids which;
  int64_t row = 0;
  for (size_t i = 0; i < count; ++i) {
    if (held[i] && !is_vision[i]) which.push_back(row);
    row += held[i];
  }
  return take(hidden, which);
}

}  // namespace

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

void Prefix::deepen(Rows hidden, bool hold) {
  if (start() > 0) {
    Rows all = *begun[depth()];
    vtxcore::append(all, hidden);
    hidden = std::move(all);
  }
  if (!hold && depth() > 0)
    boundaries.back() = std::make_shared<Rows>(text_of(*boundaries.back(), is_vision, common, size()));
  boundaries.push_back(std::make_shared<Rows>(std::move(hidden)));
}

std::vector<SharedRows> Prefix::text_states(size_t count) const {
  std::vector<SharedRows> out;
  for (size_t i = 1; i < boundaries.size(); ++i)
    out.push_back(std::make_shared<Rows>(text_of(*boundaries[i], is_vision, common, count)));
  return out;
}

size_t Prefix::agreement(const Prefix& other) const {
  const Rows &mine = *boundaries.front(), &theirs = *other.boundaries.front();
  size_t most = std::min(size(), other.size()), count = 0;
  auto same_row = [&count](const Rows& a, const Rows& b) {
    return std::equal(a.row(count), a.row(count) + a.width, b.row(count), b.row(count) + b.width);
  };
  for (; count < most; ++count) {
    if (is_vision[count] != other.is_vision[count] || positions[count] != other.positions[count]) break;
    bool same = same_row(mine, theirs);
    for (const auto& [name, rows] : inputs) same = same && same_row(rows, other.inputs.at(name));
    if (!same) break;
  }
  return count;
}

void Prefix::follow(const Prefix& other) {
  size_t count = other.saved_kv.empty() && other.depth() > 0 ? agreement(other) : 0;
  auto groups = inputs.find(names::kGroup);
  if (groups != inputs.end() && count < size() && groups->second.data[count] >= 0) {  // none is cut in two
    const Floats& of = groups->second.data;
    count = std::min(count, static_cast<size_t>(std::find(of.begin(), of.end(), of[count]) - of.begin()));
  }
  if (count > 0) common = count, begun = other.text_states(count), filed = std::min(count, other.filed);
}

void Prefix::run_from(size_t token) {
  common = std::min(common, token);
  if (common == 0) begun.clear();
  for (SharedRows& rows : begun) rows = std::make_shared<Rows>(take(*rows, count_up(0, common)));
}

bool Prefix::held(size_t boundary) const { return boundary > depth() || boundaries[boundary]->count() == size(); }

void Prefix::rewind(size_t boundary) {
  while (!held(boundary)) --boundary;
  if (boundary < depth()) boundaries.resize(boundary + 1);
}

std::pair<Positions, int64_t> place(const Mask& is_vision, const Images& images) {
  if (std::none_of(images.begin(), images.end(), [](const ImagePtr& image) { return image->offsets.has_value(); }))
    return {text_positions(0, is_vision.size()),
            static_cast<int64_t>(is_vision.size())};  // text may stand among an image's tokens
  Positions positions(is_vision.size());
  int64_t at = 0;
  size_t token = 0;
  for (const ImagePtr& image : images) {
    size_t count = image->rows.count(), first = 0;
    Positions offsets = image->offsets ? *image->offsets : text_positions(0, count);
    Ids runs = image->runs;
    runs.erase(std::remove(runs.begin(), runs.end(), 0), runs.end());
    if (runs.empty()) runs = {static_cast<int64_t>(count)};
    for (int64_t run : runs) {
      if (run > 0)
        for (; !is_vision[token]; ++at) positions[token++] = {at, at, at};
      for (size_t end = first + static_cast<size_t>(run); first < end; ++first) {
        for (size_t part = 0; part < 3; ++part) positions[token][part] = at + offsets[first][part];
        ++token;
      }
      at += image->offsets ? image->span : static_cast<int64_t>(count);
    }
  }
  return {positions, at};
}

PrunedPrefix PrunedPrefix::whole(const Prefix& prefix, size_t boundary) {
  return {{},       Mask(prefix.size(), 1), prefix.positions, prefix.next_position, prefix.boundaries[boundary],
          boundary, prefix.common};
}

PrunedPrefix PrunedPrefix::without(const Removal& removal, const Mask& is_vision) const {
  Mask stays(static_cast<size_t>(size()), 1), of_image(stays.size());
  PrunedPrefix out{removals, present, {}, next_position, hidden, depth};
  size_t token = 0, image = 0;
  for (size_t i = 0; i < present.size(); ++i) {
    if (!present[i]) continue;
    of_image[token] = is_vision[i];
    if (is_vision[i]) stays[token] = removal.kept[image++];
    out.present[i] = stays[token++];
  }
  Ids which = indices_of(stays), rows;
  int64_t row = 0;
  Mask held = tokens_of(of_image, common, hidden->count());
  for (size_t i = 0; i < held.size(); ++i) {
    if (held[i] && stays[i]) rows.push_back(row);
    row += held[i];
  }
  out.hidden = std::make_shared<Rows>(take(*hidden, rows));
  if (rows.size() != which.size()) fail(Kind::device, "image tokens continue whose hidden states were not held");
  out.positions = take(positions, which);
  if (removal.renumbers) {
    out.positions = text_positions(0, which.size());
    out.next_position = static_cast<int64_t>(which.size());
  }
  out.removals.push_back({depth, removal.renumbers, removal.kept});
  return out;
}

void PrunedPrefix::follow(const PrunedPrefix& other, size_t agreed, size_t stages) {
  if (removals.size() != 1 || other.removals.size() != 1 || other.depth < stages) return;
  const Removed &mine = removals.front(), &theirs = other.removals.front();
  if (mine.boundary != theirs.boundary || mine.renumbers != theirs.renumbers) return;
  if (count_of(mine.kept) + count_of(theirs.kept) > 0) return;
  auto count = std::count(present.begin(), present.begin() + static_cast<std::ptrdiff_t>(agreed), 1);
  if (!std::equal(positions.begin(), positions.begin() + count, other.positions.begin())) return;
  common = static_cast<size_t>(count);
  hidden = std::make_shared<Rows>(take(*hidden, count_up(count, hidden->count() - common)));
}

}  // namespace vtxcore
