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
inline constexpr char kFileTokenizer[] = "tokenizer.json";
inline constexpr char kFileTemplate[] = "chat_template.jinja";
inline constexpr char kFileRope[] = "rope.safetensors";
inline constexpr char kFileFinalNorm[] = "final_norm.safetensors";
inline constexpr char kFileNewline[] = "image_newline.safetensors";
inline constexpr char kFileKvScales[] = "kv_scales.safetensors";
inline constexpr char kWeight[] = "weight";
inline constexpr char kNewlineTensor[] = "newline";
inline constexpr char kPagedPast[] = "past_lens";
inline constexpr char kPagedBegins[] = "subsequence_begins";
inline constexpr char kPagedBlocks[] = "block_indices";
inline constexpr char kPagedBlockBegins[] = "block_indices_begins";
inline constexpr char kPagedFilled[] = "max_context_len";
inline constexpr char kPagedRows[] = "rows";
inline constexpr char kOrtSilence[] = "ORT_DISABLE_TELEMETRY";
inline constexpr char kPastKey[] = "past_key.";
inline constexpr char kPastValue[] = "past_value.";
inline constexpr char kPresentKey[] = "present_key.";
inline constexpr char kPresentValue[] = "present_value.";
inline constexpr char kKeyScaleOf[] = "key_scale.";
inline constexpr char kValueScaleOf[] = "value_scale.";
inline constexpr int64_t kMaxFileBytes = 67108864;
inline constexpr int64_t kMaxSide = 16384;
inline constexpr int64_t kMaxPixels = 67108864;
inline constexpr int64_t kMaxResizedSide = 32768;
inline constexpr int64_t kMaxResizedPixels = 33554432;
inline constexpr int64_t kMaxParts = 32768;
inline constexpr int64_t kMaxScans = 100;
inline constexpr int64_t kMaxScanBlocks = 33554432;
inline constexpr int64_t kFormat = 5;
inline constexpr int64_t kMaxManifest = 4194304;
inline constexpr int64_t kMaxTokenizer = 67108864;
inline constexpr int64_t kMaxTemplateBytes = 524288;
inline constexpr int64_t kMaxTemplate = 131072;
inline constexpr int64_t kMaxPrinted = 4194304;
inline constexpr int64_t kMaxText = 2097152;
inline constexpr int64_t kMostWhole = 9007199254740992;
inline constexpr int64_t kMostThreads = 1024;
inline constexpr int64_t kMaxLayers = 512;
inline constexpr int64_t kMaxSize = 2147483647;
inline constexpr int64_t kMaxSegment = 4096;
inline constexpr int64_t kMaxId = 16777215;
inline constexpr int64_t kMaxInputSide = 2048;
inline constexpr int64_t kQuickBytes = 67108864;
inline constexpr int64_t kMaxResolutions = 128;
inline constexpr int64_t kMaxTiles = 64;
inline constexpr int64_t kMaxMarkedSide = 8;
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
inline constexpr float kTauDefault = 2.0f;
inline constexpr double kLeastPenalty = 0.001;

}  // namespace vtxcore::names
