#include "clock.h"

#include <algorithm>
#include <atomic>
#include <mutex>

namespace sim {

namespace {
std::mutex time_mutex;
double host_us = 0;
std::atomic<bool> tracing{false};
std::vector<Span> spans;
}  // namespace

CostModel& cost_model() {
  static CostModel it;
  return it;
}

double kernel_duration_us(double num_bytes, double flops) {
  const auto& costs = cost_model();
  return costs.kernel_us + std::max(num_bytes / costs.bytes_per_us, flops / costs.flops_per_us);
}

double copy_duration_us(double num_bytes) {
  return cost_model().kernel_us + num_bytes / cost_model().host_bytes_per_us;
}

double collective_duration_us(double num_bytes, int ranks) {
  const auto& costs = cost_model();
  const int size = costs.world_size ? costs.world_size : ranks;
  return costs.link_us + num_bytes * (size - 1) / size / costs.link_bytes_per_us;
}

double host_time_us() {
  std::lock_guard<std::mutex> lock(time_mutex);
  return host_us;
}

void spend_host_time(double us) {
  std::lock_guard<std::mutex> lock(time_mutex);
  host_us += us;
}

void host_time_reaches(double us) {
  std::lock_guard<std::mutex> lock(time_mutex);
  host_us = std::max(host_us, us);
}

void trace_spans(bool on) { tracing = on; }

void note_span(const std::string& name, int64_t stream, double begin_us, double end_us) {
  if (!tracing) return;
  std::lock_guard<std::mutex> lock(time_mutex);
  spans.push_back({name, stream, begin_us, end_us});
}

std::vector<Span> take_spans() {
  std::lock_guard<std::mutex> lock(time_mutex);
  std::vector<Span> taken;
  taken.swap(spans);
  return taken;
}

}  // namespace sim
