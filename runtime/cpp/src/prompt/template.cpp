#include "prompt/template.hpp"

#include <algorithm>
#include <map>

#include "base/utf8.hpp"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"

namespace vtxcore {
namespace {

using jinja::mk_val;
constexpr char kProbe[] = "vtx-probe-7f3a";
constexpr char kTemplateCure[] = "; give another one with vtx-export --chat-template FILE";

bool blank(const std::string& text) { return strip(text, true, true).empty(); }

// Where the examples were recorded: 3 February 2001, 4:05:06 there and here.
std::time_t example_time() {
  std::tm at{};
  at.tm_year = 101, at.tm_mon = 1, at.tm_mday = 3, at.tm_hour = 4, at.tm_min = 5, at.tm_sec = 6, at.tm_isdst = -1;
  return std::mktime(&at);
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text.substr(0, 300);
}

jinja::value part_value(const Part& part) {
  auto out = mk_val<jinja::value_object>();
  out->insert("type", mk_val<jinja::value_string>(std::string(part.video ? "video" : part.image ? "image" : "text")));
  if (!part.image) out->insert("text", mk_val<jinja::value_string>(part.text));
  return out;
}

jinja::value message_value(const std::string& role, const jinja::value& content) {
  auto out = mk_val<jinja::value_object>();
  out->insert("role", mk_val<jinja::value_string>(role));
  out->insert("content", content);
  return out;
}

jinja::value parts_value(const std::vector<Part>& parts) {
  auto out = mk_val<jinja::value_array>();
  for (const Part& part : parts) out->push_back(part_value(part));
  return out;
}

}  // namespace

std::string Message::text() const {
  std::string out;
  for (const Part& part : parts)
    if (!part.image) out += part.text;
  return out;
}

size_t check_messages(const std::vector<Message>& messages) {
  if (messages.empty()) fail(Kind::request, "the conversation is empty; ask a question");
  size_t images = 0, length = 0;
  std::string question;
  for (const Message& message : messages) {
    std::string text = message.text();
    for (const std::string& read : {text, message.role})
      if (size_t at = first_invalid_utf8(read); at != std::string::npos)
        fail(Kind::request, "the text is not UTF-8 text (byte ", at, ")");
    length += length_utf8(text);
    if (message.role == "user") question = text;
    for (const Part& part : message.parts) images += part.image;
  }
  if (length > static_cast<size_t>(names::kMaxText))
    fail(Kind::request, "the conversation has ", grouped(static_cast<long long>(length)), " characters, the limit is ",
         grouped(names::kMaxText), "; shorten it");
  if (blank(question)) fail(Kind::request, "the question is empty; write at least one word");
  return images;
}

struct ChatTemplate::Compiled {
  jinja::program program;
  std::map<std::string, bool> as_string;  // by role: the template reads strings and no parts

  std::string run(const jinja::value& messages, const TextSettings& settings, bool reply, std::time_t now,
                  std::optional<bool> thinking = {}) const {
    jinja::spent = {};
    jinja::context context;
    context.current_time = now;
    context.set_val("messages", messages);
    for (const char* name : {"tools", "documents"}) context.set_val(name, mk_val<jinja::value_none>());
    for (const auto& [name, token] : settings.variables) context.set_val(name, mk_val<jinja::value_string>(token));
    if (thinking) context.set_val("enable_thinking", mk_val<jinja::value_bool>(*thinking));
    context.set_val("add_generation_prompt", mk_val<jinja::value_bool>(reply));
    return jinja::render_string_parts(jinja::runtime::gather_string_parts(jinja::runtime(context).execute(program)));
  }
};

ChatTemplate::ChatTemplate(std::string source, const TextSettings& settings)
    : source_(std::move(source)), settings_(settings) {}
ChatTemplate::~ChatTemplate() = default;

// The conversation as parts or strings, whichever a role's messages are read as.
std::string ChatTemplate::shaped(const std::vector<Message>& messages, std::time_t now, std::optional<bool> thinking) const {
  auto list = mk_val<jinja::value_array>();
  for (const Message& message : messages) {
    auto found = compiled_->as_string.find(message.role);
    if (found == compiled_->as_string.end() || !found->second) {
      list->push_back(message_value(message.role, parts_value(message.parts)));
      continue;
    }
    std::string text;
    for (const Part& part : message.parts)
      text += part.image ? (part.video ? *settings_.video_token : settings_.image_token) + "\n" : part.text;
    list->push_back(message_value(message.role, mk_val<jinja::value_string>(text)));
  }
  return compiled_->run(list, settings_, true, now, thinking);
}

// As shaping.py: each role is tried once with parts and once with a string.
void ChatTemplate::compile() const {
  auto made = std::make_unique<Compiled>();
  jinja::spent = {};
  made->program = jinja::parse_from_tokens(jinja::lexer().tokenize(source_));
  compiled_ = std::move(made);
  auto count = [](const std::string& text, const std::string& what) {
    size_t times = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + what.size())) ++times;
    return times;
  };
  for (const std::string role : {"user", "system", "assistant"}) {
    auto attempt = [&](const jinja::value& content) -> std::string {
      auto list = mk_val<jinja::value_array>();
      bool strings = compiled_->as_string["user"];
      jinja::value question = strings ? mk_val<jinja::value_string>(std::string("?")) : parts_value({{false, "?"}});
      if (role == "assistant") list->push_back(message_value("user", question));
      list->push_back(message_value(role, content));
      if (role == "system") list->push_back(message_value("user", question));
      try {
        return compiled_->run(list, settings_, false, example_time());
      } catch (const jinja::limit_exceeded&) {
        throw;
      } catch (const std::bad_alloc&) {
        throw;
      } catch (const std::exception&) {
        return "";
      }
    };
    std::vector<Part> probe{{false, kProbe}};
    if (role == "user") probe.insert(probe.begin(), {true, ""});
    std::string parts = attempt(parts_value(probe)), string = attempt(mk_val<jinja::value_string>(std::string(kProbe)));
    bool reads_parts = count(parts, kProbe) > 0 && count(parts, "'type'") + count(parts, "\"type\"") == 0 &&
                       count(parts, settings_.image_token) == (role == "user" ? 1 : 0);
    compiled_->as_string[role] = !reads_parts && count(string, kProbe) > 0;
  }
  for (const PromptExample& example : settings_.examples) {
    std::vector<Message> messages;
    for (const auto& [role, parts] : example.turns) {
      messages.push_back({role, {}});
      for (const std::optional<std::string>& text : parts) messages.back().parts.push_back({!text, text.value_or("")});
    }
    std::string text;
    try {
      text = shaped(messages, example_time());
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception&) {
      continue;  // as every conversation like it, with the reason
    }
    if (text != example.text) throw std::runtime_error("an example differs");
  }
}

std::string ChatTemplate::render(const std::vector<Message>& messages, std::optional<bool> thinking) const {
  if (int64_t length = static_cast<int64_t>(length_utf8(source_)); length > names::kMaxTemplate)
    fail(Kind::templates, "the chat template has ", grouped(length), " characters, the limit is ",
         grouped(names::kMaxTemplate), kTemplateCure);
  std::call_once(once_, [this] {
    try {
      compile();
    } catch (const std::bad_alloc&) {
      throw;  // and it is tried again
    } catch (const std::exception& error) {
      problem_ = one_line(error.what());
    }
  });
  if (!problem_.empty())
    fail(Kind::templates, "libvtx cannot render this chat template as the export did (", problem_,
         "); give token ids instead");
  std::string out;
  try {
    out = shaped(messages, std::time(nullptr), thinking);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const jinja::refused_by_template& refusal) {
    fail(Kind::templates, "the chat template refuses this conversation: ", one_line(refusal.what()));
  } catch (const std::exception& error) {
    fail(Kind::templates, "the chat template fails: ", one_line(error.what()), kTemplateCure);
  }
  if (length_utf8(out) > static_cast<size_t>(names::kMaxPrinted))
    fail(Kind::templates, "the chat template prints more than ", grouped(names::kMaxPrinted), " characters", kTemplateCure);
  return out;
}

}  // namespace vtxcore
