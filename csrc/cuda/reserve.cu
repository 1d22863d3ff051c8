#include "../rng.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/detail/UnpackRaw.cuh>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <tuple>

namespace ckpt_ext {
namespace {

__global__ void write_state(at::PhiloxCudaState philox, int64_t* state) {
  const auto words = at::cuda::philox::unpack(philox);
  state[0] = static_cast<int64_t>(std::get<0>(words));
  state[1] = static_cast<int64_t>(std::get<1>(words));
}

} // namespace

// Inside a capture the generator does not know its offset yet: it hands out a place in device memory that each replay fills. Only a
// kernel can read that place, so the state is written by one, captured or not.
at::Tensor reserve_cuda(const std::optional<at::Generator>& generator, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const auto& fallback = at::cuda::detail::getDefaultCUDAGenerator(guard.current_device().index());
  auto* impl = at::get_generator_or_default<at::CUDAGeneratorImpl>(generator, fallback);
  const auto philox = [&] {
    std::lock_guard<std::mutex> lock(impl->mutex_);
    return impl->philox_cuda_state(RESERVED_WORDS);
  }();
  auto state = at::empty({2}, at::TensorOptions().dtype(at::kLong).device(guard.current_device()));
  write_state<<<1, 1, 0, c10::cuda::getCurrentCUDAStream()>>>(philox, state.mutable_data_ptr<int64_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return state;
}

} // namespace ckpt_ext
