// The process group `simccl`.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "clock.h"

namespace sim {

// `gloo` moves the bytes; its own time-out must be longer than this one. It is null where nothing is
// computed. `rings` say how long collectives take.
c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> gloo, int rank,
                                             int size, double timeout_seconds,
                                             std::vector<Ring> rings);

}  // namespace sim
