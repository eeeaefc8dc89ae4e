#include "api/model.hpp"

#include <chrono>

#include "backends/devices.hpp"
#include "backends/tables.hpp"
#include "bundle/sha256.hpp"

namespace vtxcore {

Model::Model(const std::string& bundle, const LoadOptions& options) : bundle_(bundle), fit_(options.fit) {
  auto start = std::chrono::steady_clock::now();
  fitted(manifest().image, fit_);
  if (options.threads < 0) fail(Kind::request, "threads is ", options.threads, "; it must be at least 1, or 0 for all cores");
  backend_ = open_backend(bundle_, options.device, {options.threads, options.library, options.compute});
  try {
    text_.emplace(bundle_);
  } catch (const Error& error) {
    no_text_ = error.what();  // ids can still be asked about
  }
  std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  load_ms_ = took.count();
}

const Text& Model::text() const {
  if (!text_) throw Error(Kind::bundle, no_text_);
  return *text_;
}

PreparedImage Model::prepare(const Picture& picture, const std::string& fit) const {
  ImageSettings settings = fitted(manifest().image, fit.empty() ? fit_ : fit);
  Floats pixels = preprocess(picture, settings);
  std::string key = sha256_hex({reinterpret_cast<const char*>(pixels.data()), pixels.size() * sizeof(float)});
  return {std::move(pixels), key, manifest().image_tokens};
}

Policy Model::policy(const Options& options) const {
  const Manifest& m = manifest();
  std::string k = options.k == "default" ? m.default_k : options.k;
  std::string reduce = options.reduce;
  if (reduce == "default") reduce = m.reductions.empty() ? "none" : m.reductions.front();
  auto odds = [this](int64_t layer, const Rows& rows) { return backend_->gate(layer, rows); };
  auto norm = [this] { return read_final_norm(bundle_); };
  return make_policy(k, reduce, m, backend_->dialect, odds, options.gate_threshold, norm);
}

}  // namespace vtxcore
