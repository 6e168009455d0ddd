#include "clock.h"

#include <algorithm>
#include <atomic>
#include <limits>
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

double kernel_duration_us(double num_bytes, double half_flops, double float_flops) {
  const auto& costs = cost_model();
  return std::max({num_bytes / costs.bytes_per_us, half_flops / costs.half_flops_per_us,
                   float_flops / costs.float_flops_per_us});
}

double copy_duration_us(double num_bytes) { return num_bytes / cost_model().host_bytes_per_us; }

double collective_duration_us(const std::vector<Ring>& rings, int rounds, double num_bytes) {
  double fastest = rings.empty() ? 0 : std::numeric_limits<double>::infinity();
  for (const Ring& ring : rings)
    fastest = std::min(fastest,
                       ring.start_us + rounds * ring.round_us + num_bytes / ring.bytes_per_us);
  return fastest;
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

void note_span(Span span) {
  if (!tracing || span.begin_us >= span.end_us) return;
  std::lock_guard<std::mutex> lock(time_mutex);
  spans.push_back(std::move(span));
}

std::vector<Span> take_spans() {
  std::lock_guard<std::mutex> lock(time_mutex);
  std::vector<Span> taken;
  taken.swap(spans);
  return taken;
}

}  // namespace sim
