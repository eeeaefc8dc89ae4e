/* libvtx: answers questions about images from bundles that vtx-export made.
 *
 * Every call that can fail returns a vtx_status; vtx_last_error() then has one line for a person. No call throws. Texts
 * are UTF-8 and end with a zero; those that go in are copied. Handles belong to whoever got them and are freed by the
 * function named beside them. A handle that is NULL, was freed, or is of another kind is refused with VTX_REQUEST, and
 * freeing it does nothing.
 *
 * Threads: a model may be used from any number of threads. A conversation computes one answer at a time, and a second
 * thread gets VTX_BUSY; vtx_cancel may be called from any thread. No question waits in a queue, so there are no
 * priorities. An answer does not change and may be read by all.
 *
 * Structs begin with their size, so that a program built against an older header runs with a newer library, and one
 * built against a newer header with an older library as long as it sets nothing that this one does not know: fill them
 * with the _init function, whose `size` is sizeof the struct, then set what should differ.
 */
#ifndef VTX_VTX_H
#define VTX_VTX_H

#include <stddef.h>
#include <stdint.h>

#define VTX_API_VERSION 1

#if defined(VTX_BUILDING)
#define VTX_API __attribute__((visibility("default")))
#else
#define VTX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum vtx_status {
  VTX_OK = 0,
  VTX_REQUEST = 1,  /* a question or an option cannot be served: a K that was not prebuilt, an empty question */
  VTX_CONTEXT = 2,  /* the prompt and its answer need more KV slots than the bundle holds */
  VTX_BUSY = 3,     /* the conversation is computing an answer */
  VTX_TEMPLATE = 4, /* the chat template refuses the conversation, or libvtx cannot render it */
  VTX_IMAGE = 5,    /* an image cannot be read, or is beyond the limits */
  VTX_BUNDLE = 6,   /* a bundle is damaged, incomplete, from another version, or reaches outside itself */
  VTX_DEVICE = 7,   /* an engine is missing, too old, or fails */
  VTX_MEMORY = 8,   /* there is no memory left; the model can be used on */
  VTX_INTERNAL = 9, /* a fault of libvtx itself */
  VTX_DEADLINE = 10 /* the actions were not ready by their deadline */
} vtx_status;

typedef struct vtx_model vtx_model;
typedef struct vtx_conversation vtx_conversation;
typedef struct vtx_answer vtx_answer;
typedef struct vtx_actions vtx_actions;

/* The library's version, as "0.1.0", and the VTX_API_VERSION that it was built with. */
VTX_API const char* vtx_version(void);
VTX_API int vtx_api_version(void);

/* What was wrong in this thread's last call that failed; valid until its next call. */
VTX_API const char* vtx_last_error(void);

/* ---- models */

typedef struct vtx_load_options {
  size_t size;
  const char* device;  /* "cpu" (ONNX Runtime), "openvino", "tensorrt", or "auto": the best that is possible here;
                          "tensorrt:1": on the second GPU */
  const char* library; /* the engine's library, a file or a directory; NULL: $VTX_ONNXRUNTIME, $VTX_OPENVINO or
                          $VTX_TENSORRT, then the system's */
  int32_t threads;     /* to compute with, at most 1024, of which no more than cores are used; 0: all cores */
  const char*
      fit; /* images of another shape: "crop", "pad", "squash", "released" (tiles); NULL: as in the model's training */
  const char* compute; /* the type of the arithmetic, such as "f32"; NULL: the fastest that kept the answers at export */
  int32_t max_tiles;   /* where images are seen in tiles, the most of an image, the whole one counted; 0: the model's own */
  const char* require_signature; /* the file of a public key (Ed25519, PEM): only a bundle that the private half signed
                                    is loaded, after all its files were hashed. Needs OpenSSL's libcrypto, which is
                                    found at run time. NULL: no signature is asked for */
  int64_t max_pixels; /* where images are seen at native resolution, the most pixels of an image after it is resized; 0:
                         the model's own */
} vtx_load_options;

VTX_API void vtx_load_options_init(vtx_load_options* options, size_t size);

/* Loads a bundle. `options` may be NULL. Takes as long as reading the weights. Free with vtx_model_free, which may be
 * called while conversations are open: the last of them frees the engine. Unless the environment has ORT_DISABLE_TELEMETRY,
 * it is set to 1 before onnxruntime is looked for, so that onnxruntime reports nothing. */
VTX_API vtx_status vtx_load(const char* bundle, const vtx_load_options* options, vtx_model** model);
VTX_API void vtx_model_free(vtx_model* model);

/* One line of JSON: name, layers, precision, prebuilt K, reductions, device, engine, whether the bundle's card (see vtx-fit)
 * is used, and of a model that makes actions their sizes, its cameras or its data sets. Valid as long as the model. */
VTX_API const char* vtx_model_json(const vtx_model* model);

/* ---- conversations */

typedef enum vtx_pixel_format {
  VTX_RGB8 = 0,
  VTX_BGR8 = 1,
  VTX_RGBA8 = 2, /* shown over white */
  VTX_BGRA8 = 3,
  VTX_GRAY8 = 4,
  VTX_NV12 = 5, /* Y at data, pairs of U and V at data2, equally far apart; BT.601, limited range */
  VTX_FILE = 6, /* data is a PNG or JPEG file of `bytes` bytes, such as a frame of MJPEG */
  VTX_YUYV = 7, /* Y, U, Y, V for two pixels, as webcams give them; BT.601, limited range */
  VTX_VIDEO = 8 /* no pixels: the `frames` of a video */
} vtx_pixel_format;

/* An image: a file by its path, or what lies in memory, which is copied. A VTX_VIDEO stands in a prompt as one image: its
 * `frames`, the first one first and of one size, are images of any other format, of which those are read that the model
 * sees. libvtx decodes no video files. */
typedef struct vtx_image {
  size_t size;
  const char* path; /* NULL: the image lies in memory */
  const void* data;
  const void* data2;
  size_t bytes; /* of a VTX_FILE */
  int32_t width, height;
  size_t stride; /* bytes from one row to the one below it */
  vtx_pixel_format format;
  const struct vtx_image* frames; /* of a VTX_VIDEO, as the three after it; of all the others these are not read */
  size_t frame_count;
  double fps;      /* frames a second, for models whose prompts tell times; 0: 24 */
  int32_t sampled; /* the number of frames that are seen, evenly from the first to the last, at most 64; 0: as many as the
                      bundle says */
  int32_t image_tokens; /* of an image, the most tokens that it may have, where the model sees images in tiles, at native
                           resolution or within a budget (Gemma 4: 70, 140, 280, 560 or 1120); 0: as the bundle says */
} vtx_image;

VTX_API void vtx_image_init(vtx_image* image, size_t size);

/* Opens images and videos, none too, for questions about them; where the chat template prints images before videos, they are
 * reordered. `system`: a system prompt, or NULL. Costs reading and resizing; the
 * vision graph runs with the first question. Free with vtx_conversation_free; while it answers, that cancels the answer. */
VTX_API vtx_status vtx_open(vtx_model* model, const vtx_image* images, size_t count, const char* system,
                            vtx_conversation** conversation);
VTX_API void vtx_conversation_free(vtx_conversation* conversation);

/* Another conversation about the same images with the same system prompt, which begins with what this one has of them: they
 * are not encoded again, and their K and V are copied and not computed. So several threads ask about one picture side by
 * side. A chat begins anew. VTX_BUSY while this one answers. Free with vtx_conversation_free. */
VTX_API vtx_status vtx_conversation_fork(vtx_conversation* conversation, vtx_conversation** forked);

/* Asks about other images from now on, such as the next frame of a camera; questions and the chat begin anew. What the caches
 * hold of the prompt up to the first token that differs is not run again: the system prompt, images that stay, and of images
 * in tiles those before the first changed one, with K and V equal to fresh ones up to rounding. Tiles that are equal in
 * pixels to those of the images before are not encoded again; they are kept from the first replacement on.
 *
 * `replaced` (may be NULL) is 0 and nothing is done where the images are equal to the present ones in pixels after
 * preprocessing: answers still stand. So they do, as an approximation, where no mean colour of 64 x 64 cells of the image as
 * the model sees it differs by more than `near`, from 0 (never) to 1. VTX_BUSY while an answer is computed; vtx_cancel ends
 * it. */
VTX_API vtx_status vtx_conversation_replace(vtx_conversation* conversation, const vtx_image* images, size_t count, double near,
                                            int32_t* replaced);

/* A prefix file has what the caches hold of the prompt before its last image, such as a system prompt and images to compare
 * with, so that another process need not compute it; Python's `prefix_file` reads and writes the same. Load it right after
 * vtx_open: it serves the tokens that enter the decoder with the very same numbers, and no others. VTX_BUNDLE for one that is
 * missing, damaged, or of another bundle, engine or arithmetic: the conversation then computes it. Save it after an answer;
 * the file is replaced at once, and nothing is written where the one that was loaded, or saved before, has all of it. Keep it
 * where you keep the bundle. Where a signature is required, PATH.sig must hold one of the file by the same key, and none is
 * written: VTX_REQUEST. */
VTX_API vtx_status vtx_conversation_load_prefix(vtx_conversation* conversation, const char* path);
VTX_API vtx_status vtx_conversation_save_prefix(vtx_conversation* conversation, const char* path);

/* Called for each token with the text that is certain with it, `length` bytes, maybe none; 0 goes on, any other value
 * ends the answer as vtx_cancel does. It runs in the thread that asks, must not throw, and may call nothing of this
 * conversation but vtx_cancel. */
typedef int (*vtx_on_token)(void* user, int64_t token, const char* text, size_t length);

typedef struct vtx_ask_options {
  size_t size;
  const char* k;      /* a prebuilt K, "none", "auto" for the gates, "card" for that of the bundle's card for the kind of
                         answer; NULL: the bundle's default */
  const char* reduce; /* a spec such as "mustdrop:192", "none"; NULL: the bundle's first */
  int64_t max_new_tokens;
  double temperature; /* 0: always the most likely token */
  double top_p;
  int64_t top_k; /* 0: all tokens */
  int32_t has_seed;
  uint64_t seed; /* gives the tokens that it gives in Python */
  double repetition_penalty;
  double gate_threshold;
  const char* const* stop; /* strings at whose first occurrence the answer ends */
  size_t stop_count;
  double timeout; /* seconds from the question to the end; 0: no limit */
  int32_t ignore_eos;
  int32_t logprobs;
  vtx_on_token on_token;
  void* user;
  const char* about;      /* text by which image tokens are chosen in place of the question; NULL: by the question */
  const char* guide_kind; /* the form of the answer: "schema" (JSON text), "choices" (a JSON list), "regex" or "grammar" */
  const char* guide;      /* what gives that form; needs llguidance 1.7 or newer, which is found at run time; NULL: none */
  const char* rest; /* image tokens that stay from K on, those that the prompt's last token attends to most: a share,
                       "10%", or a number, "57"; NULL: the rest of the bundle's card with the card's K, else none */
  const char* accept; /* with choices, the probability that the model must give to its answer, "0.8", or "card" for that of
                         the bundle's card (vtx-eval --coverage): see vtx_answer_unsure; NULL: answers are not judged */
  int32_t boxes; /* also read the boxes that the answer names, see vtx_answer_box; VTX_REQUEST if the model has no stated
                    form of boxes, or the prompt not one picture */
  int32_t thinking; /* above 0 with a thought before the answer, below 0 without, see vtx_answer_thought; 0: as the chat
                       template has it. VTX_REQUEST if that has no switch (enable_thinking) */
  int64_t max_thinking_tokens; /* of the thought, after which it is ended; part of max_new_tokens; 0: no limit */
} vtx_ask_options;

VTX_API void vtx_ask_options_init(vtx_ask_options* options, size_t size);

/* Answers a question, independent of those before it; the images' part of the caches is reused. `options` may be NULL.
 * Blocks until the answer ends. Free the answer with vtx_answer_free. */
VTX_API vtx_status vtx_ask(vtx_conversation* conversation, const char* question, const vtx_ask_options* options,
                           vtx_answer** answer);

/* The next turn of a chat: the turns before it are part of the prompt. The image tokens that stay are the first turn's while
 * `options` ask for the same K, reductions and gate threshold; a turn that asks for others, or for a rest, selects anew, by
 * all turns so far. A turn counts once its answer is complete. vtx_chat_restart forgets all turns. */
VTX_API vtx_status vtx_chat(vtx_conversation* conversation, const char* question, const vtx_ask_options* options,
                            vtx_answer** answer);
VTX_API vtx_status vtx_chat_restart(vtx_conversation* conversation);

/* A prompt in token ids, for programs with a tokenizer of their own; each image stands as one image token, and each video as
 * one video token, for which libvtx puts all that its layout has, text among tiles and frames too. */
VTX_API vtx_status vtx_ask_ids(vtx_conversation* conversation, const int64_t* ids, size_t count,
                               const vtx_ask_options* options, vtx_answer** answer);

/* Ends the answer that is being computed, from any thread: within one token, or before the prompt's next stage. The
 * answer is what had come, stopped "cancelled". Does nothing where none is being computed. */
VTX_API void vtx_cancel(vtx_conversation* conversation);

/* ---- answers; what they give is valid as long as they are */

VTX_API const char* vtx_answer_text(const vtx_answer* answer);
VTX_API const int64_t* vtx_answer_ids(const vtx_answer* answer, size_t* count);
/* Of a model with a segmentation token (LISA): for each of these tokens in the answer the decoder's hidden state behind its
 * last norm at the token that chose it, which a mask decoder outside goes on from. `count` states of `hidden` floats, one
 * after the other, which belong to the answer; NULL where there are none. Costs nothing: they were copied as they came. */
VTX_API const float* vtx_answer_seg_states(const vtx_answer* answer, size_t* count, size_t* hidden);
/* Of an answer held to at most 64 choices: choice `index` of them, and how probable it is that the model answers with it, as
 * a share of all choices. NULL past the last, and where there are none. */
VTX_API const char* vtx_answer_choice(const vtx_answer* answer, size_t index, double* probability);
/* The probability that the model answers with one of these choices at all, before they are normalised; 0 without choices. */
VTX_API double vtx_answer_choices_mass(const vtx_answer* answer);
/* Of an answer whose boxes were asked for, the label of box `index`, and its left, top, right and bottom in pixels of the
 * picture as it was given. NULL past the last. */
VTX_API const char* vtx_answer_box(const vtx_answer* answer, size_t index, double corners[4]);
/* The thought before an answer, which is no part of its text and of what on_token gets; NULL without one. */
VTX_API const char* vtx_answer_thought(const vtx_answer* answer);
/* Why an answer is not to be acted on, if `accept` was given and its probability is below that; else NULL. */
VTX_API const char* vtx_answer_unsure(const vtx_answer* answer);
/* Of a guided answer: the number of tokens that its form imposed, because it left no other or did not allow the model's most
 * likely one, and the mean and smallest log probability that the model gave to them, which may be NULL, 0 without any. Text that the model finds unlikely was not its own, and may be wrong: "imposed" of the JSON says so. */
VTX_API int64_t vtx_answer_imposed(const vtx_answer* answer, double* mean_logprob, double* least_logprob);
/* "end", "stop", "length", "context", "timeout" or "cancelled". */
VTX_API const char* vtx_answer_stopped(const vtx_answer* answer);
/* The object that vtx-run --json prints of an answer. */
VTX_API const char* vtx_answer_json(const vtx_answer* answer);
VTX_API void vtx_answer_free(vtx_answer* answer);

/* ---- actions, of a model that makes them (pi0, OpenVLA) */

typedef struct vtx_act_options {
  size_t size;
  const char* k;      /* a prebuilt K, "none"; NULL: the bundle's default */
  int64_t steps;      /* Euler steps from noise to actions; 0: the checkpoint's */
  int32_t normalized; /* the state is normalised, and so are the actions; both have the model's full widths */
  const float* noise; /* [horizon, width of the model]; NULL: drawn */
  size_t noise_count; /* numbers of it */
  int32_t has_seed;
  uint64_t seed;              /* draws the noise that it draws in Python */
  double deadline_ms;         /* milliseconds from the call; actions that are not ready then: VTX_DEADLINE. 0: none */
  const char* const* cameras; /* the camera of each image by its name; NULL: images are in the bundle's order */
  const char* unnorm_key;     /* of a model whose tokens are actions, the data set whose units they have; NULL: the only one */
  const char* reduce;         /* of such a model, as in vtx_ask_options; NULL: the bundle's default */
} vtx_act_options;

VTX_API void vtx_act_options_init(vtx_act_options* options, size_t size);

/* The next actions of a robot in its own units, by the images of its cameras, an instruction and its state. A model whose
 * tokens are actions (OpenVLA) makes one of one image and an instruction, and reads no state (0 numbers). All new images go
 * through the tower in one pass; one that is the same, byte by byte, as one of the last call keeps its tokens. One call
 * runs at a time, others wait. `options` may be NULL. The deadline is looked at before the tower, every stage of the prompt
 * and every step, and after the last one. Actions that are not finite are never given out. Free with vtx_actions_free. */
VTX_API vtx_status vtx_act(vtx_model* model, const vtx_image* images, size_t count, const char* instruction,
                           const float* state, size_t state_count, const vtx_act_options* options, vtx_actions** actions);

/* [horizon, width] numbers, the next moment's first, which belong to the actions. */
VTX_API const float* vtx_actions_values(const vtx_actions* actions, size_t* horizon, size_t* width);
/* The actions, the seconds of tower, prompt and expert, and the number of images that ran through the tower. */
VTX_API const char* vtx_actions_json(const vtx_actions* actions);
VTX_API void vtx_actions_free(vtx_actions* actions);

#ifdef __cplusplus
}
#endif
#endif
