// The process group `simccl`.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// `gloo` moves the bytes; its own time-out must be longer than this one.
c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> gloo, int rank,
                                             int size, double timeout_seconds);

}  // namespace sim
