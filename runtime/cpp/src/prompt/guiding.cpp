#include "prompt/guiding.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <set>

#include "base/checks.hpp"
#include "base/json.hpp"
#include "base/utf8.hpp"
#include "bundle/names.hpp"

namespace vtxcore {

// The structures and functions of llguidance.h that are used, as version 1.7 and newer have them.
struct LlgLimits {
  size_t max_items_in_row;
  uint64_t initial_lexer_fuel, step_lexer_fuel;
  size_t step_max_items, max_lexer_states, max_grammar_size;
  bool precompute_large_lexemes, verbose_errors;
};
struct LlgInit {
  const void* tokenizer;
  uint32_t log_buffer_level, log_stderr_level;
  bool ff_tokens_ok, backtrack_ok;
  LlgLimits limits;
};
struct LlgTokenizerInit {
  size_t struct_size;
  uint32_t vocab_size, tok_eos;
  const uint32_t* token_lens;
  const uint8_t* token_bytes;
  const char* tokenizer_json;
  bool tokenize_assumes_string;
  size_t (*tokenize_fn)(const void*, const uint8_t*, size_t, uint32_t*, size_t);
  bool use_approximate_greedy_tokenize_fn;
  const void* tokenize_user_data;
  const char* const* slices;
  const uint32_t* tok_eos_extra;
  uint32_t tok_eos_extra_count;
};
struct Llguidance {
  void* (*new_tokenizer)(const LlgTokenizerInit*, char*, size_t);
  void (*free_tokenizer)(void*);
  void (*defaults)(LlgInit*, const void*);
  void* (*new_matcher)(const LlgInit*, const char*, const char*);
  void* (*clone)(const void*);
  void (*free_matcher)(void*);
  int32_t (*compute_mask)(void*, uint32_t*, size_t);
  size_t (*mask_bytes)(const void*);
  int32_t (*consume)(void*, uint32_t);
  const char* (*error)(void*);
  bool (*stopped)(const void*);
  int32_t (*forced)(void*, uint32_t*, size_t);
};

namespace {

constexpr char kForms[] = "schema, choices, regex, grammar";
constexpr size_t kMaxForced = 4096;  // tokens that are known beforehand

Llguidance find() {
  const char* named = std::getenv("VTX_LLGUIDANCE");
  std::string name = named && *named ? named : "libllguidance.so";
  void* library = ::dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);  // for as long as the process runs
  std::string problem = library ? name + " is too old or another library" : std::string(::dlerror());
  bool all = library != nullptr;
  auto take = [&](auto& function, const char* symbol) {
    function = library ? reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(library, symbol)) : nullptr;
    all = all && function != nullptr;
  };
  Llguidance l{};
  take(l.new_tokenizer, "llg_new_tokenizer_v2"), take(l.free_tokenizer, "llg_free_tokenizer");
  take(l.defaults, "llg_constraint_init_set_defaults"), take(l.new_matcher, "llg_new_matcher");
  take(l.clone, "llg_clone_matcher"), take(l.free_matcher, "llg_free_matcher");
  take(l.compute_mask, "llg_matcher_compute_mask_into"), take(l.mask_bytes, "llg_matcher_get_mask_byte_size");
  take(l.consume, "llg_matcher_consume_token"), take(l.error, "llg_matcher_get_error");
  take(l.stopped, "llg_matcher_is_stopped"), take(l.forced, "llg_matcher_compute_ff_tokens");
  if (!all) not_found("guided answers need llguidance, 1.7 or newer, which", problem, "in VTX_LLGUIDANCE");
  return l;
}

const Llguidance& llguidance() {
  static const Llguidance found = find();  // once it throws, the next call searches again
  return found;
}

// The first lines of an error of llguidance, on one.
std::string line(const char* error) {
  std::string out, text = error ? error : "";
  for (size_t at; (at = text.find("<non-verbose/>")) != std::string::npos;) text.erase(at, 14);
  for (char c : text) {
    bool visible = static_cast<unsigned char>(c) > ' ';  // whether char has a sign depends on the processor
    if (visible || (!out.empty() && out.back() != ' ')) out += visible ? c : ' ';
  }
  return std::string(strip(out.substr(0, 200), true, true));
}

// The tokenizer that changes nothing of a text: without normalizers but those that write spaces, and without a space of
// its own in front.
std::string unchanging(const std::string& json) {
  Json spec = parse_json(json, "tokenizer.json", Kind::bundle);
  for (auto& [key, value] : *spec.object()) {
    if (key != "normalizer" || value.is_null()) continue;
    const Json* several = value.find("normalizers");
    Json::Array parts = several && several->array() ? *several->array() : Json::Array{value}, kept;
    for (const Json& part : parts) {
      const Json* pattern = part.find("pattern");
      if (pattern && *pattern == Json(Json::Object{{"String", " "}})) kept.push_back(part);
    }
    value = kept.empty() ? Json() : Json(Json::Object{{"type", "Sequence"}, {"normalizers", kept}});
  }
  std::string out = spec.dump();
  for (std::string scheme : {"\"always\"", "\"first\""})
    for (size_t at; (at = out.find("\"prepend_scheme\": " + scheme)) != std::string::npos;)
      out.replace(at + 18, scheme.size(), "\"never\"");
  return out;
}

size_t tokenize(const void* user, const uint8_t* bytes, size_t length, uint32_t* out, size_t room) {
  try {
    static const std::set<int64_t> none;
    std::string_view text(reinterpret_cast<const char*>(bytes), length);
    std::vector<TokenAt> tokens = static_cast<const Tokenizer*>(user)->encode(text, {&none, false});
    for (size_t i = 0; i < std::min(room, tokens.size()); ++i) out[i] = static_cast<uint32_t>(tokens[i].id);
    return tokens.size();
  } catch (...) {  // nothing is then known beforehand
    return 0;
  }
}

std::string lark_of(const std::string& regex) {
  std::string out = "start: /";
  for (size_t i = 0; i < regex.size(); ++i) {
    if (regex[i] == '\\' && i + 1 < regex.size())
      out += regex[i++];
    else if (regex[i] == '/')
      out += '\\';
    out += regex[i] == '\n' ? "\\n" : std::string(1, regex[i]);
  }
  return out + "/";
}

// The JSON objects that follow %json in a grammar.
std::vector<Json> embedded(const std::string& grammar) {
  std::vector<Json> out;
  for (size_t at = 0; (at = grammar.find("%json", at)) != std::string::npos; at += 5) {
    size_t first = grammar.find_first_not_of(" \t\r\n", at + 5), end = first, depth = 0;
    bool text = false;
    for (; end < grammar.size(); ++end) {
      char c = grammar[end];
      if (text && c == '\\')
        ++end;
      else if (c == '"')
        text = !text;
      else if (!text && c == '{')
        ++depth;
      else if (!text && c == '}' && --depth == 0)
        break;
      if (depth == 0) break;
    }
    try {
      if (end < grammar.size()) out.push_back(parse_json(grammar.substr(first, end + 1 - first), "%json", Kind::request));
    } catch (const Error&) {
      continue;  // llguidance says what is wrong
    }
  }
  return out;
}

// Refuses what would be compiled for minutes, as Python does. Throws Error(request).
void check_work(const std::string& kind, const std::vector<Json>& schemas) {
  static constexpr const char* kOwn[] = {
      "pattern", "format", "multipleOf", "properties", "patternProperties", "additionalProperties", "items", "prefixItems"};
  double remainders = 0;
  for (const Json& schema : schemas) {
    int64_t patterns = 0;
    std::set<double> multiples{1};
    bool combined = false;
    std::vector<const Json*> nodes{&schema};
    while (!nodes.empty()) {
      const Json& node = *nodes.back();
      nodes.pop_back();
      for (size_t i = 0; node.array() && i < node.array()->size(); ++i) nodes.push_back(&(*node.array())[i]);
      if (!node.object()) continue;
      for (const auto& [key, value] : *node.object()) nodes.push_back(&value);
      for (const char* key : {"pattern", "format"}) patterns += node.find(key) && node.find(key)->string();
      const Json *multiple = node.find("multipleOf"), *several = node.find("allOf");
      if (multiple && (multiple->integer() || multiple->real())) {
        std::string digits = multiple->dump();
        double value = std::strtod(digits.c_str(), nullptr);
        digits.resize(std::min(digits.find('e'), digits.size()));
        digits.erase(std::remove(digits.begin(), digits.end(), '.'), digits.end());
        if (value > 0) multiples.insert(std::max(value, std::strtod(digits.c_str(), nullptr)));
      }
      size_t parts = several && several->array() ? several->array()->size() : 0;
      for (const char* key : {"$ref", "anyOf", "oneOf"}) parts += node.find(key) != nullptr;
      parts += std::any_of(std::begin(kOwn), std::end(kOwn), [&](const char* key) { return node.find(key); });
      combined |= parts > 1;
    }
    if (combined && patterns > names::kMaxCombined)
      fail(Kind::request, kind, " has ", patterns, " patterns and formats and combines some by allOf, anyOf or $ref; the ",
           "limit is then ", names::kMaxCombined, "; simplify it");
    double product = 1, sum = -1;
    for (double value : multiples) product *= value, sum += value;
    remainders += combined ? product : sum;
    if (remainders > static_cast<double>(names::kMaxMultiple))
      fail(Kind::request, kind, " asks for multiples of ", grouped(static_cast<int64_t>(std::min(remainders, 1e15))),
           ", the limit is ", grouped(names::kMaxMultiple), "; leave multipleOf out");
  }
}

}  // namespace

void Guide::check() const {
  int64_t most = kind == "regex" ? names::kMaxRegex : kind == "grammar" ? names::kMaxGrammar : names::kMaxSchema;
  if (kind != "schema" && kind != "choices" && kind != "regex" && kind != "grammar")
    fail(Kind::request, 0, " of ", kForms, " are given to guide an answer; give one");
  if (size_t at = first_invalid_utf8(value); at != std::string::npos)
    fail(Kind::request, kind, " is not UTF-8 text (byte ", at, ")");
  if (auto size = static_cast<int64_t>(value.size()); size > most)
    fail(Kind::request, kind, " has ", grouped(size), " bytes, the limit is ", grouped(most), "; give a shorter one");
}

std::vector<std::string> Guide::choices() const {
  if (kind != "choices") return {};
  Json list = parse_json(value, "the list of choices", Kind::request);
  int64_t count = list.array() ? static_cast<int64_t>(list.array()->size()) : 0;
  if (count == 0) fail(Kind::request, "choices is ", value.substr(0, 40), "; it must be a list of at least one string");
  if (count > names::kMaxChoices)
    fail(Kind::request, grouped(count), " choices are given, the limit is ", grouped(names::kMaxChoices), "; give fewer");
  std::vector<std::string> out;
  for (const Json& choice : *list.array()) {
    if (!choice.string() || strip(*choice.string(), true, false).size() != choice.string()->size())
      fail(Kind::request, "the choice ", choice.dump(),
           " is not a string without whitespace at its start; answers have none");
    out.push_back(*choice.string());
  }
  if (std::set<std::string>(out.begin(), out.end()).size() < out.size())
    fail(Kind::request, "choices holds the same string twice; leave one out");
  return out;
}

GuidedAnswer::GuidedAnswer(const Llguidance& library, std::shared_ptr<void> matcher)
    : library_(library), matcher_(std::move(matcher)), bits_(library.mask_bytes(matcher_.get()) / sizeof(uint32_t)) {
  find_forced();
}

void GuidedAnswer::find_forced() {
  forced_.resize(kMaxForced);
  int32_t count = library_.forced(matcher_.get(), forced_.data(), forced_.size());
  forced_.resize(static_cast<size_t>(std::max(0, count)));
}

void GuidedAnswer::failed() const {
  fail(Kind::request, "the answer's form cannot be held to after token ", tokens_, ": ",
       line(library_.error(matcher_.get())), "; simplify it");
}

Floats GuidedAnswer::mask(const Floats& logits) {
  Floats out(logits.size(), -std::numeric_limits<float>::infinity());
  if (!forced_.empty()) {
    out[forced_[0]] = logits[forced_[0]];
    imposes_ = true;
    return out;
  }
  if (library_.compute_mask(matcher_.get(), bits_.data(), bits_.size() * sizeof(uint32_t)) != 0) failed();
  size_t allowed = 0;
  for (size_t i = 0; i < std::min(out.size(), bits_.size() * 32); ++i)
    if (bits_[i / 32] >> (i % 32) & 1) out[i] = logits[i], ++allowed;
  auto likeliest = static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  imposes_ = allowed == 1 || likeliest / 32 >= bits_.size() || !(bits_[likeliest / 32] >> (likeliest % 32) & 1);
  return out;
}

bool GuidedAnswer::push(int64_t token) {
  if (library_.consume(matcher_.get(), static_cast<uint32_t>(token)) != 0) failed();
  ++tokens_;
  bool complete = library_.stopped(matcher_.get());
  if (!forced_.empty()) forced_.erase(forced_.begin());
  if (forced_.empty() && !complete) find_forced();
  return complete;
}

Ids GuidedAnswer::draft(int64_t most) {
  Ids out(forced_.begin(), forced_.begin() + std::clamp<int64_t>(most, 0, static_cast<int64_t>(forced_.size())));
  drafted_ += static_cast<int64_t>(out.size());
  return out;
}

Grammars::Grammars(const std::string& tokenizer_json, int64_t vocab, const Ids& end_ids, bool space)
    : library_(llguidance()), space_(space) {
  std::string json = unchanging(tokenizer_json);
  tokenizer_ = std::make_unique<Tokenizer>(json);
  Ids sorted = end_ids;
  std::sort(sorted.begin(), sorted.end());
  std::vector<uint32_t> ends(sorted.begin(), sorted.end());
  LlgTokenizerInit init{};
  init.struct_size = sizeof init;
  init.vocab_size = static_cast<uint32_t>(vocab);
  init.tok_eos = ends.at(0);
  init.tok_eos_extra = ends.data() + 1, init.tok_eos_extra_count = static_cast<uint32_t>(ends.size() - 1);
  init.tokenizer_json = json.c_str();
  init.tokenize_assumes_string = true;
  init.tokenize_fn = tokenize, init.tokenize_user_data = tokenizer_.get();
  char problem[400] = "";
  handle_.reset(library_.new_tokenizer(&init, problem, sizeof problem), library_.free_tokenizer);
  if (!handle_) fail(Kind::request, "the tokenizer of this bundle (", line(problem), ") cannot guide answers, leave it out");
}

std::shared_ptr<void> Grammars::compile(const Guide& guide) const {
  Json::Object body;
  if (guide.kind == "schema") {
    Json schema = parse_json(guide.value, "the schema", Kind::request);
    if (schema.boolean() && *schema.boolean()) schema = Json(Json::Object{});
    if (Json::Object* fields = schema.object()) {
      fields->erase(std::remove_if(fields->begin(), fields->end(), [](auto& f) { return f.first == "x-guidance"; }),
                    fields->end());
      fields->emplace_back("x-guidance",
                           Json::Object{{"item_separator", ", "}, {"key_separator", ": "}, {"whitespace_flexible", false}});
    }
    check_work(guide.kind, {schema});
    body = {{"json_schema", schema}};
  } else if (guide.kind == "choices") {
    std::string text;
    for (const std::string& choice : guide.choices()) text += (text.empty() ? "start: " : " | ") + Json(choice).dump();
    body = {{"lark_grammar", text}};
  } else {
    for (char sign : {'&', '~'})
      if (auto count = std::count(guide.value.begin(), guide.value.end(), sign);
          guide.kind == "grammar" && count > names::kMaxOperators)
        fail(Kind::request, "grammar has ", count, " times ", sign, ", the limit is ", names::kMaxOperators,
             "; combine fewer expressions, and write \\x", sign == '&' ? "26" : "7e", " in texts");
    if (guide.kind == "grammar") check_work(guide.kind, embedded(guide.value));
    body = {{"lark_grammar", guide.kind == "regex" ? lark_of(guide.value) : guide.value}};
  }
  LlgInit init{};
  library_.defaults(&init, handle_.get());
  init.log_buffer_level = init.log_stderr_level = 0;
  init.limits.initial_lexer_fuel = names::kInitialLexerFuel, init.limits.step_lexer_fuel = names::kStepLexerFuel;
  init.limits.step_max_items = names::kStepMaxItems, init.limits.max_lexer_states = names::kMaxLexerStates;
  init.limits.max_grammar_size = names::kMaxGrammarSize;
  init.limits.verbose_errors = false;
  auto compiled = [&](const Json::Array& grammars) {
    std::string text = Json(Json::Object{{"grammars", grammars}}).dump();
    std::shared_ptr<void> matcher(library_.new_matcher(&init, "llguidance", text.c_str()), library_.free_matcher);
    if (const char* error = library_.error(matcher.get()))
      fail(Kind::request, guide.kind, " cannot guide an answer: ", line(error), "; correct it");
    return matcher;
  };
  std::shared_ptr<void> first = compiled({body});
  std::vector<uint32_t> bits(library_.mask_bytes(first.get()) / sizeof(uint32_t));
  if (library_.compute_mask(first.get(), bits.data(), bits.size() * sizeof(uint32_t)) != 0 ||
      std::all_of(bits.begin(), bits.end(), [](uint32_t word) { return word == 0; }))
    fail(Kind::request, guide.kind, " allows no answer (", line(library_.error(first.get())), "); correct it");
  Json::Object named = body;
  named.emplace_back("name", "body");
  Json start = Json::Object{{"lark_grammar", "start: / ?/ @body"}};
  return space_ ? compiled({start, named}) : compiled({body});
}

GuidedAnswer Grammars::start(const Guide& guide) {
  guide.check();
  std::lock_guard<std::mutex> held(lock_);
  std::string key = guide.kind + " " + guide.value;
  auto found = std::find_if(compiled_.begin(), compiled_.end(), [&](const auto& one) { return one.first == key; });
  std::shared_ptr<void> matcher = found == compiled_.end() ? compile(guide) : found->second;
  if (found != compiled_.end()) compiled_.erase(found);
  compiled_.emplace_back(key, matcher);
  if (compiled_.size() > names::kKeptGrammars) compiled_.erase(compiled_.begin());
  return GuidedAnswer(library_, std::shared_ptr<void>(library_.clone(matcher.get()), library_.free_matcher));
}

}  // namespace vtxcore
