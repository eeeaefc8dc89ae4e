// Names, limits and constants that the Python runtime declares. Written by scripts/cpp_names.py; do not edit.
#pragma once

#include <cstdint>

namespace vtxcore::names {

inline constexpr char kIds[] = "ids";
inline constexpr char kHidden[] = "hidden";
inline constexpr char kHiddenOut[] = "hidden_out";
inline constexpr char kPixels[] = "pixel_values";
inline constexpr char kFeatures[] = "image_features";
inline constexpr char kPositions[] = "position_ids";
inline constexpr char kCos[] = "cos";
inline constexpr char kSin[] = "sin";
inline constexpr char kLastSlot[] = "last_slot";
inline constexpr char kTotalSlots[] = "total_slots";
inline constexpr char kLogits[] = "logits";
inline constexpr char kBest[] = "best";
inline constexpr char kOdds[] = "odds";
inline constexpr char kQuery[] = "query";
inline constexpr char kKey[] = "key";
inline constexpr char kKeyScale[] = "key_scale";
inline constexpr char kAttentionSum[] = "attention_sum";
inline constexpr char kAttentionMax[] = "attention_max";
inline constexpr char kTau[] = "tau";
inline constexpr char kPatchIndex[] = "patch_index";
inline constexpr char kMerged[] = "merged";
inline constexpr char kSimilarity[] = "similarity";
inline constexpr char kClsAttention[] = "cls_attention";
inline constexpr char kClsAttentionLast[] = "cls_attention_last";
inline constexpr char kClipPatches[] = "clip_patches";
inline constexpr char kTextEmbedding[] = "text_embedding";
inline constexpr char kReceived[] = "received";
inline constexpr char kTowerTokens[] = "tower_tokens";
inline constexpr char kTowerStates[] = "tower_states";
inline constexpr char kSeenSlots[] = "seen_slots";
inline constexpr char kGroup[] = "group";
inline constexpr char kRobotState[] = "robot_state";
inline constexpr char kActions[] = "actions";
inline constexpr char kTime[] = "time";
inline constexpr char kChange[] = "change";
inline constexpr char kSlotted[] = "slots";
inline constexpr char kUncached[] = "none";
inline constexpr char kStateful[] = "state";
inline constexpr char kState[] = "state";
inline constexpr char kStateEnds[] = "state_ends";
inline constexpr char kStateOut[] = "state_out";
inline constexpr char kSlidingCos[] = "sliding_cos";
inline constexpr char kSlidingSin[] = "sliding_sin";
inline constexpr char kFirstSlot[] = "first_slot";
inline constexpr char kFileTokenizer[] = "tokenizer.json";
inline constexpr char kFileTemplate[] = "chat_template.jinja";
inline constexpr char kFileRope[] = "rope.safetensors";
inline constexpr char kFileFinalNorm[] = "final_norm.safetensors";
inline constexpr char kFileNewline[] = "image_newline.safetensors";
inline constexpr char kFileState[] = "state_projection.safetensors";
inline constexpr char kFileKvScales[] = "kv_scales.safetensors";
inline constexpr char kWeight[] = "weight";
inline constexpr char kBias[] = "bias";
inline constexpr char kTokenInput[] = "token_input.";
inline constexpr char kNewlineTensor[] = "newline";
inline constexpr char kPagedPast[] = "past_lens";
inline constexpr char kPagedBegins[] = "subsequence_begins";
inline constexpr char kPagedBlocks[] = "block_indices";
inline constexpr char kPagedBlockBegins[] = "block_indices_begins";
inline constexpr char kPagedFilled[] = "max_context_len";
inline constexpr char kPagedSliding[] = "sliding.";
inline constexpr char kPagedWindow[] = "window";
inline constexpr char kPagedImages[] = "token_types";
inline constexpr char kPagedRows[] = "rows";
inline constexpr char kOrtSilence[] = "ORT_DISABLE_TELEMETRY";
inline constexpr char kNoFrames[] = "TensorRT has no engine for the frames of videos of this model";
inline constexpr char kNotBuilt[] = "TensorRT does not support native image resolution for this model";
inline constexpr char kNotRenumbered[] = "positions of three parts, which cannot be renumbered; use positions=keep";
inline constexpr char kPrefixFormat[] = "vtx-prefix-2";
inline constexpr char kNotFinite[] =
    "the logits of this answer are not finite numbers; export with --precision bf16 or fp32";
inline constexpr char kPairs[] = "pairs";
inline constexpr char kNoActions[] = "vtx builds TensorRT engines for models that output actions, but does not run them yet";
inline constexpr char kYesNo[] = "yes or no";
inline constexpr char kChoice[] = "choice";
inline constexpr char kNumber[] = "number";
inline constexpr char kText[] = "quoted text";
inline constexpr char kPastKey[] = "past_key.";
inline constexpr char kPastValue[] = "past_value.";
inline constexpr char kPresentKey[] = "present_key.";
inline constexpr char kPresentValue[] = "present_value.";
inline constexpr char kKeyScaleOf[] = "key_scale.";
inline constexpr char kValueScaleOf[] = "value_scale.";
inline constexpr char kSourceSlot[] = "last_slot.";
inline constexpr int64_t kMaxFileBytes = 67108864;
inline constexpr int64_t kMaxSide = 16384;
inline constexpr int64_t kMaxPixels = 67108864;
inline constexpr int64_t kMaxResizedSide = 32768;
inline constexpr int64_t kMaxResizedPixels = 33554432;
inline constexpr int64_t kMaxParts = 32768;
inline constexpr int64_t kMaxScans = 100;
inline constexpr int64_t kMaxScanBlocks = 33554432;
inline constexpr int64_t kMaxFramePixels = 16777216;
inline constexpr int64_t kMaxSampledFrames = 64;
inline constexpr int64_t kFormat = 6;
inline constexpr int64_t kMaxManifest = 4194304;
inline constexpr int64_t kMaxTokenizer = 67108864;
inline constexpr int64_t kMaxTemplateBytes = 524288;
inline constexpr int64_t kMaxTemplate = 131072;
inline constexpr int64_t kMaxPrinted = 4194304;
inline constexpr int64_t kMaxText = 2097152;
inline constexpr int64_t kMostWhole = 9007199254740992;
inline constexpr int64_t kMostThreads = 1024;
inline constexpr int64_t kMaxSteps = 1000;
inline constexpr int64_t kMaxBins = 65536;
inline constexpr int64_t kMaxNumbers = 256;
inline constexpr int64_t kMaxLayers = 512;
inline constexpr int64_t kMaxSize = 2147483647;
inline constexpr int64_t kMaxSegment = 4096;
inline constexpr int64_t kMaxTaps = 16;
inline constexpr int64_t kRecent = 16;
inline constexpr int64_t kTried = 65;
inline constexpr int64_t kStateBytes = 8388608;
inline constexpr int64_t kMaxId = 16777215;
inline constexpr int64_t kMaxPattern = 128;
inline constexpr int64_t kCoordinates = 4;
inline constexpr int64_t kMaxInputSide = 2048;
inline constexpr int64_t kQuickBytes = 67108864;
inline constexpr int64_t kMaxResolutions = 128;
inline constexpr int64_t kMaxTiles = 64;
inline constexpr int64_t kMaxMarkedSide = 8;
inline constexpr int64_t kMaxRatio = 200;
inline constexpr int64_t kMaxCrops = 64;
inline constexpr int64_t kMasked = 512;
inline constexpr int64_t kNewline = -2;
inline constexpr int64_t kClassToken = -1;
inline constexpr int64_t kGone = -1;
inline constexpr int64_t kPatch = 0;
inline constexpr int64_t kWindow = 1;
inline constexpr int64_t kOddsWithdraw = 1;
inline constexpr int64_t kPagedBlock = 32;
inline constexpr int64_t kRowScaleBytes = 8;
inline constexpr int64_t kQuestionRows = 256;
inline constexpr int64_t kFewTokens = 8;
inline constexpr int64_t kLargestInteger = 127;
inline constexpr int64_t kMaxSchema = 65536;
inline constexpr int64_t kMaxRegex = 4096;
inline constexpr int64_t kMaxGrammar = 8192;
inline constexpr int64_t kMaxChoices = 1024;
inline constexpr int64_t kMaxScored = 64;
inline constexpr int64_t kKeptGrammars = 32;
inline constexpr int64_t kMaxCombined = 8;
inline constexpr int64_t kMaxMultiple = 10000;
inline constexpr int64_t kMaxOperators = 1;
inline constexpr int64_t kMaxFrameTokens = 65536;
inline constexpr int64_t kMaxBetween = 64;
inline constexpr int64_t kMaxLonger = 4096;
inline constexpr int64_t kMaxRate = 1000;
inline constexpr int64_t kGrowth = 256;
inline constexpr int64_t kInitialLexerFuel = 1000000;
inline constexpr int64_t kStepLexerFuel = 200000;
inline constexpr int64_t kStepMaxItems = 50000;
inline constexpr int64_t kMaxLexerStates = 50000;
inline constexpr int64_t kMaxGrammarSize = 500000;
inline constexpr int64_t kQuantisedRowsInt8 = 128;
inline constexpr int64_t kQuantisedRowsInt4 = 64;
inline constexpr int64_t kWideFp32 = 2048;
inline constexpr int64_t kWideFp16 = 896;
inline constexpr int64_t kWideBf16 = 896;
inline constexpr int64_t kWideInt8 = 896;
inline constexpr int64_t kWideInt4 = 896;
struct RowsOfARun {
  const char *weights, *compute;
  int64_t rows;
};
inline constexpr RowsOfARun kRowsOfARun[] = {{"int8", "bf16", 256}, {"int4", "f32", 256}, {"int4", "bf16", 256}};
struct Instructions {
  const char *compute, *flag;
};
// clang-format off
inline constexpr Instructions kInstructions[] = {
    {"bf16", "avx512_bf16"},
    {"bf16", "amx_bf16"},
    {"bf16", "avx_ne_convert"},
    {"int8", "avx512_vnni"},
    {"int8", "avx_vnni"},
    {"int8", "amx_int8"},
    {"int8", "asimddp"},
    {"int8", "i8mm"},
};
// clang-format on
inline constexpr int64_t kBudgets[] = {70, 140, 280, 560, 1120};
inline constexpr const char* kTowerPositions[] = {"table", "stretched", "nearest", "rotary", "axial"};
inline constexpr float kTauDefault = 2.0f;
inline constexpr double kUsualRate = 24.0;
inline constexpr double kLeastPenalty = 0.001;
inline constexpr double kUnlikely = -5.0;
inline constexpr double kWidest = 1e+30;

}  // namespace vtxcore::names
