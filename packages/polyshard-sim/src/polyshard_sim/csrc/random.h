// Generators of the device: the CPU's sequence of numbers behind the 16 bytes of Philox state
// (seed and offset) that DTensor expects of a device.
#pragma once
#include <ATen/core/Generator.h>

#include <cstdint>

namespace sim {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// The CPU generator behind one of the device: drawing from it moves the device's on.
at::Generator host_generator(const at::Generator& of);

// For kernels that draw while they run: a seed, taken on the host at launch.
uint64_t draw_seed(const at::Generator& of);

}  // namespace sim
