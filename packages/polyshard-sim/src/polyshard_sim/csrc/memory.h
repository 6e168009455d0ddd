// Memory of devices and pinned memory of the host, under the rules of CUDA's caching allocators.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <cstddef>

#include "streams.h"

namespace sim {

// Tensors show addresses without access rights; kernels use the same pages elsewhere.
char* kernel_address(const void* shown);
bool is_device_address(const void* address);

c10::DeviceAllocator* device_allocator();
void set_capacity(size_t num_bytes);  // of each device
void resize_storage(const c10::Storage& storage, size_t num_bytes);

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
void pinned_used_on(const void* address, Stream* stream);  // a copy on it reads or writes there

}  // namespace sim
