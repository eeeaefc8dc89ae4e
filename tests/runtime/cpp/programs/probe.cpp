// vtx-cpp-probe: parts of libvtx by themselves, for the tests.
//
//   tokenize FILE             texts on stdin, a JSON string a line; ids, their text, and the pieces of streaming it
//   render                    on stdin {"template", "text" as in a manifest, "chats"}; a line a chat, {"text"} or {"error"}
//   resize W H W2 H2 FILTER   RGB on stdin, resized RGB on stdout
//   buffer FORMAT W H STRIDE  a buffer of rgb8, bgr8, rgba8, bgra8, gray8, nv12 or yuyv on stdin, its RGB on stdout
//   picture FILE              an image file's RGB on stdout, its width and height on stderr
//   boxes                     on stdin a JSON object a line: a form as in a manifest, "text", "region" of the picture,
//   "size",
//                             and "view", the sizes in width and height; the boxes in the text as JSON
//   sha256                    of stdin, by the processor's instructions where it has them, and without
//   layout BUNDLE FILE...     of each image file, the only one of its prompt, a line: its tokens and its views' SHA-256;
//                             tokens=N among them: the most tokens of those after it
//   clips BUNDLE MAX_PIXELS   on stdin a line each a video's number of frames, their rate, how many are seen or 0, and the
//                             width and height of each; a JSON object each: which are seen, and their form in a prompt
//   ask BUNDLE DEVICE K REDUCE FPS FRAMES STEPS QUESTION FILE...  a question about image files, and folders with the frames
//                             0.png, 1.png, ... of a video: the SHA-256 of their views, the prompt's ids, and the greedy
//                             tokens with the logits that gave each
//   stage BUNDLE DEVICE[:COMPUTE] N [ROW...]  hidden states on stdin through stage N (from 0), of which those ROWs are asked
//                             for or all, and the last one once more as the next token; their hidden states on stdout
//   uniforms SEED COUNT       what SplitMix(SEED).uniform() gives
//   normals SEED COUNT        what its normals(COUNT) gives, as it lies in memory
//   select SPEC TOKENS WIDTH CLIP QUESTIONS  what a method without layers selects of one image, question after question: on
//                             stdin its tokens, their patches [TOKENS, CLIP] and of each question its mean input embedding
//                             and CLIP's; a line each: what is kept, and the processor's milliseconds. Where cosines
//                             [TOKENS, TOKENS] follow on stdin, the last question finds them instead of those kept
//   merge SPEC VIEWS TOKENS WIDTH COLUMNS  what a method makes of the tower's tokens of an image in so many views: on stdin
//                             their keys [VIEWS, TOKENS, WIDTH] and the class token's attention; its sums as JSON
//   cut SPEC LAYER TOKENS     which of so many tokens that entered go on at a cut before LAYER: on stdin their attention,
//   float32 tiles                     images on stdin, a JSON array of a number a tile each a line, each one in place of the
//   one before;
//                             how many tiles of each the tower runs
//   turns                     positions of pivots on stdin, a JSON array a line; in which order DART's code takes them
//   specs                     specs on stdin, one a line; the canonical one, or the error
//   parse KIND FILE           reads a manifest, safetensors, tokenizer, template or image file; prints ok or the error
//   fuzz KIND COUNT SEED FILE...  the same for COUNT altered copies of the files
#include <algorithm>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <random>

#include "api/boxes.hpp"
#include "api/model.hpp"
#include "backends/slots.hpp"
#include "base/json.hpp"
#include "base/random.hpp"
#include "bundle/bundle.hpp"
#include "bundle/sha256.hpp"
#include "policies/methods/reductions.hpp"
#include "policies/policy.hpp"
#include "parse.hpp"
#include "session/encoded_images.hpp"
#include "session/session.hpp"
#include "vision/layout.hpp"
#include "vision/video.hpp"

namespace {

using namespace vtxcore;

std::string read(std::istream& stream) { return std::string(std::istreambuf_iterator<char>(stream), {}); }

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return read(file);
}

void tokenize(const std::string& path) {
  Tokenizer tokenizer(read(path));
  for (std::string line; std::getline(std::cin, line);) {
    Json text = parse_json(line, "stdin", Kind::request);
    Json::Array ids;
    Ids plain;
    for (const TokenAt& token : tokenizer.encode(*text.string())) {
      ids.push_back(token.id);
      plain.push_back(token.id);
    }
    std::cout << Json(Json::Object{{"ids", ids}, {"text", tokenizer.decode(plain)}}).dump() << "\n";
  }
}

void render() {
  Json request = parse_json(read(std::cin), "stdin", Kind::request);
  TextSettings settings = read_text_settings(*request.find("text"));
  ChatTemplate chat_template(*request.find("template")->string(), settings);
  std::optional<bool> thinking;
  if (const Json* value = request.find("thinking")) thinking = *value->boolean();
  for (const Json& chat : *request.find("chats")->array()) {
    std::vector<Message> messages;
    for (const Json& turn : *chat.array()) {
      messages.push_back({*turn.find("role")->string(), {}});
      for (const Json& part : *turn.find("content")->array()) {
        const Json* text = part.find("text");
        messages.back().parts.push_back({text == nullptr, text ? *text->string() : ""});
      }
    }
    try {
      std::cout << Json(Json::Object{{"text", chat_template.render(messages, thinking)}}).dump() << "\n";
    } catch (const Error& error) {
      std::cout << Json(Json::Object{{"error", error.what()}}).dump() << "\n";
    }
  }
}

void resize(char** values) {
  Picture in(std::stoi(values[0]), std::stoi(values[1]));
  std::cin.read(reinterpret_cast<char*>(in.data.data()), static_cast<std::streamsize>(in.data.size()));
  Picture out = resized(in, std::stoi(values[2]), std::stoi(values[3]), values[4]);
  std::cout.write(reinterpret_cast<const char*>(out.data.data()), static_cast<std::streamsize>(out.data.size()));
}

void buffer(char** values) {
  static const std::map<std::string, PixelFormat> kFormats{{"rgb8", PixelFormat::rgb8},   {"bgr8", PixelFormat::bgr8},
                                                           {"rgba8", PixelFormat::rgba8}, {"bgra8", PixelFormat::bgra8},
                                                           {"gray8", PixelFormat::gray8}, {"nv12", PixelFormat::nv12},
                                                           {"yuyv", PixelFormat::yuyv}};
  std::string bytes = read(std::cin);
  int width = std::stoi(values[1]), height = std::stoi(values[2]);
  size_t stride = std::stoul(values[3]);
  auto data = reinterpret_cast<const uint8_t*>(bytes.data());
  Picture out =
      from_buffer(data, data + static_cast<size_t>(height) * stride, width, height, stride, kFormats.at(values[0]));
  std::cout.write(reinterpret_cast<const char*>(out.data.data()), static_cast<std::streamsize>(out.data.size()));
}

void picture(const std::string& path) {
  Picture out = read_picture(path);
  std::cerr << out.width << " " << out.height << "\n";
  std::cout.write(reinterpret_cast<const char*>(out.data.data()), static_cast<std::streamsize>(out.data.size()));
}

void layout(const std::string& folder, const std::vector<std::string>& files) {
  Bundle bundle(folder);
  const Manifest& m = bundle.manifest();
  LayoutPtr layout = read_layout(m.layout, m.model.tower);
  int64_t tokens = 0;
  for (const std::string& file : files) {
    if (file.rfind("tokens=", 0) == 0) {
      tokens = std::stoll(file.substr(7));
      continue;
    }
    Picture picture = read_picture(file);
    LayoutPtr sized = tokens ? sized_layout(layout, tokens, picture.width, picture.height) : layout;
    Sha256 hash;
    for (const Pixels& view : sized->plan(picture.width, picture.height).pixels(picture, m.image))
      hash.update(view.values.data(), view.values.size() * sizeof(float));
    std::cout << sized->count(picture.width, picture.height) << " " << hash.hex() << "\n";
  }
}

void clips(const std::string& folder, int64_t max_pixels) {
  Bundle bundle(folder);
  VideoLayoutPtr layout = read_video_layout(bundle.manifest().video.value().layout);
  if (max_pixels > 0) layout = layout->within(max_pixels);
  int64_t count = 0, wanted = 0, width = 0, height = 0;
  double rate = 0;
  auto list = [](const Ids& ids) { return Json::Array(ids.begin(), ids.end()); };
  while (std::cin >> count >> rate >> wanted >> width >> height) {
    Clip clip = layout->sample(count, rate, wanted);
    MarkedImage form = layout->placed(clip, width, height);
    std::cout << Json(Json::Object{{"numbers", list(clip.numbers)},
                                   {"spans", list(form.spans)},
                                   {"texts", Json::Array(form.marks.begin(), form.marks.end())},
                                   {"span", form.span}})
                     .dump()
              << "\n";
  }
}

void ask(char** values, const std::vector<std::string>& files) {
  LoadOptions load;
  load.device = values[1], load.threads = 1, load.compute = "f32";
  Model model(values[0], load);
  Options options;
  options.k = values[2], options.reduce = values[3];
  auto is_video = [](const std::string& file) { return std::filesystem::is_directory(file); };
  auto pictures = files.size() - static_cast<size_t>(std::count_if(files.begin(), files.end(), is_video));
  std::vector<PreparedImage> shown;
  for (const std::string& file : files) {
    std::filesystem::directory_iterator frames;
    if (is_video(file)) frames = std::filesystem::directory_iterator(file);
    auto frame = [&](int64_t number) { return read_picture(cat(file, "/", number, ".png")); };
    shown.push_back(is_video(file) ? model.prepare({std::distance(begin(frames), end(frames)), frame, std::stod(values[4]),
                                                    std::stol(values[5])})
                                   : model.prepare(read_picture(file), "", pictures));
  }
  shown = model.ordered(std::move(shown));
  Message question{"user", {}};
  Json::Array keys, ids, tokens, rows;
  for (const PreparedImage& image : shown) {
    question.parts.push_back({true, "", image.video != nullptr});
    keys.emplace_back(image.key.substr(0, 64));
  }
  question.parts.push_back({false, values[7]});
  Policy policy = model.policy(options, shown);
  EncodedImages encoded(model.backend(), shown);
  int64_t image_id = model.manifest().text.image_token_id;
  auto expand = [&](const std::vector<MarkedImage>& images) { return model.text().prompt({question}, images); };
  Ids all = expand(placed(shown));
  auto text = selecting_text(model.backend(), all, image_id, policy, nullptr, [] { return Rows(); });
  Prompt prompt = make_prompt(all, image_id, encoded.encoders(policy, text, nullptr), placed(shown), policy, expand, [] {});
  Session session(model.backend(), model.manifest());
  Floats logits = session.prefill(prompt, policy, nullptr, [] {}).logits;
  for (int64_t id : prompt.ids) ids.emplace_back(id);
  for (int64_t left = std::stol(values[6]); left > 0; --left) {
    tokens.emplace_back(std::max_element(logits.begin(), logits.end()) - logits.begin());
    Json::Array row;
    for (float value : logits) row.emplace_back(double{value});
    rows.emplace_back(row);
    if (left > 1) logits = session.decode({*tokens.back().integer()}).data;
  }
  std::cout << Json(Json::Object{{"keys", keys}, {"ids", ids}, {"tokens", tokens}, {"logits", rows}}).dump() << "\n";
}

void stage(char** values, const std::vector<std::string>& asked) {
  LoadOptions options;
  std::string device = values[1];
  size_t colon = device.find(':');
  options.device = device.substr(0, colon), options.threads = 1;
  if (colon != std::string::npos) options.compute = device.substr(colon + 1);
  Model model(values[0], options);
  std::string bytes = read(std::cin);
  auto width = static_cast<size_t>(model.manifest().model.hidden);
  Rows in(bytes.size() / sizeof(float) / width, width), next(1, width);
  std::memcpy(in.data.data(), bytes.data(), in.data.size() * sizeof(float));
  std::copy_n(in.row(in.count() - 1), width, next.row(0));
  auto count = static_cast<int64_t>(in.count());
  std::unique_ptr<StageCache> cache = model.backend().stage(std::stoul(values[2]), count + 1);
  Ids rows;
  for (const std::string& row : asked) rows.push_back(std::stoll(row));
  Rows all = cache->append({in}, text_positions(0, in.count()), false, rows.empty() ? nullptr : &rows);
  for (const Rows& out : {host(all), host(cache->append({next}, text_positions(count, 1)))})
    std::cout.write(reinterpret_cast<const char*>(out.data.data()),
                    static_cast<std::streamsize>(out.data.size() * sizeof(float)));
}

void sha256() {
  std::string content = read(std::cin);
  for (bool instructions : {has_sha_instructions(), false}) {
    Sha256 hash(instructions);
    hash.update(content.data(), content.size() / 3);  // in two pieces
    hash.update(content.data() + content.size() / 3, content.size() - content.size() / 3);
    std::cout << hash.hex() << "\n";
  }
}

// With `tiled`, of each token the view that it comes from follows the patches.
void select(char** values, bool tiled) {
  std::vector<MethodPtr> parts = parse_spec(values[0]);
  std::shared_ptr<const Entry> entry = parts.at(0)->entry();
  size_t tokens = std::stoul(values[1]), width = std::stoul(values[2]), clip = std::stoul(values[3]);
  auto rows_of = [](size_t count, size_t wide) {
    Rows out(count, wide);
    std::cin.read(reinterpret_cast<char*>(out.data.data()), static_cast<std::streamsize>(out.data.size() * sizeof(float)));
    return out;
  };
  ImageTokens image;
  image.rows = rows_of(tokens, width);
  image.key = sha256_hex({reinterpret_cast<char*>(image.rows.data.data()), image.rows.data.size() * sizeof(float)});
  image.patches.places = count_up(0, tokens);
  Rows& by_clip = image.patches.states[names::kClipPatches] = rows_of(tokens, clip);
  for (size_t i = 0; i < tokens; ++i)  // what tests/support/selection.py gives as the attention that they get
    for (size_t column : {size_t{0}, size_t{1}})
      image.patches.signals[cat(names::kReceived, ".", column)].push_back(clip > 2 ? by_clip.row(i)[column + 1] : 0);
  if (tiled) {
    image.patches.views = Ids(tokens);
    std::cin.read(reinterpret_cast<char*>(image.patches.views->data()),
                  static_cast<std::streamsize>(tokens * sizeof(int64_t)));
    const Ids& views = *image.patches.views;
    auto each = std::count(views.begin(), views.end(), 0);
    std::map<int64_t, int64_t> seen;
    for (size_t i = 0; i < tokens; ++i)
      image.patches.places[i] = views[i] < 0 ? names::kNewline : views[i] * each + seen[views[i]]++;
  }
  std::vector<PromptText> questions(std::stoul(values[4]));
  for (PromptText& question : questions)
    question.ids = {0}, question.after = {1}, question.hidden = rows_of(1, width), question.embeddings = rows_of(1, clip);
  bool replaces = std::cin.peek() != std::istream::traits_type::eof();
  for (const PromptText& question : questions) {
    if (replaces && &question == &questions.back())
      image.likeness[-1] = std::make_shared<Likeness>(Likeness{image.likeness[-1]->lengths, rows_of(tokens, tokens).data});
    std::clock_t start = std::clock();
    std::optional<Ids> kept = entry->select(image, &question);
    double ms = 1000.0 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    Json::Array shown;
    for (int64_t token : kept.value_or(Ids{})) shown.push_back(token);
    std::cout << Json(Json::Object{{"kept", shown}, {"ms", ms}}).dump() << "\n";
  }
}

void merge(char** values) {
  std::vector<MethodPtr> parts = parse_spec(values[0]);
  auto tower = std::make_shared<TowerTokens>();
  tower->views = std::stoul(values[1]), tower->columns = std::stol(values[4]);
  size_t count = tower->views * std::stoul(values[2]);
  tower->keys = Rows(count, std::stoul(values[3])), tower->attention = Floats(count);
  for (Floats* floats : {&tower->keys.data, &tower->attention})
    std::cin.read(reinterpret_cast<char*>(floats->data()), static_cast<std::streamsize>(floats->size() * sizeof(float)));
  ImageTokens image;
  image.tower = tower;
  std::clock_t start = std::clock();
  MergedTokens merged = parts.at(0)->entry()->merge(image).value();
  double ms = 1000.0 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  auto list = [](const auto& numbers) {
    Json::Array out;
    for (auto number : numbers) out.push_back(number);
    return out;
  };
  Doubles weights(merged.weights.begin(), merged.weights.end());
  std::cout << Json(Json::Object{{"places", list(merged.patches.places)},
                                 {"views", list(merged.patches.views.value_or(Ids{}))},
                                 {"starts", list(merged.starts)},
                                 {"sources", list(merged.sources)},
                                 {"weights", list(weights)},
                                 {"ms", ms}})
                   .dump()
            << "\n";
}

void cut(const std::string& spec, int64_t layer, size_t tokens) {
  Floats attention(tokens);
  std::cin.read(reinterpret_cast<char*>(attention.data()), static_cast<std::streamsize>(tokens * sizeof(float)));
  auto given = [&] { return Scores(attention, attention); };
  Boundary boundary{layer, {}, {}, Mask(tokens, 1), [&](bool) { return given(); }, {}, {}, {}, nullptr, given};
  std::optional<Mask> kept = parse_spec(spec).at(0)->keep_mask(boundary);
  Json::Array shown;
  for (int64_t token : kept ? indices_of(*kept) : count_up(0, tokens)) shown.push_back(token);
  std::cout << Json(shown).dump() << "\n";
}

void turns() {
  for (std::string line; std::getline(std::cin, line);) {
    Ids positions;
    Json given = parse_json(line, "stdin", Kind::request);
    for (const Json& position : *given.array()) positions.push_back(*position.integer());
    Json::Array shown;
    for (int64_t position : set_order(positions)) shown.push_back(position);
    std::cout << Json(shown).dump() << "\n";
  }
}

void boxes() {
  auto numbers = [](const Json& list) {
    Doubles out;
    for (const Json& number : *list.array())
      out.push_back(number.real() ? *number.real() : static_cast<double>(*number.integer()));
    return out;
  };
  for (std::string line; std::getline(std::cin, line);) {
    const Json given = parse_json(line, "stdin", Kind::request);
    const int64_t* scale = given.find("scale")->integer();
    const BoxForm form{given.text("pattern"), given.text("label"), scale ? std::optional(*scale) : std::nullopt,
                       given.flag("rows_first")};
    const Doubles region = numbers(*given.find("region")), size = numbers(*given.find("size")),
                  view = numbers(*given.find("view"));
    PreparedImage image{{}, "", 0, static_cast<int64_t>(size[0]), static_cast<int64_t>(size[1]), nullptr, {}, nullptr};
    image.views.push_back({static_cast<int64_t>(view[1]), static_cast<int64_t>(view[0]), {}});
    image.region = {region[0], region[1], region[2], region[3]};
    Json::Array out;
    for (const Box& box : read_boxes(given.text("text"), form, image))
      out.push_back(Json::Array{box.label, box.left, box.top, box.right, box.bottom});
    std::cout << Json(out).dump() << "\n";
  }
}

void specs() {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << to_spec(parse_spec(line)) << "\n";
    } catch (const Error& error) {
      std::cout << "error: " << error.what() << "\n";
    }
  }
}

// One to eight bytes changed, taken out, doubled, or replaced by what such files have.
std::string altered(std::string content, std::mt19937& random) {
  static const std::string kWords[] = {"null", "-1", "1e999", "\"\"", "[]", "{}", "99999999999999999999", "\\ud800", "\xFF"};
  for (size_t i = 0, count = 1 + random() % 8; i < count && !content.empty(); ++i) {
    size_t at = random() % content.size(), length = std::min<size_t>(1 + random() % 16, content.size() - at);
    switch (random() % 5) {
      case 0: content[at] = static_cast<char>(random()); break;
      case 1: content.erase(at, length); break;
      case 2: content.insert(at, content.substr(random() % content.size(), length)); break;
      case 3: content.replace(at, length, kWords[random() % std::size(kWords)]); break;
      default: content.resize(random() % 16 == 0 ? at : content.size()); break;
    }
  }
  return content;
}

void fuzz(const std::string& kind, size_t count, unsigned seed, const std::vector<std::string>& files) {
  std::mt19937 random(seed);
  std::vector<std::string> contents;
  for (const std::string& file : files) contents.push_back(read(file));
  size_t refused = 0;
  for (size_t i = 0; i < count; ++i) {
    try {
      parse(kind, altered(contents[i % contents.size()], random));
    } catch (const Error&) {
      ++refused;
    }
  }
  std::cout << count << " tried, " << refused << " refused\n";
}

// A tower that counts its runs.
struct CountedTower : Backend {
  int runs = 0;
  ImagePtr vision(const Pixels& view, const Extras&) override {
    ++runs;
    auto out = std::make_shared<ImageTokens>();
    out->rows.width = 1, out->rows.data = view.values;
    out->patches.places = {0}, out->patches.merged = {0};
    return out;
  }
  TokenStates embed(const Ids&) override { return {}; }
  Rows head(const Rows&) override { return {}; }
  Floats gate(int64_t, const Rows&) override { return {}; }
  Floats text_tower(const Ids&) override { return {}; }
  Rows project(const Rows&) override { return {}; }
  std::unique_ptr<StageCache> stage(size_t, int64_t) override { return nullptr; }
};

void tiles() {
  CountedTower tower;
  std::vector<PreparedImage> shown;
  EncodedImages encoded(tower, shown);
  for (std::string line; std::getline(std::cin, line);) {
    PreparedImage image{{}, line, 0, 1, 1, [](const Views& views) { return joined(views); }, MarkedImage::plain(1)};
    Json numbers = parse_json(line, "stdin", Kind::request);
    for (const Json& number : *numbers.array()) image.views.push_back({1, 1, {static_cast<float>(*number.integer())}});
    std::vector<PreparedImage> before = std::exchange(shown, {image});
    encoded.replaced(before);
    int runs = tower.runs;
    ImagePtr tokens = encoded.encoders(Policy{}, nullptr, nullptr).front().encode();
    for (size_t i = 0; i < image.views.size(); ++i)
      if (tokens->rows.data[i] != image.views[i].values.front())
        fail(Kind::device, "tile ", i, " has the tokens of another one");
    std::cout << tower.runs - runs << "\n";
  }
}

}  // namespace

int main(int count, char** values) {
  std::string mode = count > 1 ? values[1] : "";
  try {
    if (mode == "tokenize" && count == 3)
      tokenize(values[2]);
    else if (mode == "render")
      render();
    else if (mode == "resize" && count == 7)
      resize(values + 2);
    else if (mode == "buffer" && count == 6)
      buffer(values + 2);
    else if (mode == "picture" && count == 3)
      picture(values[2]);
    else if (mode == "cache" && count == 5)
      SlotMemory(std::vector<size_t>(std::stoul(values[2]), std::stoul(values[4])), std::stoul(values[3])),
          std::cout << "ok\n";
    else if (mode == "select" && count > 6)
      select(values + 2, count > 7);
    else if (mode == "merge" && count == 7)
      merge(values + 2);
    else if (mode == "cut" && count == 5)
      cut(values[2], std::stol(values[3]), std::stoul(values[4]));
    else if (mode == "tiles")
      tiles();
    else if (mode == "turns")
      turns();
    else if (mode == "boxes")
      boxes();
    else if (mode == "specs")
      specs();
    else if (mode == "sha256")
      sha256();
    else if (mode == "layout" && count > 3)
      layout(values[2], {values + 3, values + count});
    else if (mode == "clips" && count == 4)
      clips(values[2], std::stol(values[3]));
    else if (mode == "ask" && count > 9)
      ask(values + 2, {values + 10, values + count});
    else if (mode == "stage" && count > 4)
      stage(values + 2, {values + 5, values + count});
    else if (mode == "parse" && count == 4)
      parse(values[2], read(values[3])), std::cout << "ok\n";
    else if (mode == "fuzz" && count > 5)
      fuzz(values[2], std::stoul(values[3]), static_cast<unsigned>(std::stoul(values[4])), {values + 5, values + count});
    else if (mode == "uniforms" && count == 4) {
      Random random(std::stoull(values[2]));
      for (int i = 0; i < std::stoi(values[3]); ++i) std::cout << python_repr(random.uniform()) << "\n";
    } else if (mode == "normals" && count == 4) {
      Floats drawn = Random(std::stoull(values[2])).normals(std::stoul(values[3]));
      std::cout.write(reinterpret_cast<const char*>(drawn.data()), static_cast<std::streamsize>(4 * drawn.size()));
    } else {
      std::cerr << "vtx-cpp-probe: tests/runtime/cpp/programs/probe.cpp says what it does\n";
      return 2;
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "Error: " << error.what() << "\n";
    return 1;
  }
}
