// Releases that this device has answered with, so that an older signed bundle does not take the place of a newer one.
// Where they are noted, and how, says runtime/bundle/releases.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "bundle/manifest.hpp"
#include "bundle/seal.hpp"

namespace vtxcore {

// Throws Error(bundle) for a release below one that was noted, for none where this key's bundles have releases, and for
// one whose last day has passed by this device's clock.
void check_release(const std::optional<BundleRelease>& release, const PublicKey& key, const std::string& folder);

// Notes a release that answers are computed with. Throws Error(device) if that is not possible.
void note_release(const BundleRelease& release, const PublicKey& key);

}  // namespace vtxcore
