#include <algorithm>

#include "prompt/pieces.hpp"
#include "prompt/unicode.hpp"

namespace vtxcore {
namespace {

std::string text_of(const Json& spec, const char* key) {
  const Json* found = spec.find(key);
  if (!found || !found->string()) unknown(std::string("a normalizer with no ") + key);
  return *found->string();
}

// Each run of at least `least` of one character becomes `to`.
Codes runs_replaced(const Codes& text, char32_t of, size_t least, const Codes& to) {
  Codes out;
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    while (end < text.size() && text[end] == of) ++end;
    if (end - at >= least) {
      out += to;
      at = end;
    } else {
      end = std::max(end, at + 1);
      out.append(text, at, end - at);
      at = end;
    }
  }
  return out;
}

// Each run of white space becomes `to`.
Codes spaces_replaced(const Codes& text, const Codes& to) {
  Codes out;
  for (size_t at = 0; at < text.size(); ++at) {
    if (!is_white_space(text[at]))
      out += text[at];
    else if (at == 0 || !is_white_space(text[at - 1]))
      out += to;
  }
  return out;
}

Codes stripped(const Codes& text, bool left, bool right) {
  size_t start = 0, end = text.size();
  while (left && start < end && is_white_space(text[start])) ++start;
  while (right && end > start && is_white_space(text[end - 1])) --end;
  return text.substr(start, end - start);
}

}  // namespace

Normalizer::Normalizer(const Json* spec) {
  if (spec && !spec->is_null()) add(*spec);
}

void Normalizer::add(const Json& spec) {
  std::string type = text_of(spec, "type");
  if (type == "Sequence") {
    const Json* list = spec.find("normalizers");
    if (!list || !list->array()) unknown("a normalizer with a Sequence of nothing");
    for (const Json& item : *list->array()) add(item);
    return;
  }
  Normalize step{Normalize::form, false, false, false, false, {}, {}, 1};
  if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    step.compatible = type.size() == 4;
    step.composed = type.back() == 'C';
  } else if (type == "Lowercase") {
    step.type = Normalize::lower;
  } else if (type == "Prepend") {
    step.type = Normalize::prepend;
    step.to = decode_utf8(text_of(spec, "prepend"));
  } else if (type == "Strip") {
    step.type = Normalize::strip;
    step.left = spec.flag("strip_left"), step.right = spec.flag("strip_right");
  } else if (type == "Replace") {
    const Json* pattern = spec.find("pattern");
    std::string plain = pattern ? pattern->text("String") : "", regex = pattern ? pattern->text("Regex") : "";
    step.to = decode_utf8(text_of(spec, "content"));
    if (!plain.empty()) {
      step.type = Normalize::replace;
      step.from = decode_utf8(plain);
    } else if (regex == " +" || regex == " {2,}") {
      step.type = Normalize::runs;
      step.from = U" ";
      step.least = regex == " +" ? 1 : 2;
    } else if (regex == "\\s+") {
      step.type = Normalize::spaces;
    } else {
      unknown("a normalizer with a Replace by an unknown pattern");
    }
  } else {
    unknown("a normalizer with the step " + type.substr(0, 40));
  }
  steps_.push_back(std::move(step));
}

Codes Normalizer::operator()(Codes text) const {
  for (const Normalize& step : steps_) switch (step.type) {
      case Normalize::form: text = normal_form(text, step.compatible, step.composed); break;
      case Normalize::lower: text = lower_case(text); break;
      case Normalize::replace: text = replaced(text, step.from, step.to); break;
      case Normalize::runs: text = runs_replaced(text, step.from[0], step.least, step.to); break;
      case Normalize::spaces: text = spaces_replaced(text, step.to); break;
      case Normalize::prepend:
        if (!text.empty()) text.insert(0, step.to);
        break;
      case Normalize::strip: text = stripped(text, step.left, step.right); break;
    }
  return text;
}

}  // namespace vtxcore
