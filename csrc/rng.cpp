#include "rng.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <mutex>

namespace ckpt_ext {
namespace {

at::Tensor reserve_cpu(const std::optional<at::Generator>& generator) {
  auto state = at::zeros({2}, at::kLong);
  state.select(0, 0).random_(generator);
  return state;
}

// Any device whose generator counts an offset, through the interface that all generators share.
at::Tensor reserve_by_offset(at::Generator generator, at::Device device) {
  auto state = at::empty({2}, at::kLong);
  auto* words = state.mutable_data_ptr<int64_t>();
  {
    std::lock_guard<std::mutex> lock(generator.mutex());
    words[0] = static_cast<int64_t>(generator.current_seed());
    words[1] = static_cast<int64_t>(generator.get_offset());
    generator.set_offset(generator.get_offset() + RESERVED_WORDS);
  }
  return state.to(device);
}

} // namespace

at::Generator default_generator(at::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      device.is_cpu() || at::isAccelerator(device.type()),
      "device must have a random generator (the CPU or an accelerator), got ", device);
  return at::globalContext().defaultGenerator(device);
}

at::Tensor reserve(std::optional<at::Generator> generator, at::Device device) {
  const bool given = generator.has_value() && generator->defined();
  TORCH_CHECK_VALUE(
      !given || generator->device().type() == device.type(),
      "generator must be on ", device.type(), ", got one on ", generator->device());
  if (device.is_cpu()) {
    return reserve_cpu(generator);
  }
#ifdef CKPT_EXT_CUDA
  if (device.is_cuda()) {
    return reserve_cuda(generator, device);
  }
#endif
  return reserve_by_offset(given ? *generator : default_generator(device), device);
}

at::Tensor get_state(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

} // namespace ckpt_ext
