#include <ATen/core/enum_tag.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <array>

#include "dropout.h"
#include "philox.h"
#include "rng.h"

#define CKPT_EXT_STRING_(x) #x
#define CKPT_EXT_STRING(x) CKPT_EXT_STRING_(x)
#ifdef CKPT_EXT_CUDA
#define CKPT_EXT_CUDA_VERSION CKPT_EXT_STRING(CKPT_EXT_CUDA)
#else
#define CKPT_EXT_CUDA_VERSION "none"
#endif

namespace ckpt_ext {
namespace {

// `ckpt_ext.extension` reads this out of the file before it loads it: a library built for another torch may crash the process.
constexpr const char* MARKER = "ckpt_ext built for torch=" CKPT_EXT_STRING(TORCH_VERSION_MAJOR) "." CKPT_EXT_STRING(
    TORCH_VERSION_MINOR) "." CKPT_EXT_STRING(TORCH_VERSION_PATCH) " cuda=" CKPT_EXT_CUDA_VERSION ";";

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  const Words words = philox4x32_10({counter[0], counter[1], counter[2], counter[3]}, {key[0], key[1]});
  return {words.x, words.y, words.z, words.w};
}

} // namespace

TORCH_LIBRARY(ckpt_ext, m) {
  m.def(
      "dropout(Tensor x, Tensor state, float p, int site, *, "
      "SymInt row_start=0, SymInt[]? row_strides=None, SymInt? cols=None, SymInt col_start=0) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "reserve(Generator? generator, Device device) -> Tensor",
      {at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(ckpt_ext, CPU, m) {
  m.impl("dropout", &dropout);
}

// No tensor argument tells the dispatcher a device: one function serves them all.
TORCH_LIBRARY_IMPL(ckpt_ext, CompositeExplicitAutograd, m) {
  m.impl("reserve", &reserve);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // A thread inside a kernel may hold a generator's mutex and wait for the interpreter lock: wait for the mutex without that lock.
  using release = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.attr("marker") = MARKER;
  m.def("philox4x32_10", &philox, pybind11::arg("counter"), pybind11::arg("key"));
  m.def("default_generator", &default_generator, pybind11::arg("device"));
  m.def("get_state", &get_state, pybind11::arg("generator"), release());
  m.def("set_state", &set_state, pybind11::arg("generator"), pybind11::arg("state"), release());
}

} // namespace ckpt_ext
