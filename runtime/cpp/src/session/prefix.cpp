#include "session/prefix.hpp"

#include <algorithm>

#include "bundle/names.hpp"

namespace vtxcore {
namespace {

// Whether the i-th rows of both are equal.
bool same_row(const Rows& a, const Rows& b, size_t i) {
  return a.width == b.width && std::equal(a.row(i), a.row(i) + a.width, b.row(i));
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

size_t Prefix::agreement(const Prefix& other) const {
  size_t most = std::min(size(), other.size()), count = 0;
  if (this == &other) return most;
  if (question != other.question) return 0;
  for (; count < most; ++count) {
    if (is_vision[count] != other.is_vision[count] || positions[count] != other.positions[count]) break;
    bool same = same_row(hidden, other.hidden, count);
    for (const auto& [name, rows] : inputs) same = same && same_row(rows, other.inputs.at(name), count);
    if (!same) break;
  }
  return count;
}

std::string Prefix::difference(const Prefix& former) const {
  size_t count = agreement(former);
  if (count == size()) return "";
  if (former.size() == 0) return "first";
  if (question != former.question) return "question";
  return is_vision[count] ? "image" : "text";
}

size_t Prefix::begin_of_group(size_t token) const {
  auto groups = inputs.find(names::kGroup);
  if (groups == inputs.end() || token >= size()) return token;
  const Floats& of = groups->second.data;
  if (of[token] < 0) return token;
  return std::min(token, static_cast<size_t>(std::find(of.begin(), of.end(), of[token]) - of.begin()));
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

RemainingPtr Remaining::of(Prefix prefix) {
  auto shared = std::make_shared<const Prefix>(std::move(prefix));
  return std::make_shared<const Remaining>(
      Remaining{shared, Mask(shared->size(), 1), shared->positions, shared->next_position, {}});
}

Mask Remaining::is_vision() const { return take(prefix->is_vision, indices_of(present)); }

size_t Remaining::agreement(const Remaining& other) const {
  if (this == &other) return size();
  if (removals != other.removals || !serves_all() || !other.serves_all()) return 0;
  size_t count = prefix->agreement(*other.prefix);
  if (count < prefix->size() || count < other.prefix->size())
    count = std::min(prefix->begin_of_group(count), other.prefix->begin_of_group(count));
  return static_cast<size_t>(std::count(present.begin(), present.begin() + static_cast<std::ptrdiff_t>(count), 1));
}

size_t Remaining::begin_of_group(size_t token) const {
  if (token >= size()) return token;
  size_t first = prefix->begin_of_group(static_cast<size_t>(indices_of(present)[token]));
  return static_cast<size_t>(std::count(present.begin(), present.begin() + static_cast<std::ptrdiff_t>(first), 1));
}

RemainingPtr Remaining::without(const Removal& removal, size_t number) const {
  Remaining out{prefix, present, {}, next_position, removals};
  size_t token = 0, image = 0;
  for (size_t i = 0; i < present.size(); ++i) {
    if (!present[i]) continue;
    if (prefix->is_vision[i]) out.present[i] = removal.kept[image++];
    if (out.present[i]) out.positions.push_back(positions[token]);
    ++token;
  }
  if (removal.renumbers) {
    out.next_position = static_cast<int64_t>(out.size());
    out.positions = text_positions(0, out.size());
  }
  out.removals.emplace_back(number, removal.renumbers);
  return std::make_shared<const Remaining>(std::move(out));
}

void Segment::cut_back(const RemainingPtr& other, size_t length) {
  Mask first(known.begin(), known.begin() + static_cast<std::ptrdiff_t>(length));
  auto count = static_cast<size_t>(count_of(first));
  if (count < states->count()) states = std::make_shared<const Rows>(take(*states, count_up(0, count)));
  tokens = other;
  known = std::move(first);
  saved.reset();
}

void Segment::extend(Rows hidden, const Mask& more) {
  if (states->count() > 0) {
    Rows all = *states;
    vtxcore::append(all, hidden);
    hidden = std::move(all);
  }
  states = std::make_shared<const Rows>(std::move(hidden));
  known.insert(known.end(), more.begin(), more.end());
}

void Segment::leave_text() {
  Mask text = known, is_vision = tokens->is_vision();
  Ids rows;
  int64_t row = 0;
  for (size_t i = 0; i < known.size(); ++i) {
    text[i] = known[i] && !is_vision[i];
    if (text[i]) rows.push_back(row);
    row += known[i];
  }
  states = std::make_shared<const Rows>(take(*states, rows));
  known = std::move(text);
}

Rows Segment::states_of(const Ids& indices) const {
  Ids row_of, rows;
  int64_t row = 0;
  for (uint8_t bit : known) row_of.push_back(bit ? row++ : -1);
  row_of.resize(std::max(row_of.size(), tokens->size()), -1);  // those that it does not hold
  for (int64_t index : indices) rows.push_back(row_of[static_cast<size_t>(index)]);
  if (std::find(rows.begin(), rows.end(), -1) != rows.end())
    fail(Kind::device, "image tokens continue whose hidden states were not kept");
  return take(*states, rows);
}

}  // namespace vtxcore
