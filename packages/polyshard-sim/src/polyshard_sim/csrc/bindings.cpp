// What Python sees of the device: polyshard_sim/device.py gives it the shape of torch.cuda.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "clock.h"
#include "device.h"
#include "group.h"
#include "memory.h"
#include "random.h"
#include "streams.h"

namespace py = pybind11;

namespace {

void configure(const std::string& mode, uint64_t seed, int jitter_us, bool strict, int devices,
               bool compute) {
  sim::Settings settings;
  const std::unordered_map<std::string, sim::Mode> modes = {{"threads", sim::Mode::threads},
                                                            {"random", sim::Mode::random},
                                                            {"lowest", sim::Mode::lowest},
                                                            {"highest", sim::Mode::highest}};
  settings.mode = modes.at(mode);
  settings.seed = seed;
  settings.jitter_us = jitter_us;
  settings.strict = strict;
  settings.devices = devices;
  settings.compute = compute;
  sim::configure(settings);
  sim::register_device();
  sim::register_kernels();
}

py::dict read_counters() {
  const auto& it = sim::counters();
  py::dict read;
  read["launches"] = it.launches.load();
  read["host_waits"] = it.host_waits.load();
  read["collectives"] = it.collectives.load();
  read["collective_bytes"] = it.bytes_collective.load();
  read["copies_to_device"] = it.copies_to_device.load();
  read["copies_to_host"] = it.copies_to_host.load();
  read["bytes_to_device"] = it.bytes_to_device.load();
  read["bytes_to_host"] = it.bytes_to_host.load();
  return read;
}

void reset_counters() {
  auto& it = sim::counters();
  for (auto* one : {&it.launches, &it.host_waits, &it.collectives, &it.bytes_collective,
                    &it.copies_to_device, &it.copies_to_host, &it.bytes_to_device,
                    &it.bytes_to_host})
    *one = 0;
}

void set_wait_filter(py::object filter) {
  if (filter.is_none()) return sim::set_wait_filter(nullptr);
  auto* kept = new py::object(std::move(filter));  // freed by nobody: streams may outlive Python
  sim::set_wait_filter([kept](const char* kind) {
    py::gil_scoped_acquire lock;
    return (*kept)(kind).cast<bool>();
  });
}

void set_costs(double launch_us, double half_flops_per_us, double float_flops_per_us,
               double bytes_per_us, double host_bytes_per_us) {
  sim::cost_model() = {launch_us, half_flops_per_us, float_flops_per_us, bytes_per_us,
                       host_bytes_per_us};
}

using RingTuple = std::tuple<double, double, double>;  // as in clock.h

c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> gloo, int rank,
                                             int size, double timeout_seconds,
                                             const std::vector<RingTuple>& rings) {
  std::vector<sim::Ring> all;
  for (const auto& [start, round, rate] : rings) all.push_back({start, round, rate});
  return sim::make_group(std::move(gloo), rank, size, timeout_seconds, std::move(all));
}

using SpanTuple = std::tuple<std::string, int64_t, double, double, int64_t>;

std::vector<SpanTuple> take_spans() {
  std::vector<SpanTuple> taken;
  for (auto& one : sim::take_spans())
    taken.emplace_back(std::move(one.name), one.stream, one.begin_us, one.end_us, one.awaited);
  return taken;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("configure", &configure);
  module.def("shutdown", &sim::shutdown);
  module.def("set_capacity", &sim::set_capacity);
  module.def("device_count", [] { return sim::settings().devices; });
  module.def("current_device", &sim::current_device);
  module.def("set_device", &sim::set_device);
  module.def("default_stream_id", [](int device) { return sim::default_stream(device)->id; });
  module.def("default_generator", &sim::default_generator);
  module.def("read_counters", &read_counters);
  module.def("reset_counters", &reset_counters);
  module.def("set_wait_filter", &set_wait_filter);
  module.def("make_group", &make_group);
  module.def("set_costs", &set_costs);
  module.def("host_time_us", &sim::host_time_us);
  module.def("trace_spans", &sim::trace_spans);
  module.def("take_spans", &take_spans);
}
