// DART: of the image tokens, a few pivots stay, and those that duplicate the pivots least.
#include <algorithm>
#include <iterator>

#include "policies/methods/linear.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

constexpr double kTiny = 1e-8;  // least product of two lengths, as torch's cosine_similarity has it
constexpr size_t kFewest = 16;  // tokens; an image with fewer is left whole by the embedding-level form

Rows joined(Rows first, const Rows& second) {
  first.data.insert(first.data.end(), second.data.begin(), second.data.end());
  return first;
}

// The L1 norm of each row.
Floats sizes_of(const Rows& rows) {
  Floats out(rows.count());
  for (size_t i = 0; i < out.size(); ++i) {
    double total = 0;
    for (size_t d = 0; d < rows.width; ++d) total += std::abs(double{rows.row(i)[d]});
    out[i] = static_cast<float>(total);
  }
  return out;
}

// Indices of the `count` largest, the largest first; of equal ones the earlier.
Ids largest(const Floats& values, int64_t count) {
  Ids order = count_up(0, values.size());
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)]; });
  order.resize(std::min(order.size(), static_cast<size_t>(count)));
  return order;
}

// Keeps the `count` tokens least like a pivot of those not kept yet; of equal ones the earlier.
void keep_lowest(const Rows& rows, const Doubles& lengths, const float* pivot, int64_t count, Mask& kept) {
  double length = length_of(pivot, rows.width);
  Ids there = indices_of(kept, false);
  Floats cosines;
  for (int64_t i : there) {
    auto at = static_cast<size_t>(i);
    double cosine = product(pivot, rows.row(at), rows.width) / std::max(length * lengths[at], kTiny);
    cosines.push_back(static_cast<float>(cosine));
  }
  Ids order = count_up(0, there.size());
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return cosines[static_cast<size_t>(a)] < cosines[static_cast<size_t>(b)]; });
  for (size_t i = 0; i < std::min(order.size(), static_cast<size_t>(std::max<int64_t>(0, count))); ++i)
    kept[static_cast<size_t>(there[static_cast<size_t>(order[i])])] = 1;
}

Rows weighted(Rows rows, const Floats& weight) {
  for (size_t i = 0; i < rows.count(); ++i)
    for (size_t d = 0; d < rows.width; ++d) rows.row(i)[d] *= weight[d];
  return rows;
}

// After layer `k`, or with k=0 before layer 1; policies/methods/dart.py says which tokens stay and why.
class Dart : public EntryReduction {
 public:
  using EntryReduction::EntryReduction;
  std::shared_ptr<const Entry> entry() const override { return k_ > 0 ? nullptr : EntryReduction::entry(); }
  bool uses_question() const override { return text_pivots_ > 0; }
  bool keeps_positions() const override { return true; }

  std::optional<Mask> keep_mask(const Boundary& boundary) const override {
    int64_t count = boundary.count(), all = pivots_ + text_pivots_, each = number_to_keep(keep_, count) / all;
    if (count <= pivots_ + each * all) return std::nullopt;
    auto [image_keys, text_keys] = boundary.keys();
    Rows hidden = weighted(boundary.image_hidden(), *boundary.final_norm);
    Rows text = weighted(boundary.question_hidden(), *boundary.final_norm);
    Ids image_pivots = largest(sizes_of(image_keys), pivots_), words = largest(sizes_of(text_keys), text_pivots_);
    Mask kept(static_cast<size_t>(count), 0);
    for (int64_t pivot : image_pivots) kept[static_cast<size_t>(pivot)] = 1;
    Rows pivots = joined(take(hidden, image_pivots), take(text, words));
    Doubles lengths = lengths_of(hidden);
    for (int64_t pivot : turns(boundary, image_pivots, words))
      keep_lowest(hidden, lengths, pivots.row(static_cast<size_t>(pivot)), each, kept);
    return kept;
  }

  std::optional<Ids> select(const ImageTokens& image, const PromptText* question) const override {
    const Rows& rows = image.rows;
    int64_t count = number_to_keep(keep_, static_cast<int64_t>(rows.count()));
    if (rows.count() < kFewest || count >= static_cast<int64_t>(rows.count())) return std::nullopt;
    Ids image_pivots = largest(sizes_of(rows), std::min(pivots_, count));
    Rows pivots = take(rows, image_pivots);
    if (text_pivots_ > 0) pivots = joined(pivots, take(question->hidden, largest(sizes_of(question->hidden), text_pivots_)));
    Mask kept(rows.count(), 0);
    for (int64_t pivot : image_pivots) kept[static_cast<size_t>(pivot)] = 1;
    auto total = static_cast<int64_t>(pivots.count());
    Doubles lengths = lengths_of(rows);
    for (int64_t number = 0; number < total; ++number) {
      int64_t missing = count - count_of(kept), left = total - number;
      keep_lowest(rows, lengths, pivots.row(static_cast<size_t>(number)), (missing + left - 1) / left, kept);
    }
    return indices_of(kept);
  }

 private:
  // In which order the pivots, those of the image counted first, take their tokens.
  Ids turns(const Boundary& boundary, const Ids& image_pivots, const Ids& words) const {
    Ids in_order = count_up(0, image_pivots.size() + words.size());
    if (order_ == "size") return in_order;
    auto [image, text] = boundary.positions();
    Ids positions = take(image, image_pivots), behind = take(text, words), out;
    positions.insert(positions.end(), behind.begin(), behind.end());
    for (int64_t position : set_order(positions))
      out.push_back(std::find(positions.begin(), positions.end(), position) - positions.begin());
    return out;
  }

  const double keep_ = options_.number("keep");
  const int64_t k_ = options_.whole("k"), pivots_ = options_.whole("pivots"), text_pivots_ = options_.whole("text_pivots");
  const std::string order_ = options_.text("order");
};

const Registered<Dart> kDart("dart");

}  // namespace

Ids set_order(const Ids& numbers) {
  auto put = [](Ids& table, int64_t number) {
    auto rest = static_cast<uint64_t>(number);
    size_t last = table.size() - 1, slot = rest & last;
    while (true) {
      for (size_t i = 0, further = slot + 9 <= last ? 9 : 0; i <= further; ++i) {
        if (table[slot + i] == number) return false;
        if (table[slot + i] < 0) {
          table[slot + i] = number;
          return true;
        }
      }
      rest >>= 5;
      slot = (slot * 5 + 1 + rest) & last;
    }
  };
  auto filled = [](const Ids& table) {
    Ids out;
    std::copy_if(table.begin(), table.end(), std::back_inserter(out), [](int64_t number) { return number >= 0; });
    return out;
  };
  Ids table(8, -1);
  size_t count = 0;
  for (int64_t number : numbers) {
    if (!put(table, number) || ++count * 5 < (table.size() - 1) * 3) continue;
    size_t size = 8;
    while (size <= count * (count > 50000 ? 2 : 4)) size *= 2;
    Ids larger(size, -1);
    for (int64_t old : filled(table)) put(larger, old);
    table = std::move(larger);
  }
  return filled(table);
}

}  // namespace vtxcore
