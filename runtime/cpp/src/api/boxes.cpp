#include "api/boxes.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>

#include "base/json.hpp"

namespace vtxcore {
namespace {

constexpr char kBlank[] = " \t\r\n";
constexpr char kEdges[] = " \t\r\n,;:.()[]{}`\"'";  // of a label

struct Written {
  size_t begin, end;
  std::array<double, 4> numbers;
};

bool is_digit(const std::string& text, size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '9'; }

// The box that is written at a place: of the pattern's characters # is a number and a blank any number of blanks.
std::optional<Written> match(const std::string& text, size_t at, const std::string& pattern) {
  Written out{at, at, {}};
  size_t count = 0;
  for (char wanted : pattern) {
    if (wanted == ' ') {
      at = std::min(text.find_first_not_of(kBlank, at), text.size());
    } else if (wanted == '#') {
      const size_t first = at;
      while (is_digit(text, at)) ++at;
      if (at == first || count == out.numbers.size()) return std::nullopt;
      if (at < text.size() && text[at] == '.' && is_digit(text, at + 1))
        for (++at; is_digit(text, at);) ++at;
      out.numbers[count++] = std::strtod(text.substr(first, at - first).c_str(), nullptr);
    } else if (at < text.size() && text[at] == wanted) {
      ++at;
    } else {
      return std::nullopt;
    }
  }
  out.end = at;
  return out;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(kEdges);
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(kEdges) - first + 1);
}

// The last line of a text, without marks and punctuation around it.
std::string label_of(std::string text) {
  for (size_t at = text.find('<'); at != std::string::npos; at = text.find('<', at)) {
    const size_t end = text.find_first_of("<>", at + 1);
    if (end != std::string::npos && text[end] == '>')
      text.erase(at, end - at + 1);
    else
      ++at;
  }
  text = trimmed(text);
  const size_t line = text.rfind('\n');
  return line == std::string::npos ? text : trimmed(text.substr(line + 1));
}

// The label of the JSON object around a box; empty if it has none, or is cut.
std::string label_inside(const std::string& text, const Written& box) {
  const size_t begin = text.substr(0, box.begin).rfind('{'), end = text.find('}', box.end);
  if (begin == std::string::npos || end == std::string::npos) return "";
  try {
    return parse_json(text.substr(begin, end - begin + 1), "a box", Kind::request).text("label");
  } catch (const Error&) {
    return "";
  }
}

}  // namespace

void check_boxes(const Manifest& manifest, const std::vector<PreparedImage>& images) {
  if (!manifest.text.boxes)
    fail(Kind::request, manifest.model.name,
         " has no stated form of boxes in its answers, or was exported before vtx knew it; leave boxes out, or export again");
  if (images.size() != 1 || images.front().video)
    fail(Kind::request, "boxes are of one picture, and ", images.size(), " images and videos are given; ask about one");
}

std::vector<Box> read_boxes(const std::string& text, const BoxForm& form, const PreparedImage& image) {
  std::vector<Written> written;
  for (size_t at = 0; at < text.size();) {
    std::optional<Written> box = match(text, at, form.pattern);
    if (box) written.push_back(*box);
    at = box ? box->end : at + 1;
  }
  const Pixels& view = image.views.front();
  const auto across = static_cast<double>(form.scale.value_or(view.width));
  const auto down = static_cast<double>(form.scale.value_or(view.height));
  auto placed = [](double first, double last, double share, int64_t side) {
    return std::min(std::max(first + share * (last - first), 0.0), static_cast<double>(side));
  };
  std::vector<Box> boxes;
  std::string label;
  size_t end = 0;
  for (size_t i = 0; i < written.size(); ++i) {
    const Written& box = written[i];
    if (form.label == "inside") {
      label = label_inside(text, box);
    } else if (form.label == "after") {
      const size_t next = i + 1 < written.size() ? written[i + 1].begin : text.size();
      std::string behind = text.substr(box.end, next - box.end);
      label = label_of(behind.substr(0, behind.find(';')));
    } else if (std::string own = label_of(text.substr(end, box.begin - end)); !own.empty()) {
      label = own;
    }
    end = box.end;
    const size_t x = form.rows_first ? 1 : 0, y = 1 - x;
    const Region& region = image.region;
    double left = placed(region.left, region.right, box.numbers[x] / across, image.width);
    double right = placed(region.left, region.right, box.numbers[x + 2] / across, image.width);
    double top = placed(region.top, region.bottom, box.numbers[y] / down, image.height);
    double bottom = placed(region.top, region.bottom, box.numbers[y + 2] / down, image.height);
    boxes.push_back({label, std::min(left, right), std::min(top, bottom), std::max(left, right), std::max(top, bottom)});
  }
  return boxes;
}

}  // namespace vtxcore
