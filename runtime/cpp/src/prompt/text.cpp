#include "prompt/text.hpp"

#include <algorithm>

#include "prompt/masking.hpp"
#include "prompt/pieces.hpp"

namespace vtxcore {
namespace {

constexpr char kPrintCure[] = "give one that prints it for content of type '",
               kPrintCureEnd[] = "' with vtx-export --chat-template FILE";

std::string read_template(const Bundle& bundle) {
  std::string source = bundle.read(bundle.manifest().chat_template, names::kMaxTemplateBytes);
  if (first_invalid_utf8(source) != std::string::npos)
    fail(Kind::bundle, names::kFileTemplate, " cannot be read as UTF-8 text: byte ", first_invalid_utf8(source));
  return source;
}

}  // namespace

Text::Text(const Bundle& bundle)
    : m_(bundle.manifest()), tokenizer_(bundle.read(m_.tokenizer, names::kMaxTokenizer)),
      template_(read_template(bundle), m_.text) {
  const TextSettings& settings = m_.text;
  auto check = [this](int64_t id, const std::string& token) {
    if (tokenizer_.added(id) != token)
      fail(Kind::bundle, "token ", id, " of the tokenizer is not the added token '", token, "'; export the bundle again");
  };
  check(settings.image_token_id, settings.image_token);
  if (settings.video_token_id) check(*settings.video_token_id, *settings.video_token);
  for (const auto& [token, id] : settings.control_tokens) {
    if (tokenizer_.added(id) != token) unknown("the control token '" + token.substr(0, 40) + "' that is no added token");
    control_.insert(id);
  }
  thought_form_ = thought_form(template_.source());
  if (!thought_form_) return;
  for (const TokenAt& token : tokenizer_.encode(thought_form_->begin + thought_form_->end))
    if (hidden(token.id)) marks_[token.id] = tokenizer_.added(token.id);
}

void Text::check_thinking(std::optional<bool> thinking, bool limited) const {
  if (thinking && (*thinking || thought_form_)) {
    std::vector<Message> question{{"user", {{false, "?"}}}};
    if (template_.render(question, true) == template_.render(question, false))
      fail(Kind::request, "this model's chat template has no switch for thoughts (enable_thinking); leave thinking out");
  }
  if (limited && !thought_form_)
    fail(Kind::request, "this model's chat template has no marks of thoughts; leave max_thinking_tokens out");
}

std::optional<ThoughtDivider> Text::thoughts(const Ids& ids) const {
  constexpr std::ptrdiff_t kPromptEnd = 16;  // tokens in which a mark that ends a prompt stands
  if (!thought_form_) return std::nullopt;
  std::string end;
  for (auto id = ids.size() > kPromptEnd ? ids.end() - kPromptEnd : ids.begin(); id != ids.end(); ++id)
    end += hidden(*id) ? tokenizer_.added(*id) : tokenizer_.decode({*id});
  std::string written(strip(end, false, true)), mark(strip(thought_form_->begin, false, true));
  bool inside = written.size() >= mark.size() && written.compare(written.size() - mark.size(), mark.size(), mark) == 0;
  std::vector<std::string> special;
  for (const auto& [_, token] : marks_) special.push_back(token);
  return ThoughtDivider(*thought_form_, special, inside);
}

Ids Text::thought_end() const {
  Ids ids;
  for (const TokenAt& token : tokenizer_.encode(thought_form_->end)) ids.push_back(token.id);
  return ids;
}

// Each image and each video must stand there as its token once.
void Text::check_printed(const Ids& ids, const std::vector<Message>& messages) const {
  size_t wanted[2] = {0, 0};  // images, videos
  bool own = m_.text.video_token_id && *m_.text.video_token_id != m_.text.image_token_id;
  for (const Message& message : messages)
    for (const Part& part : message.parts) wanted[own && part.video] += part.image;
  for (bool video : {false, true}) {
    if (video && !own) continue;
    auto printed = std::count(ids.begin(), ids.end(), video ? *m_.text.video_token_id : m_.text.image_token_id);
    const std::string kind = video ? "video" : "image";
    if (static_cast<size_t>(printed) != wanted[video])
      fail(Kind::templates, "the chat template prints ", video ? *m_.text.video_token : m_.text.image_token, " ", printed,
           " times for ", wanted[video], " ", kind, "s; ", kPrintCure, kind, kPrintCureEnd);
  }
}

std::pair<std::string, bool> Text::before_answer() const {
  auto said = [](const char* role, const char* text) {
    Part part{};
    part.text = text;
    return Message{role, {part}};
  };
  std::vector<Message> asked{said("user", "?")}, answered{asked[0], said("assistant", "x")};
  try {
    std::string before = template_.render(asked), after = template_.render(answered);
    return {before, after.compare(0, before.size() + 1, before + " ") == 0};
  } catch (const Error&) {  // as in Python, nothing is then known of the template
    return {"", false};
  }
}

bool Text::may_begin_with_space() const {
  if (before_answer().second) return true;
  std::vector<TokenAt> written = tokenizer_.encode("x");
  return !written.empty() && tokenizer_.token(written[0].id).compare(0, 3, "\xe2\x96\x81") == 0;
}

std::vector<Ids> Text::answer_ids(const std::vector<std::string>& answers) const {
  auto [before, space] = before_answer();
  std::vector<Ids> out;
  for (const std::string& answer : answers)
    out.push_back(answer.empty() ? Ids{} : continuation(before, (space ? " " : "") + answer, tokenizer_, control_, m_.text));
  return out;
}

// `rendered` with the text of each image for its token, or a video's.
std::string Text::with_marks(const std::string& rendered, const std::vector<MarkedImage>& images) const {
  const std::string &token = m_.text.image_token, video = m_.text.video_token.value_or(token);
  std::string out;
  size_t at = 0, number = 0;
  while (number < images.size()) {
    size_t image = rendered.find(token, at), other = rendered.find(video, at), found = std::min(image, other);
    if (found == std::string::npos) break;
    // of two tokens that begin there the longer one
    const std::string& printed = image != other                ? (image < other ? token : video)
                                 : token.size() > video.size() ? token
                                                               : video;
    out += rendered.substr(at, found - at) + images[number].text(printed, number);
    ++number;
    at = found + printed.size();
  }
  return out + rendered.substr(at);
}

Ids Text::image_ids(const MarkedImage& image, size_t at) const {
  Ids ids;
  for (const TokenAt& token : tokenizer_.encode(image.text(m_.text.image_token, at))) ids.push_back(token.id);
  return expanded(ids, image.spans);
}

// `ids` with one image or video token after the other repeated as an image token as often as `spans` say.
Ids Text::expanded(const Ids& ids, const Ids& spans) const {
  Ids out;
  size_t span = 0;
  for (int64_t id : ids) {
    bool picture = is_picture(id) && span < spans.size();
    out.insert(out.end(), picture ? static_cast<size_t>(spans[span]) : 1, picture ? m_.text.image_token_id : id);
    span += picture;
  }
  return out;
}

// The ids of messages, one for each image and video; with `images` one for each span of theirs.
Ids Text::printed_ids(const std::vector<Message>& messages, const std::vector<MarkedImage>& images,
                      std::optional<bool> thinking) const {
  Marks marks;
  std::string rendered = template_.render(mask(messages, tokenizer_, m_.text, template_.source(), marks), thinking);
  if (!images.empty()) rendered = with_marks(rendered, images);
  Ids ids;
  if (marks.empty())
    for (const TokenAt& token : tokenizer_.encode(rendered)) ids.push_back(token.id);
  else
    ids = encode_masked(rendered, marks, tokenizer_, control_, m_.text);
  const std::optional<std::string>& bos = m_.text.bos_token;
  if (m_.text.add_special_tokens && !(bos && !bos->empty() && rendered.compare(0, bos->size(), *bos) == 0)) {
    ids.insert(ids.begin(), m_.text.ids_before.begin(), m_.text.ids_before.end());
    ids.insert(ids.end(), m_.text.ids_after.begin(), m_.text.ids_after.end());
  }
  for (int64_t id : ids)
    if (id >= m_.model.vocab && !(m_.action && id == m_.text.image_token_id))  // may be in no table
      fail(Kind::bundle, "the tokenizer gives token ", id, " ('", tokenizer_.token(id), "'), the model has ",
           grouped(m_.model.vocab), " tokens, numbered from 0; export again with the tokenizer that belongs to the model");
  return ids;
}

Ids Text::prompt(const std::vector<Message>& messages, std::vector<MarkedImage> images,
                 std::optional<bool> thinking) const {
  images.resize(check_messages(messages), MarkedImage::plain(1));
  check_length(messages, thinking);
  Ids ids = printed_ids(messages, {}, thinking), spans;
  check_printed(ids, messages);
  if (std::any_of(images.begin(), images.end(), [](const MarkedImage& image) { return image.has_text(); }))
    ids = printed_ids(messages, images, thinking);
  for (const MarkedImage& image : images) spans.insert(spans.end(), image.spans.begin(), image.spans.end());
  return expanded(ids, spans);
}

Ids Text::order(const std::vector<Message>& messages) const {
  std::vector<bool> videos;
  for (const Message& message : messages)
    for (const Part& part : message.parts)
      if (part.image) videos.push_back(part.video);
  Ids given = count_up(0, videos.size()), out;
  if (!m_.text.video_token_id || m_.text.video_token_id == m_.text.image_token_id) return given;
  Ids ids = printed_ids(messages, {});
  check_printed(ids, messages);
  size_t next[2] = {0, 0};  // of the images and of the videos
  for (int64_t id : ids) {
    if (!is_picture(id)) continue;
    bool video = id == *m_.text.video_token_id;
    size_t& at = next[video];
    while (videos[at] != video) ++at;
    out.push_back(static_cast<int64_t>(at++));
  }
  return out;
}

void Text::check_length(const std::vector<Message>& messages, std::optional<bool> thinking) const {
  if (m_.text.characters_per_token == 0) return;
  int64_t limit = m_.text.characters_per_token * (m_.max_context - 1);
  size_t total = 0;
  for (const Message& message : messages) total += length_utf8(message.text());
  if (static_cast<int64_t>(total) <= limit) return;
  std::string text = template_.render(messages, thinking);
  if (m_.text.bound_normalized) text = tokenizer_.normalized(text);
  auto length = static_cast<int64_t>(length_utf8(text));
  if (length > limit)
    fail(Kind::context, "the prompt has ", grouped(length), " characters, and at most ", grouped(limit),
         " can fit into this bundle's context of ", grouped(m_.max_context), " tokens; shorten it", m_.or_more_context());
}

std::string Detokenizer::push(int64_t id) {
  const Tokenizer& tokenizer = text_.tokenizer();
  if (auto mark = text_.marks().find(id); shows_marks_ && mark != text_.marks().end()) return finish() + mark->second;
  if (text_.hidden(id) || !tokenizer.known(id)) return "";
  window_.push_back(id);
  // Byte tokens in a row are decoded together: one wrong byte changes the characters before it.
  if (tokenizer.is_byte(id)) return "";
  std::string text = text_.decode(window_);
  std::string piece = text.size() > shown_.size() ? text.substr(shown_.size()) : "";
  bool incomplete = text.size() >= 3 && text.compare(text.size() - 3, 3, "\xEF\xBF\xBD") == 0;
  if (piece.empty() || incomplete) return "";
  window_.erase(window_.begin(), window_.begin() + static_cast<std::ptrdiff_t>(context_));
  context_ = window_.size();
  shown_ = text_.decode(window_);
  return piece;
}

std::string Detokenizer::finish() {
  std::string text = text_.decode(window_);
  std::string piece = text.size() > shown_.size() ? text.substr(shown_.size()) : "";
  window_.clear();
  context_ = 0;
  shown_.clear();
  return piece;
}

std::string TextOutput::divided(const std::string& piece, bool last) {
  if (!divider_) return piece;
  std::string text = divider_->push(piece, last);
  detokenizer_.show_marks(divider_->reads_marks());
  return text;
}

std::string TextOutput::show(const std::string& next, bool last) {
  std::string piece = begun_ ? next : std::string(strip(next, true, false));
  begun_ |= !piece.empty();
  std::string text = waiting_ + piece;
  size_t best = std::string::npos, cut = std::string::npos;  // the stop string that is complete first
  for (const std::string& stop : stops_) {
    size_t at = text.find(stop);
    if (at == std::string::npos) continue;
    if (at + stop.size() < best || (at + stop.size() == best && at < cut)) best = at + stop.size(), cut = at;
  }
  stopped_ = stopped_ || cut != std::string::npos;
  if (cut == std::string::npos) {
    cut = text.size();
    if (!last) cut -= undecided(text, stops_);
  }
  waiting_ = stopped_ ? "" : text.substr(cut);
  shown_ += text.substr(0, cut);
  return text.substr(0, cut);
}

}  // namespace vtxcore
