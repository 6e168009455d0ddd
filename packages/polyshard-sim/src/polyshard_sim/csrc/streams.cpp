#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <random>

#include "clock.h"
#include "interpreter.h"

namespace sim {

Settings& settings() {
  static Settings it;
  return it;
}

void configure(const Settings& given) { settings() = given; }

Counters& counters() {
  static Counters it;
  return it;
}

// ---- fences

bool Fence::reached() const {
  return reached_ && (settings().compute || time_us_ <= host_time_us());
}

void Fence::reach(double time_us) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    time_us_ = time_us;
    reached_ = true;
  }
  changed_.notify_all();
}

void Fence::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return reached_.load(); });
}

// ---- devices and streams

namespace {

// Leaked on purpose: threads of streams outlive static destructors.
struct Registry {
  std::mutex mutex;
  std::vector<Stream*> streams;

  Registry() {
    for (int device = 0; device < kMaxDevices; ++device)
      streams.push_back(new Stream(device, device, 0));
  }
  std::vector<Stream*> all() {
    std::lock_guard<std::mutex> lock(mutex);
    return streams;
  }
};

Registry& registry() {
  static auto* it = new Registry;
  return *it;
}

thread_local int the_device = 0;
thread_local Stream* the_streams[kMaxDevices] = {};
std::atomic<bool> stopping{false};

}  // namespace

int current_device() { return the_device; }

namespace {
int checked(int device) {
  TORCH_CHECK(device >= 0 && device < settings().devices, "sim: there is no device ", device,
              "; polyshard_sim.enable() was given ", settings().devices, " devices");
  return device;
}
}  // namespace

void set_device(int device) { the_device = checked(device); }

Stream* default_stream(int device) { return stream_of(checked(device)); }

Stream* current_stream(int device) {
  Stream* stream = the_streams[checked(device)];
  return stream ? stream : default_stream(device);
}

void set_stream(Stream* stream) { the_streams[stream->device] = stream; }

Stream* stream_of(int64_t id) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().streams.at(id);
}

Stream* new_stream(int device, int priority) {
  auto& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.streams.push_back(new Stream(all.streams.size(), device, priority));
  return all.streams.back();
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex);
  return tasks.empty() && (settings().compute || time_us <= host_time_us());
}

// ---- errors of kernels

namespace {

std::mutex error_mutex;
std::exception_ptr first_error;

void raise_error() {
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(error_mutex);
    error.swap(first_error);
  }
  if (error) std::rethrow_exception(error);
}

void report_kernel(const std::string& name, const std::exception& error) {
  report_error(std::make_exception_ptr(
      c10::Error("sim: a kernel that was launched earlier failed: " + name + ": " +
                     std::string(error.what()).substr(0, 2000),
                 nullptr)));
}

void run(Task& task) {
  try {
    task.run();
  } catch (const std::exception& error) {
    report_kernel(task.name, error);
  }
}

bool has_ended(Task& task) {
  if (!task.finished) return true;
  try {
    return task.finished();
  } catch (const std::exception& error) {
    report_kernel(task.name, error);
    return true;
  }
}

// [Note: Virtual clock] A task begins when the one before it on its stream has ended and the host
// has launched it. What it depends on was launched before it, so its times are known at launch:
// where nothing is computed, tasks end as they are launched, and no stream holds any.
void advance(Stream* stream, const Task& task) {
  const double begin = std::max(stream->time_us, task.launched_us);
  note_span({"idle", stream->id, stream->time_us, begin, kHost});
  if (begin > stream->time_us) stream->bound_by = stream->id;
  stream->time_us = begin;
  if (task.reaches) {
    task.reaches->bound_by = stream->bound_by;
    task.reaches->reach(begin);
  } else if (task.waits_for) {
    const double end = task.waits_for->time_us();
    if (end <= begin) return;
    note_span({"wait", stream->id, begin, end, task.waits_for->bound_by});
    stream->time_us = end;
    stream->bound_by = task.waits_for->bound_by;
  } else {
    stream->time_us = begin + task.duration_us;
    stream->bound_by = stream->id;
    note_span({task.name, stream->id, begin, stream->time_us});
  }
}

// The task leaves its stream.
void retire(Stream* stream) {
  Task task;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    task = std::move(stream->tasks.front());
  }
  advance(stream, task);
  task = Task();  // what it holds is freed before the stream counts as idle
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->tasks.pop_front();
  }
  stream->changed.notify_all();
}

// ---- mode threads

using Random = std::mt19937_64;
constexpr auto kPollInterval = std::chrono::microseconds(20);

void serve(Stream* stream) {
  Random random(settings().seed * 1000003 + stream->id);
  const int jitter_us = settings().jitter_us;
  for (;;) {
    Task* task;
    {
      std::unique_lock<std::mutex> lock(stream->mutex);
      stream->changed.wait(lock, [&] { return stopping || !stream->tasks.empty(); });
      if (stream->tasks.empty()) return;
      task = &stream->tasks.front();  // stays where it is while others are appended
    }
    if (task->waits_for) {
      task->waits_for->wait();
    } else if (task->run) {
      if (jitter_us > 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % (jitter_us + 1)));
      run(*task);
      while (!has_ended(*task) && !stopping) std::this_thread::sleep_for(kPollInterval);
    }
    retire(stream);
  }
}

// ---- serial modes

std::mutex& executor_mutex() {
  static auto* it = new std::mutex;
  return *it;
}

enum class Step { ran, blocked, idle };

Stream* choose(const std::vector<Stream*>& ready) {
  static Random random(settings().seed);
  switch (settings().mode) {
    case Mode::random: return ready[random() % ready.size()];
    case Mode::highest: return ready.back();
    default: return ready.front();
  }
}

// Runs the head of one stream. The caller holds executor_mutex().
Step step() {
  std::vector<Stream*> ready;
  bool any = false;
  for (Stream* stream : registry().all()) {
    Task* task;
    {
      std::lock_guard<std::mutex> lock(stream->mutex);
      if (stream->tasks.empty()) continue;
      task = &stream->tasks.front();  // stays where it is while others are appended
    }
    any = true;
    // Without the stream's mutex: a collective that is asked may start transfers, which take time,
    // and the host would wait for them where it launches.
    const bool held = (task->waits_for && !task->waits_for->reached()) ||
                      (task->started && !has_ended(*task));
    if (!held) ready.push_back(stream);
  }
  if (ready.empty()) return any ? Step::blocked : Step::idle;
  Stream* stream = choose(ready);
  Task* task;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    task = &stream->tasks.front();
  }
  if (task->run && !task->started) {
    run(*task);
    task->started = true;
    if (!has_ended(*task)) return Step::ran;
  }
  retire(stream);
  return Step::ran;
}

std::atomic<int64_t> last_launch_us{0};

int64_t now_us() {
  using namespace std::chrono;
  return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

// [Note: Idle host] In the serial modes nothing runs until the host waits. But a rank may wait on
// the CPU (in gloo, in a file) for another one that waits for a collective of this rank: so a
// thread runs what is left once the host has launched nothing for a while.
constexpr int64_t kIdleUs = 20000;

void serve_idle_host() {
  while (!stopping) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (now_us() - last_launch_us < kIdleUs) continue;
    std::unique_lock<std::mutex> lock(executor_mutex(), std::try_to_lock);
    for (int i = 0; lock && i < 200 && step() == Step::ran; ++i) {
    }
  }
}

std::thread* idle_thread = nullptr;

void start_idle_thread() {
  static std::once_flag once;
  std::call_once(once, [] { idle_thread = new std::thread(serve_idle_host); });
}

void append(Stream* stream, Task task) {
  if (!settings().compute) {
    std::lock_guard<std::mutex> lock(stream->mutex);
    return advance(stream, task);
  }
  const bool threads = settings().mode == Mode::threads;
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->tasks.push_back(std::move(task));
    if (threads && !stream->thread.joinable() && !stopping)
      stream->thread = std::thread(serve, stream);
  }
  if (threads) {
    stream->changed.notify_all();
  } else {
    last_launch_us = now_us();
    start_idle_thread();
  }
}

void run_until(Fence& fence) {
  while (!fence.reached()) {
    Step done = Step::blocked;
    {
      std::lock_guard<std::mutex> lock(executor_mutex());
      if (!fence.reached()) done = step();
    }
    if (done != Step::ran && !fence.reached()) std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace

void report_error(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (!first_error) first_error = error;
}

// ---- launching

void launch_hidden(Stream* stream, Task task) {
  task.launched_us = host_time_us();
  append(stream, std::move(task));
}

void launch(Stream* stream, Task task) {
  counters().launches++;
  spend_host_time(cost_model().launch_us);
  launch_hidden(stream, std::move(task));
}

FencePtr record(Stream* stream) {
  auto fence = std::make_shared<Fence>();
  Task task;
  task.reaches = fence;
  launch_hidden(stream, std::move(task));
  return fence;
}

void wait_for(Stream* stream, const FencePtr& fence) {
  if (!fence) return;
  Task task;
  task.waits_for = fence;
  launch_hidden(stream, std::move(task));
}

// ---- waits of the host

namespace {
void await(Fence& fence) {
  WithoutInterpreterLock unlocked;
  if (settings().mode == Mode::threads) {
    fence.wait();
  } else if (settings().compute) {
    run_until(fence);
  }
  host_time_reaches(fence.time_us());
}
}  // namespace

void synchronize(const FencePtr& fence) {
  if (fence) {
    counters().host_waits++;
    await(*fence);
  }
  raise_error();
}

void synchronize_stream(Stream* stream) { synchronize(record(stream)); }

namespace {
void await_streams(const std::function<bool(Stream*)>& chosen) {
  std::vector<FencePtr> fences;
  for (Stream* stream : registry().all())
    if (chosen(stream) && !stream->idle()) fences.push_back(record(stream));
  for (const auto& fence : fences) await(*fence);
}
}  // namespace

void synchronize_device(int device) {
  counters().host_waits++;
  await_streams([device](Stream* stream) { return stream->device == device; });
  raise_error();
}

void drain() {
  await_streams([](Stream*) { return true; });
}

void shutdown() {
  WithoutInterpreterLock unlocked;
  stopping = true;
  for (Stream* stream : registry().all()) {
    {
      std::lock_guard<std::mutex> lock(stream->mutex);
    }
    stream->changed.notify_all();
    if (stream->thread.joinable()) stream->thread.join();
  }
  if (idle_thread && idle_thread->joinable()) idle_thread->join();
}

// ---- waits that may be left out

namespace {
std::mutex filter_mutex;
std::shared_ptr<WaitFilter> wait_filter;
}  // namespace

void set_wait_filter(WaitFilter filter) {
  std::lock_guard<std::mutex> lock(filter_mutex);
  wait_filter = filter ? std::make_shared<WaitFilter>(std::move(filter)) : nullptr;
}

bool keeps_wait(const char* kind) {
  std::shared_ptr<WaitFilter> filter;
  {
    std::lock_guard<std::mutex> lock(filter_mutex);
    filter = wait_filter;
  }
  return !filter || (*filter)(kind);
}

}  // namespace sim
