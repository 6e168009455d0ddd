// Registration with torch, once a process.
#pragma once

namespace sim {

void register_device();   // guard, allocator, hooks
void register_kernels();  // after rename_privateuse1_backend

}  // namespace sim
