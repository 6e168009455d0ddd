// The virtual clock: how long what is launched would take on the hardware of a cost model.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace sim {

// polyshard_sim/clock.py has the figures, and where they come from.
struct CostModel {
  double launch_us = 0;           // host time of one launch
  double half_flops_per_us = 1;   // matrix products of 16 bits and fewer
  double float_flops_per_us = 1;  // of more
  double bytes_per_us = 1;        // device memory
  double host_bytes_per_us = 1;   // copies between host and device
};
CostModel& cost_model();

// One way to run a collective: ranks pass parts around a ring.
struct Ring {
  double start_us;      // before the first part leaves
  double round_us;      // latency of one way around
  double bytes_per_us;  // between neighbours
};

double kernel_duration_us(double num_bytes, double half_flops, double float_flops);
double copy_duration_us(double num_bytes);
// Of the fastest ring; `num_bytes` is what a rank passes on.
double collective_duration_us(const std::vector<Ring>& rings, int rounds, double num_bytes);

double host_time_us();
void spend_host_time(double us);
void host_time_reaches(double us);

constexpr int64_t kHost = -1, kNobody = -2;

// What a stream did in an interval: ran a task, or was idle and waited.
struct Span {
  std::string name;
  int64_t stream;
  double begin_us, end_us;
  int64_t awaited = kNobody;  // the stream it waited for, or kHost
};
void trace_spans(bool on);
void note_span(Span span);  // unless it is empty
std::vector<Span> take_spans();

}  // namespace sim
