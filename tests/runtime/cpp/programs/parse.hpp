// Reading one untrusted file of a kind, as the library does: what vtx-cpp-probe and the fuzz targets run.
#pragma once

#include <stdexcept>
#include <string>

#include "bundle/manifest.hpp"
#include "bundle/safetensors.hpp"
#include "prompt/template.hpp"
#include "prompt/tokenizer.hpp"
#include "vision/layout.hpp"
#include "vision/picture.hpp"

namespace vtxcore {

// Throws Error where the content is refused, and std::runtime_error where the kind is unknown.
inline void parse(const std::string& kind, const std::string& content) {
  if (kind == "manifest") {
    Manifest m = parse_manifest(content);
    read_layout(m.layout, m.model.tower);
  } else if (kind == "safetensors") {
    unpack(content, "the file");
  } else if (kind == "tokenizer") {
    Tokenizer tokenizer(content);
    Ids ids;
    for (const TokenAt& token : tokenizer.encode("A caf\xC3\xA9, <s> 12\n\xF0\x9F\x98\x80  it's")) ids.push_back(token.id);
    tokenizer.decode(ids);
  } else if (kind == "template") {
    TextSettings settings;
    settings.image_token = "<image>";
    std::vector<Message> messages{{"system", {{false, "a"}}}, {"user", {{true, ""}, {false, " \xC3\xA9 "}}}};
    for (int turn = 0; turn < 2; ++turn)
      messages.insert(messages.end(), {{"assistant", {{false, "b"}}}, {"user", {{false, "c"}}}});
    ChatTemplate(content, settings).render(messages);
  } else if (kind == "image") {
    decode_picture(content, "the image");
  } else {
    throw std::runtime_error("there is no kind " + kind);
  }
}

}  // namespace vtxcore
