// CDPruner: only image tokens that are relevant to the question and unlike each other enter the decoder.
#include <algorithm>
#include <limits>

#include "policies/methods/linear.hpp"
#include "policies/methods/reductions.hpp"

namespace vtxcore {
namespace {

constexpr float kOffset = 1e-6f;  // of the least relevant token, as in the released code

Floats lengths_of(const Rows& rows) {
  Floats out(rows.count());
  for (size_t i = 0; i < out.size(); ++i) out[i] = std::max(length_of(rows.row(i), rows.width), 1e-30f);
  return out;
}

// Cosines [n, n]; that of a row with itself is 1, or rounding would choose the first pick.
Floats cosines_of(const Rows& rows, const Floats& lengths) {
  size_t count = rows.count();
  Rows unit = rows;
  for (size_t i = 0; i < count; ++i)
    for (size_t d = 0; d < rows.width; ++d) unit.row(i)[d] /= lengths[i];
  Floats out(count * count, 1.0f);
  for (size_t i = 0; i < count; ++i)
    for (size_t j = 0; j < i; ++j) out[i * count + j] = out[j * count + i] = dot(unit.row(i), unit.row(j), rows.width);
  return out;
}

// Relevance from almost 0 to a little over 1; all 1 where all are equal.
void scale(Floats& relevance) {
  auto [least, most] = std::minmax_element(relevance.begin(), relevance.end());
  float low = *least, span = *most - *least;
  for (float& value : relevance) value = span > 0 ? (value - low + kOffset) / span : 1.0f;
}

// Indices, rising, of `count` rows of `kernel` [n, n] that greedily maximise the determinant of its submatrix. Of
// equal gains the earlier row is taken. Where no row gains any more, the earliest of the rest are.
Ids greedy(const Floats& kernel, size_t n, size_t count) {
  Floats gain(n), factors(count * n);
  Mask taken(n, 0);
  for (size_t i = 0; i < n; ++i) gain[i] = kernel[i * n + i];
  for (size_t step = 0; step < count; ++step) {
    size_t best = n;
    for (size_t i = 0; i < n; ++i)
      if (!taken[i] && (best == n || gain[i] > gain[best])) best = i;
    if (gain[best] <= 0) {
      Ids rest = indices_of(taken, false);
      for (size_t i = 0; i < count - step; ++i) taken[static_cast<size_t>(rest[i])] = 1;
      break;
    }
    float root = std::sqrt(gain[best]);
    float* factor = &factors[step * n];
    for (size_t i = 0; i < n; ++i) {
      float seen = 0;
      for (size_t s = 0; s < step; ++s) seen += factors[s * n + best] * factors[s * n + i];
      factor[i] = (kernel[best * n + i] - seen) / root;
    }
    for (size_t i = 0; i < n; ++i) gain[i] -= factor[i] * factor[i];
    taken[best] = 1;
  }
  return indices_of(taken);
}

// Of each image `keep` tokens enter: those that a determinantal point process picks greedily (CDPruner, MAP). Its
// kernel is r_i * cos(x_i, x_j) * r_j over the projector's output x; the relevance r is the cosine of x with the mean
// input embedding of the text after the images, or CLIP's of patch and question (text=tower), scaled to 0..1.
class CdPruner : public Method, public Entry, public std::enable_shared_from_this<CdPruner> {
 public:
  CdPruner(double keep, std::string text) : keep_(keep), text_(std::move(text)) { check_keep("cdpruner", keep); }
  std::string name() const override { return "cdpruner"; }
  std::string spec() const override { return "cdpruner:keep=" + spec_number(keep_) + ",text=" + text_; }
  std::string key() const override { return spec(); }
  std::shared_ptr<const Entry> entry() const override { return shared_from_this(); }
  Needs needs() const override {
    Needs needs;
    needs.text_tower = text_ == "tower";
    return needs;
  }
  bool uses_question() const override { return text_ != "none"; }

  std::optional<Ids> select(const ImageTokens& image, const PromptText* question) const override {
    size_t n = image.rows.count();
    int64_t count = number_to_keep(keep_, static_cast<int64_t>(n));
    if (count >= static_cast<int64_t>(n)) return std::nullopt;
    Floats lengths = lengths_of(image.rows);
    Floats kernel = cosines_of(image.rows, lengths);
    if (uses_question()) {
      Floats relevance = text_ == "tower" ? seen_by_clip(image.patches.clip, question->embeddings)
                                          : relevance_of(image.rows, lengths, *question);
      scale(relevance);
      for (size_t i = 0; i < n; ++i)
        for (size_t j = 0; j < n; ++j) kernel[i * n + j] = relevance[i] * kernel[i * n + j] * relevance[j];
    }
    return greedy(kernel, n, static_cast<size_t>(count));
  }

 private:
  static Floats relevance_of(const Rows& rows, const Floats& lengths, const PromptText& question) {
    Ids after = indices_of(question.after);
    Floats mean(rows.width);
    for (size_t d = 0; d < rows.width; ++d) {
      double total = 0;
      for (int64_t i : after) total += double{question.hidden.row(static_cast<size_t>(i))[d]};
      mean[d] = static_cast<float>(total / static_cast<double>(after.size()));
    }
    float length = std::max(length_of(mean.data(), mean.size()), 1e-30f);
    Floats out(rows.count());
    for (size_t i = 0; i < out.size(); ++i) out[i] = dot(rows.row(i), mean.data(), rows.width) / (lengths[i] * length);
    return out;
  }

  // The authors' form for LLaVA: the cosine of patch and question in CLIP's space, its sign turned; of several segments
  // the mean.
  static Floats seen_by_clip(const Rows& patches, const Rows& embeddings) {
    Floats lengths = lengths_of(patches), widths = lengths_of(embeddings), out(patches.count());
    for (size_t i = 0; i < out.size(); ++i) {
      float total = 0;
      for (size_t j = 0; j < embeddings.count(); ++j)
        total += dot(patches.row(i), embeddings.row(j), patches.width) / (lengths[i] * widths[j]);
      out[i] = -(total / static_cast<float>(embeddings.count()));
    }
    return out;
  }

  double keep_;
  std::string text_;
};

}  // namespace

MethodPtr make_cdpruner(SpecOptions& options) {
  double keep = options.number("keep", 0.25);
  return std::make_shared<CdPruner>(keep, options.one_of("text", {"embedding", "none", "tower"}));
}

}  // namespace vtxcore
