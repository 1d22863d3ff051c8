// Where the randomness of a mask comes from: states reserved from a device's generator, and generators put back as they were.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>

namespace ckpt_ext {

// Random words that a reservation takes from the stream of a Philox generator. Our masks live at other counters of the same stream
// (their site is in its top byte), so a single step, torch's smallest, keeps two reservations apart.
constexpr uint64_t RESERVED_WORDS = 4;

// A new mask state, int64 [2] = (seed, offset) on `device`, that no later call returns again.
at::Tensor reserve(std::optional<at::Generator> generator, at::Device device);

#ifdef CKPT_EXT_CUDA
// The same on a CUDA device, with no host synchronisation; right inside CUDA graph capture, where each replay gets a new offset.
at::Tensor reserve_cuda(const std::optional<at::Generator>& generator, at::Device device);
#endif

// The generator that `device` draws from where none is given.
at::Generator default_generator(at::Device device);

// A generator's whole state, uint8 on the CPU, read and written under its mutex.
at::Tensor get_state(at::Generator generator);
void set_state(at::Generator generator, const at::Tensor& state);

} // namespace ckpt_ext
