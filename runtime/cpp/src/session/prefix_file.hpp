// A file with the beginning of a prompt, text and images before the last one: what stages' caches hold of it.
//
// It is the Python runtime's file: safetensors, bound to the bundle, the engine and its arithmetic, with a SHA-256 of its
// tensors. A session takes its K and V for the tokens that enter the decoder as the file's did, and for no others.
#pragma once

#include <string>

#include "bundle/bundle.hpp"
#include "session/session.hpp"

namespace vtxcore {

// Writes what the caches hold of the tokens before the last image, unless the file that was loaded, or saved before, has all
// of it; a file that was there is replaced at once.
// Throws Error(request): there is none, K and V stay on the device, or it cannot be written.
void save_prefix(const std::string& path, const Bundle& bundle, const Backend& backend, Session& session);

// Begins a session that has run nothing with the tokens of a file. Throws Error(bundle) for one of another bundle, or a
// damaged one; the session is then as before.
void load_prefix(const std::string& path, const Bundle& bundle, Backend& backend, Session& session);

}  // namespace vtxcore
