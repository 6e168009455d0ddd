// The virtual clock: how long kernels and transfers would take on the hardware of a cost model.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace sim {

struct CostModel {
  double launch_us = 5;           // host time of one launch
  double kernel_us = 2;           // the shortest kernel
  double bytes_per_us = 2e6;      // device memory
  double flops_per_us = 4e8;      // matrix products
  double host_bytes_per_us = 2.5e4;  // copies between host and device
  double link_us = 15;            // latency of a collective
  double link_bytes_per_us = 2e5;
  int world_size = 0;             // 0: that of the group; else ranks that one process stands for
};
CostModel& cost_model();

double kernel_duration_us(double num_bytes, double flops);
double copy_duration_us(double num_bytes);
double collective_duration_us(double num_bytes, int ranks);

double host_time_us();
void spend_host_time(double us);
void host_time_reaches(double us);

struct Span {
  std::string name;
  int64_t stream;
  double begin_us, end_us;
};
void trace_spans(bool on);
void note_span(const std::string& name, int64_t stream, double begin_us, double end_us);
std::vector<Span> take_spans();

}  // namespace sim
