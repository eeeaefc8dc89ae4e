"""libvtx refuses in the words of Python; what it alone says stands here with its reason."""

from __future__ import annotations

from tests.support.messages import only_in_cpp

LIBRARIES = "libvtx opens the libraries of engines itself; Python imports packages"
CALLERS = "only the C interface takes buffers and token ids"
BUILT = "libvtx may lack it; Python has it"
PROMPT = "libvtx reads tokenizer.json and renders prompts itself; Python has libraries for both"
ONLY_CPP = {
    "{} was not found ({}); name its library with the option library or in {}": LIBRARIES,
    "{} was built for another release of OpenVINO than the one in {} ({}); name that one with the option "
    "library or in {}, or build libvtx with the release that is here": LIBRARIES,
    "the plug-in {} cannot be loaded ({}); build libvtx where CMake finds {}, or use device cpu": LIBRARIES,
    "the plug-in {} is of another libvtx; install both together": LIBRARIES,
    "{} in {} does not start: {}": LIBRARIES,
    "onnxruntime {} in {} is too old, 1.22 or newer is needed": LIBRARIES,
    "{} {} is here ({}), but {} has no plug-in of libvtx for it; build libvtx with its headers: cmake "
    "-DVTX_TENSORRT_INCLUDES=DIR": LIBRARIES,
    "signatures need OpenSSL's libcrypto, 1.1.1 or newer, which was not found ({}); install it, or name "
    "the library in VTX_LIBCRYPTO": LIBRARIES,
    "the prompt has {} token ids and {} image tokens for {} images; give at least one id, and one image "
    "token for each image": CALLERS,
    "the prompt has {} image tokens, its images give another number": CALLERS,
    "about stands in place of the question, and only token ids are given; ask by text": CALLERS,
    "the buffer has no data; give a pointer to its pixels": CALLERS,
    "the buffer's rows are {} bytes apart; give the stride in bytes, {} to {}": CALLERS,
    "{} frame of {}x{} has an odd side; crop it to even ones": CALLERS,
    "{}.{}: {} are not built in libvtx; load the bundle with Python": BUILT,
    "{} is not built into libvtx, which has {}; use one of these, or Python": BUILT,
    "{} needs {}, which this libvtx was built without; install its headers and build again, or give the pixels": BUILT,
    "the tokenizer's model is not BPE{}": PROMPT,
    "the tokenizer's BPE marks parts of words{}": PROMPT,
    "the tokenizer's BPE drops merges at random{}": PROMPT,
    "tokenizer.json is damaged: it has no vocabulary or no merges; export the bundle again": PROMPT,
    "tokenizer.json is damaged: a token has no id; export the bundle again": PROMPT,
    "tokenizer.json is damaged: merge {} names a token that is not there; export again": PROMPT,
    "the tokenizer's decoder has {}, which libvtx does not know: give token ids instead": PROMPT,
    "the text is not UTF-8; convert it": PROMPT,
    "the text becomes the special token {} once it is normalized; leave it out": PROMPT,
    "the tokenizer's normalizer has {}, which libvtx does not know: give token ids instead": PROMPT,
    "the control token {} is not an added token of the tokenizer, which libvtx needs: give token ids instead": PROMPT,
    "this conversation needs the chat template itself, and libvtx renders prompt forms only ({}); ask in "
    "another shape, or give token ids": PROMPT,
    "the prompt forms print {} {} times for {} images": PROMPT,
    "the tokenizer gives token {}, the model has {} tokens, numbered from 0; export again with the "
    "tokenizer that belongs to the model": PROMPT,
    "tokenizer.json is damaged: {} is missing; export the bundle again": PROMPT,
    "tokenizer.json is damaged: {} is not a token and its id; export the bundle again": PROMPT,
    "tokenizer.json is damaged: an added token has no id or text; export the bundle again": PROMPT,
    "the added token {} counts as a word only, which libvtx does not know: give token ids instead": PROMPT,
    "the text tower's tokenizer does not put its tokens around a text as CLIP's does, which libvtx does "
    "not know: export the bundle without --text-tower": PROMPT,
    "the tokenizer cuts words by {}, which libvtx does not know: give token ids instead": PROMPT,
}
MOST = 17  # beside those of PROMPT, which go with the code that a library takes over


def test_what_libvtx_says_python_says_in_the_same_words() -> None:
    assert {template for _, template in only_in_cpp()} == set(ONLY_CPP)
    assert sum(reason != PROMPT for reason in ONLY_CPP.values()) <= MOST
