// CDPruner: only image tokens that are relevant to the question and unlike each other enter the decoder.
#include <algorithm>

#include "bundle/names.hpp"
#include "policies/methods/linear.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

constexpr double kOffset = 1e-6;  // of the least relevant token, as in the released code
constexpr double kNoise = 1e-10;  // relative: what differs by less is equal

// Relevance from almost 0 to a little over 1; all 1 where all are equal.
void scale(Doubles& relevance) {
  auto [least, most] = std::minmax_element(relevance.begin(), relevance.end());
  double low = *least, span = *most - *least;
  for (double& value : relevance) value = span > kNoise ? (value - low + kOffset) / span : 1.0;
}

// Indices, rising, of `count` tokens that greedily maximise the determinant of their kernel [n, n], which is
// relevance_i * cosines_ij * relevance_j. Of equal gains the earlier token is taken. Where no token gains any more, the
// earliest of the rest are.
Ids greedy(const Floats& cosines, const Doubles& relevance, size_t count) {
  size_t n = relevance.size();
  Doubles gain(n), none(n), factors(count * n);
  Mask taken(n, 0);
  for (size_t i = 0; i < n; ++i) gain[i] = relevance[i] * relevance[i], none[i] = kNoise * gain[i];
  for (size_t step = 0; step < count; ++step) {
    double most = 0;
    for (size_t i = 0; i < n; ++i)
      if (!taken[i]) most = std::max(most, gain[i]);
    if (most <= 0) {
      Ids rest = indices_of(taken, false);
      for (size_t i = 0; i < count - step; ++i) taken[static_cast<size_t>(rest[i])] = 1;
      break;
    }
    size_t best = 0;
    while (taken[best] || gain[best] < most * (1 - kNoise)) ++best;
    double* factor = &factors[step * n];
    for (size_t i = 0; i < n; ++i) factor[i] = relevance[best] * double{cosines[best * n + i]} * relevance[i];
    for (size_t s = 0; s < step; ++s) subtract(factors[s * n + best], &factors[s * n], factor, n);
    double root = std::sqrt(gain[best]);
    for (size_t i = 0; i < n; ++i) {
      factor[i] /= root;
      gain[i] -= factor[i] * factor[i];
      if (gain[i] <= none[i]) gain[i] = 0;
    }
    taken[best] = 1;
  }
  return indices_of(taken);
}

// Of each image, or of each view of one in tiles, `keep` tokens enter: those that a determinantal point process picks
// greedily (CDPruner, MAP). Its kernel is r_i * cos(x_i, x_j) * r_j over the projector's output x; the relevance r is the
// cosine of x with the mean input embedding of the text after the images, or CLIP's of patch and question (text=tower),
// scaled to 0..1 over all views. Sums are those of policies/methods/cdpruner.py, which says why they are in double.
class CdPruner : public EntryReduction {
 public:
  using EntryReduction::EntryReduction;
  bool uses_question() const override { return text_ != "none"; }

  std::optional<Ids> select(const ImageTokens& image, const PromptText* question) const override {
    const std::vector<Ids> views = image.patches.of_views();
    Ids seen, kept, counts;
    bool all = true;
    for (const Ids& own : views) {
      auto n = static_cast<int64_t>(own.size());
      counts.push_back(std::min(n, number_to_keep(keep_, n)));
      all &= counts.back() == n;
      seen.insert(seen.end(), own.begin(), own.end());
    }
    if (all) return std::nullopt;
    Doubles relevance(seen.size(), 1.0), lengths;  // view after view
    std::vector<const Likeness*> likeness;
    for (const Ids& own : views) {
      likeness.push_back(&likeness_of(image, own.size() < image.rows.count() ? &own : nullptr));
      lengths.insert(lengths.end(), likeness.back()->lengths.begin(), likeness.back()->lengths.end());
    }
    if (uses_question()) {
      relevance = text_ == "tower"
                      ? take(seen_by_clip(image.patches.states.at(names::kClipPatches), question->embeddings), seen)
                      : relevance_of(image.rows, seen, lengths, *question);
      scale(relevance);
    }
    auto from = relevance.begin();
    for (size_t view = 0; view < views.size(); ++view) {
      const Ids& own = views[view];
      Doubles mine(from, from + static_cast<std::ptrdiff_t>(own.size()));
      from += static_cast<std::ptrdiff_t>(own.size());
      for (int64_t i : greedy(likeness[view]->cosines, mine, static_cast<size_t>(counts[view])))
        kept.push_back(own[static_cast<size_t>(i)]);
    }
    std::sort(kept.begin(), kept.end());
    return kept;
  }

 private:
  static Doubles relevance_of(const Rows& rows, const Ids& seen, const Doubles& lengths, const PromptText& question) {
    Ids after = indices_of(question.after);
    Doubles mean(rows.width);
    for (size_t d = 0; d < rows.width; ++d) {
      for (int64_t i : after) mean[d] += double{question.hidden.row(static_cast<size_t>(i))[d]};
      mean[d] /= static_cast<double>(after.size());
    }
    double length = length_of(mean.data(), mean.size());
    Doubles out(seen.size());
    for (size_t i = 0; i < out.size(); ++i)
      out[i] = product(rows.row(static_cast<size_t>(seen[i])), mean.data(), rows.width) / (lengths[i] * length);
    return out;
  }

  // The authors' form for LLaVA: the cosine of patch and question in CLIP's space, its sign turned; of several segments
  // the mean.
  static Doubles seen_by_clip(const Rows& patches, const Rows& embeddings) {
    Doubles lengths = lengths_of(patches), widths = lengths_of(embeddings), out(patches.count());
    for (size_t i = 0; i < out.size(); ++i) {
      for (size_t j = 0; j < embeddings.count(); ++j)
        out[i] -= product(patches.row(i), embeddings.row(j), patches.width) / (lengths[i] * widths[j]);
      out[i] /= static_cast<double>(embeddings.count());
    }
    return out;
  }

  const double keep_ = options_.number("keep");
  const std::string text_ = options_.text("text");
};

const Registered<CdPruner> kCdPruner("cdpruner");

}  // namespace

}  // namespace vtxcore
