// vtx-cpp-run: answers questions about an image, with the options and the JSON of vtx-run.
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <sstream>
#include <thread>
#include <utility>

#include "vtx/vtx.hpp"

namespace {

constexpr int kIncomplete = 3;  // the exit status after an answer that was cut before its form was complete
constexpr char kHelp[] =
    "Usage: vtx-cpp-run [OPTIONS] --bundle DIR IMAGE|FRAMES QUESTION [QUESTION ...]\n\n"
    "  Answer one or more questions about an image, or a folder of a video's frames, which is encoded once.\n\n"
    "Options:\n"
    "  --bundle DIR            Bundle directory [default: $VTX_BUNDLE].\n"
    "  --k N|auto|card|none    Prebuilt K; card: that of the bundle's card for the kind of answer [default: the bundle's].\n"
    "  --rest N%|N             Image tokens that stay from K on, those that the question attends to most: a share of them,\n"
    "                          e.g. 10%, or a number [default: the card's; without a card none].\n"
    "  --reduce SPEC|none      Token reduction, e.g. fastv or mustdrop:192 [default: the bundle's first].\n"
    "  --about TEXT            Select image tokens by this text instead of the question (cdpruner, dart:k=0).\n"
    "  --boxes                 Also read the boxes that an answer names, in pixels of the picture.\n"
    "  --thinking, --no-thinking\n"
    "                          Think before the answer, or do not; on stderr.\n"
    "  --max-thinking-tokens N End the thought after N tokens [default: no limit].\n"
    "  --json-schema JSON      Constrain the answer to JSON of this schema.\n"
    "  --choices A,B,...       Constrain the answer to one of these; a JSON list is also accepted.\n"
    "  --accept P|card         With --choices: the probability that an answer must have; below it the answer is unsure.\n"
    "                          card: the threshold of the bundle's card (vtx-eval --coverage).\n"
    "  --regex REGEX           Constrain the answer to this regular expression.\n"
    "  --grammar TEXT          Constrain the answer to this grammar (llguidance's Lark syntax).\n"
    "  --gate-threshold P      With --k auto: withdraw when a gate's probability exceeds this [default: 0.5].\n"
    "  --image FILE            Additional image in the same prompt; repeat for more.\n"
    "  --video FRAMES          Additional video in the same prompt: a folder with its frames as PNG or JPEG files, in\n"
    "                          the order of their names; repeat for more.\n"
    "  --frames N              Frames sampled from each video [default: the bundle's].\n"
    "  --fps R                 Frames per second in these folders, for models that read timestamps [default: 24].\n"
    "  --fit crop|pad|squash   Handling of non-square images [default: as the checkpoint's image processor];\n"
    "                          released: LLaVA-NeXT tiling as in CDPruner's code.\n"
    "  --image-tokens N        At most N tokens per image, for models that see images in tiles, at native resolution or\n"
    "                          within a budget (Gemma 4: 70, 140, 280, 560 or 1120) [default: the bundle's].\n"
    "  --text-only             Ask without an image; all arguments are questions.\n"
    "  --chat                  Treat the questions as turns of one conversation.\n"
    "  --json                  Print only JSON, one object per question.\n"
    "  --max-new-tokens N      Maximum tokens per answer [default: 256].\n"
    "  --ignore-eos            Continue past end tokens, up to --max-new-tokens.\n"
    "  --temperature T         Sampling temperature; 0: greedy [default: 0].\n"
    "  --top-p P --top-k N --seed N\n"
    "  --max-tiles N           For tiling models: at most N tiles per image [default: the model's].\n"
    "  --wait                  Wait for the end of stdin after the last answer, for inspection.\n"
    "  --device auto|cpu|openvino|tensorrt[:N]\n"
    "  --compute TYPE          Arithmetic [default: the fastest that left the answers unchanged at export].\n"
    "  --library PATH          Engine library: a file or a directory.\n"
    "  --act STATE             File with the robot's state, a JSON list of numbers, or none. The arguments are camera\n"
    "                          images (or NAME=IMAGE), then the instruction. Prints actions as JSON.\n"
    "  --steps N               With --act: number of Euler steps [default: the checkpoint's].\n"
    "  --deadline-ms MS        With --act: fail if the actions take longer than this.\n"
    "  --normalized            With --act: state and actions are in normalised units.\n"
    "  --unnorm-key NAME       With --act: dataset whose statistics scale the actions (OpenVLA).\n"
    "  --require-signature PUBKEY\n"
    "                          Load the bundle only if it was signed with the private half of this Ed25519 key (PEM).\n"
    "  --threads N             CPU threads [default: all cores].\n"
    "  --repeat N              Ask all questions N times, for measurements.\n";

struct Arguments {
  std::vector<std::string> words, images, videos;
  int frames = 0;
  double fps = 0;
  std::optional<int> image_tokens;
  std::string bundle;
  vtx::LoadOptions load;
  vtx::AskOptions ask;
  std::string act;  // the file of the state
  vtx::ActOptions acting;
  bool text_only = false, chat = false, json = false, wait = false;
  long repeat = 1;
};

[[noreturn]] void usage(const std::string& problem) {
  std::cerr << "Error: " << problem << "; vtx-cpp-run --help shows the options\n";
  std::exit(2);
}

double number(const std::string& option, const char* text) {
  char* end = nullptr;
  double value = std::strtod(text, &end);
  if (end == text || *end) usage(option + " takes a number, not '" + text + "'");
  return value;
}

// A whole number as it is written; not by way of a double, which has 53 bits and a seed 64.
template <typename Whole>
Whole whole_number(const std::string& option, const char* text) {
  Whole value = 0;
  const char* end = text + std::strlen(text);
  auto found = std::from_chars(text, end, value);
  if (found.ec != std::errc() || found.ptr != end)
    usage(option + " takes a whole number from " + std::to_string(std::numeric_limits<Whole>::min()) + " to " +
          std::to_string(std::numeric_limits<Whole>::max()) + ", not '" + text + "'");
  return value;
}

// A word if there are more threads than cores: libvtx then uses the cores.
void note_threads(int threads) {
  auto cores = static_cast<int>(std::thread::hardware_concurrency());
  if (cores > 0 && threads > cores)
    std::cerr << threads << " threads are more than the " << cores << " cores of this machine, which are used\n";
}

std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      (out += '\\') += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

// Refuses a question that is the name of a picture.
void check_question(const std::string& question) {
  std::string ending = std::filesystem::path(question).extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  bool picture = ending == ".png" || ending == ".jpg" || ending == ".jpeg";
  if (picture && question.find(' ') == std::string::npos)
    usage("'" + question + "' is a picture, not a question; use --image " + question);
}

Arguments parse(int count, char** values) {
  Arguments out;
  if (const char* bundle = std::getenv("VTX_BUNDLE")) out.bundle = bundle;
  for (int i = 1; i < count; ++i) {
    std::string word = values[i];
    const char* value = nullptr;  // of --option=value
    if (size_t equals = word.find('='); word.compare(0, 2, "--") == 0 && equals != std::string::npos) {
      value = values[i] + equals + 1;
      word.resize(equals);
    }
    auto next = [&] {
      if (value == nullptr && ++i >= count) usage(word + " needs a value");
      return value ? std::exchange(value, nullptr) : values[i];
    };
    if (word == "--help" || word == "-h") {
      std::cout << kHelp;
      std::exit(0);
    } else if (word == "--") {  // what follows are no options
      out.words.insert(out.words.end(), values + i + 1, values + count);
      break;
    } else if (word == "--version") {
      std::cout << "vtx-cpp-run " << vtx_version() << "\n";
      std::exit(0);
    } else if (word == "--bundle")
      out.bundle = next();
    else if (word == "--k")
      out.ask.k = next();
    else if (word == "--rest")
      out.ask.rest = next();
    else if (word == "--reduce")
      out.ask.reduce = next();
    else if (word == "--accept")
      out.ask.accept = next();
    else if (word == "--about")
      out.ask.about = next();
    else if (word == "--json-schema" || word == "--choices" || word == "--regex" || word == "--grammar") {
      out.ask.guide_kind = word == "--json-schema" ? "schema" : word.substr(2);
      std::string text = next();
      size_t first = text.find_first_not_of(" \t\r\n");
      if (word == "--choices" && (first == std::string::npos || text[first] != '[')) {  // A,B,...
        std::string list;
        std::istringstream parts(text + ",");
        for (std::string part; std::getline(parts, part, ',');) list += (list.empty() ? "[" : ", ") + json_text(part);
        text = list + "]";
      }
      out.ask.guide = text;
    } else if (word == "--act")
      out.act = next();
    else if (word == "--steps")
      out.acting.steps = whole_number<int64_t>(word, next());
    else if (word == "--deadline-ms")
      out.acting.deadline_ms = number(word, next());
    else if (word == "--normalized")
      out.acting.normalized = true;
    else if (word == "--unnorm-key")
      out.acting.unnorm_key = next();
    else if (word == "--gate-threshold")
      out.ask.gate_threshold = number(word, next());
    else if (word == "--image")
      out.images.emplace_back(next());
    else if (word == "--fit")
      out.load.fit = next();
    else if (word == "--boxes")
      out.ask.boxes = true;
    else if (word == "--thinking" || word == "--no-thinking")
      out.ask.thinking = word == "--thinking";
    else if (word == "--max-thinking-tokens")
      out.ask.max_thinking_tokens = whole_number<int64_t>(word, next());
    else if (word == "--text-only")
      out.text_only = true;
    else if (word == "--chat")
      out.chat = true;
    else if (word == "--wait")
      out.wait = true;
    else if (word == "--json")
      out.json = true;
    else if (word == "--max-new-tokens")
      out.ask.max_new_tokens = whole_number<int64_t>(word, next());
    else if (word == "--ignore-eos")
      out.ask.ignore_eos = true;
    else if (word == "--temperature")
      out.ask.temperature = number(word, next());
    else if (word == "--top-p")
      out.ask.top_p = number(word, next());
    else if (word == "--top-k")
      out.ask.top_k = whole_number<int64_t>(word, next());
    else if (word == "--seed")
      out.ask.seed = whole_number<uint64_t>(word, next());
    else if (word == "--device")
      out.load.device = next();
    else if (word == "--max-tiles")
      out.load.max_tiles = whole_number<int>(word, next());
    else if (word == "--max-pixels")
      out.load.max_pixels = whole_number<int64_t>(word, next());
    else if (word == "--require-signature")
      out.load.require_signature = next();
    else if (word == "--compute")
      out.load.compute = next();
    else if (word == "--library")
      out.load.library = next();
    else if (word == "--threads")
      out.load.threads = whole_number<int>(word, next());
    else if (word == "--repeat")
      out.repeat = whole_number<long>(word, next());
    else if (word == "--video")
      out.videos.emplace_back(next());
    else if (word == "--frames")
      out.frames = whole_number<int>(word, next());
    else if (word == "--image-tokens")
      out.image_tokens = whole_number<int>(word, next());
    else if (word == "--fps")
      out.fps = number(word, next());
    else if (word.size() > 2 && word.compare(0, 2, "--") == 0)
      usage("there is no option " + word);
    else
      out.words.push_back(word);
    if (value) usage(word + " takes no value");
  }
  if (out.bundle.empty()) usage("no bundle given: --bundle DIR, or set VTX_BUNDLE");
  if (!out.act.empty()) {
    if (out.words.size() < 2) usage("no picture given: vtx-cpp-run --act state.json camera.jpg \"instruction\"");
    out.images.assign(out.words.begin(), out.words.end() - 1);
    out.words.erase(out.words.begin(), out.words.end() - 1);
    out.acting.k = out.ask.k, out.acting.seed = out.ask.seed, out.acting.reduce = out.ask.reduce;
    return out;
  }
  if (!out.text_only && !out.words.empty()) {
    out.images.insert(out.images.begin(), out.words.front());
    out.words.erase(out.words.begin());
  }
  for (const std::string& question : out.words) check_question(question);
  if (out.words.empty()) usage("no question given: vtx-cpp-run --bundle DIR image.jpg \"question\"");
  return out;
}

// A JSON list of numbers in a file.
std::vector<float> read_state(const std::string& path) {
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw std::runtime_error("cannot read " + path + "; name a JSON list of numbers, which is the robot's state");
  std::vector<float> out;
  const char* at = text.c_str();
  auto blank = [&] { at += std::strspn(at, " \t\r\n"); };
  blank();
  bool list = *at == '[';
  for (char end = ','; list && end == ',';) {
    ++at;
    blank();
    if (*at == ']' && out.empty()) break;
    char* behind = nullptr;
    out.push_back(std::strtof(at, &behind));
    list = behind != at;
    at = behind;
    blank();
    end = *at;
    list = list && (end == ',' || end == ']');
  }
  if (list) ++at, blank();
  if (!list || *at) throw std::runtime_error(path + " is not a JSON list of numbers, which is the robot's state");
  return out;
}

// "a", "b" of these texts.
std::string quoted_list(const std::vector<std::string>& texts) {
  std::string out;
  for (const std::string& text : texts) out += (out.empty() ? "" : ", ") + json_text(text);
  return out;
}

void act(const Arguments& arguments) {
  std::vector<float> state;
  if (arguments.act != "none") state = read_state(arguments.act);
  vtx::ActOptions options = arguments.acting;
  std::vector<vtx::Image> images;
  vtx::Model model(arguments.bundle, arguments.load);
  note_threads(arguments.load.threads);
  auto named = [](const std::string& image) { return image.find('=') != std::string::npos; };
  bool all = std::all_of(arguments.images.begin(), arguments.images.end(), named);
  for (const std::string& image : arguments.images) {
    size_t equals = image.find('=');
    if (all) options.cameras.push_back(image.substr(0, equals));
    images.push_back(vtx::Image::file(all ? image.substr(equals + 1) : image));
  }
  const std::string& instruction = arguments.words.front();
  for (long round = 0; round < arguments.repeat; ++round) {
    std::string facts = model.act(images, instruction, state, options).json();
    std::cout << "{\"instruction\": " << json_text(instruction) << ", \"image\": [" << quoted_list(arguments.images)
              << "], \"bundle\": " << json_text(arguments.bundle) << ", " << facts.substr(1) << "\n"
              << std::flush;
  }
}

// The answer's object with the question before it and why it ended behind it, as vtx-run prints it.
void print_json(const Arguments& arguments, const std::string& question, const vtx::Answer& answer) {
  std::vector<std::string> sources = arguments.images;
  sources.insert(sources.end(), arguments.videos.begin(), arguments.videos.end());
  std::string images = quoted_list(sources);
  std::string facts = answer.json();
  facts.pop_back();
  std::cout << "{\"question\": " << json_text(question) << ", \"image\": [" << images
            << "], \"bundle\": " << json_text(arguments.bundle) << ", " << facts.substr(1)
            << ", \"stopped\": " << json_text(answer.stopped()) << "}\n"
            << std::flush;
}

// What follows the text of an answer: how probable its choices are, and why it is unsure.
void print_end(const vtx::Answer& answer) {
  std::cout << std::endl;
  if (std::optional<std::string> thought = answer.thought()) std::cerr << "thought: " << *thought << "\n";
  std::vector<std::pair<std::string, double>> choices = answer.choices();
  std::stable_sort(choices.begin(), choices.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string line;
  for (const auto& [choice, probability] : choices) {
    char share[16];
    std::snprintf(share, sizeof share, " %.1f%%", 100 * probability);
    line += (line.empty() ? "" : ", ") + choice + share;
  }
  if (!line.empty()) std::cerr << line << "\n";
  for (const vtx::Box& box : answer.boxes())
    std::cerr << box.label << ": " << box.left << ", " << box.top << ", " << box.right << ", " << box.bottom << "\n";
  if (std::optional<std::string> reason = answer.unsure()) std::cerr << "unsure: " << *reason << "\n";
}

// The picture files of a folder, in the order of their names, as a video.
vtx::Image video_of(const std::string& folder, const Arguments& arguments) {
  if (!std::filesystem::is_directory(folder))
    throw std::runtime_error(folder +
                             " is not a folder; libvtx decodes no video files, so give a folder with the frames as "
                             "PNG or JPEG files, or ask vtx-run");
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::string kind = entry.path().extension().string();
    std::transform(kind.begin(), kind.end(), kind.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (kind == ".png" || kind == ".jpg" || kind == ".jpeg") names.push_back(entry.path().string());
  }
  std::sort(names.begin(), names.end());
  std::vector<vtx::Image> frames;
  for (const std::string& name : names) frames.push_back(vtx::Image::file(name));
  return vtx::Image::video(std::move(frames), arguments.fps, arguments.frames);
}

// False if an answer was cut before its form was complete.
bool run(const Arguments& arguments) {
  bool complete = true;
  std::string input;  // of an image that is read from stdin
  std::vector<vtx::Image> images;
  bool videos = !arguments.videos.empty(), stills = false;
  for (const std::string& name : arguments.images) {
    if (name == "-") input.assign(std::istreambuf_iterator<char>(std::cin), {});
    bool folder = name != "-" && std::filesystem::is_directory(name);
    videos |= folder;
    images.push_back(name == "-" ? vtx::Image::bytes(input.data(), input.size())
                     : folder    ? video_of(name, arguments)
                                 : vtx::Image::file(name));
    if (arguments.image_tokens && !folder) images.back() = images.back().with_tokens(*arguments.image_tokens);
    stills |= !folder;
  }
  for (const std::string& folder : arguments.videos) images.push_back(video_of(folder, arguments));
  if (!stills && arguments.image_tokens)
    throw std::runtime_error("--image-tokens has no effect: there is no image; leave it out");
  if (!videos && (arguments.frames != 0 || arguments.fps != 0))
    throw std::runtime_error("--frames and --fps have no effect: there is no video; leave them out");
  vtx::Model model(arguments.bundle, arguments.load);
  note_threads(arguments.load.threads);
  vtx::Conversation conversation = model.open(images);
  vtx::OnText show = [](std::string_view text) {
    std::cout << text << std::flush;
    return static_cast<bool>(std::cout);
  };
  if (arguments.json) show = nullptr;
  for (long round = 0; round < arguments.repeat; ++round) {
    for (const std::string& question : arguments.words) {
      vtx::Answer answer = arguments.chat ? conversation.chat(question, arguments.ask, show)
                                          : conversation.ask(question, arguments.ask, show);
      complete = complete && !(arguments.ask.guide && answer.stopped() != "end");
      if (arguments.json)
        print_json(arguments, question, answer);
      else
        print_end(answer);
    }
    if (arguments.chat) conversation.restart_chat();
  }
  if (arguments.wait) std::cin.ignore(std::numeric_limits<std::streamsize>::max());
  return complete;
}

}  // namespace

int main(int count, char** values) {
  try {
    Arguments arguments = parse(count, values);
    if (!arguments.act.empty()) {
      act(arguments);
      return 0;
    }
    if (run(arguments)) return 0;
    std::cerr << "an answer was cut before its form was complete; raise --max-new-tokens, or bound the form's fields\n";
    return kIncomplete;
  } catch (const std::exception& error) {
    std::cerr << "Error: " << error.what() << "\n";
    return 1;
  }
}
