"""libvtx refuses in the words of Python; what it alone says stands here with its reason."""

from __future__ import annotations

from tests.support.messages import only_in_cpp

LIBRARIES = "libvtx opens the libraries of engines itself; Python imports packages"
ROOTS = "root directories without Python are libvtx's"
CALLERS = "only the C interface takes buffers and token ids"
BUILT = "libvtx may lack it; Python has it"
PROMPT = "libvtx reads tokenizer.json itself and has another engine for templates; Python has libraries for both"
ONLY_CPP = {
    "{} was not found ({}); install it, or name its library {}": LIBRARIES,
    "{} was built for another release of OpenVINO than the one in {} ({}); name that one with the option "
    "library or in {}, or build libvtx with the release that is here": LIBRARIES,
    "the plug-in {} cannot be loaded ({}); build libvtx where CMake finds {}, or use device cpu": LIBRARIES,
    "{} in {} does not start: {}": LIBRARIES,
    "onnxruntime {} in {} is too old, 1.22 or newer is needed": LIBRARIES,
    "{} {} is here ({}), but {} has no plug-in of libvtx for it; build libvtx with its headers: cmake "
    "-DVTX_TENSORRT_INCLUDES=DIR": LIBRARIES,
    "the prompt has {} token ids and {} image tokens for {} images; give at least one id, and one image "
    "token for each image and one video token for each video, in their order": CALLERS,
    "{} is given with token ids instead of text; ask by text, or leave {} out": CALLERS,
    "{}; give one that is there": CALLERS,
    "a struct {}; fill it with the _init function of the libvtx that takes it": CALLERS,
    "a question has been asked already; load a prefix file right after the images are opened": CALLERS,
    "the buffer's rows are {} bytes apart; give the stride in bytes, {} to {}": CALLERS,
    "{} frame of {}x{} has an odd side; crop it to even ones": CALLERS,
    "{} is not built into libvtx, which has {}; use one of these, or Python": BUILT,
    "{} needs {}, which this libvtx was built without; install its headers and build again, or give the pixels": BUILT,
    "libvtx does not run engines of TensorRT-RTX; run them with vtx in Python, or build engines of TensorRT on this "
    "machine": BUILT,
    "onnxruntime needs /proc, which this container or chroot lacks; mount it: mount -t proc proc /proc": ROOTS,
    "videos in the layout {} are not built into libvtx; give frames of it as images, or ask Python": BUILT,
    "tokenizer.json is damaged: {}; export the bundle again": PROMPT,
    "the tokenizer has {}, which libvtx does not know: {}": PROMPT,
    "the text becomes the special token {} once it is normalized; leave it out": PROMPT,
    "libvtx cannot render this chat template as the export did ({}); give token ids instead": PROMPT,
}
MOST, MOST_OF_PROMPTS = 18, 4


def test_what_libvtx_says_python_says_in_the_same_words() -> None:
    assert {template for _, template in only_in_cpp()} == set(ONLY_CPP)
    assert sum(reason != PROMPT for reason in ONLY_CPP.values()) <= MOST
    assert sum(reason == PROMPT for reason in ONLY_CPP.values()) <= MOST_OF_PROMPTS
