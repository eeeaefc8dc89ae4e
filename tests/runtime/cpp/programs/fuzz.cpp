// A libFuzzer target: the bytes of one untrusted file, of the kind VTX_FUZZ_KIND. What is refused is refused by Error;
// anything else that is thrown, and what the sanitizers see, ends the run.
#include "base/errors.hpp"
#include "parse.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    vtxcore::parse(VTX_FUZZ_KIND, std::string(reinterpret_cast<const char*>(data), size));
  } catch (const vtxcore::Error&) {
    return 0;
  }
  return 0;
}
