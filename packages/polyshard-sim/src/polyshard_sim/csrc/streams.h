// Streams, events and the host's waits: in which order what is launched runs.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace sim {

constexpr int kMaxDevices = 16;

// threads: a thread a stream, with random delays. The other three are serial: one executor runs the
// heads of streams that are ready, by a policy, and only while the host waits.
enum class Mode { threads, random, lowest, highest };

struct Settings {
  Mode mode = Mode::threads;
  uint64_t seed = 0;
  int jitter_us = 200;       // threads: the longest random delay before a kernel
  bool poison = true;        // fill memory with 0xff bytes when it is allocated
  bool strict = false;       // fill it on the stream that owns it when it is freed as well
  bool compute = true;       // false: nothing runs, see [Note: Virtual clock]
  int devices = 8;
};
Settings& settings();  // written by configure() before the first launch, read-only afterwards
void configure(const Settings& given);

// One recording of an event: reached when its stream has run all that was launched before it.
class Fence {
 public:
  void reach(double time_us);
  void wait();
  bool reached() const;
  double time_us() const { return time_us_; }
  int64_t bound_by = 0;  // the stream whose work ended last, once the fence is reached

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> reached_{false};
  double time_us_ = 0;
};
using FencePtr = std::shared_ptr<Fence>;

// What a stream does next: run a kernel, reach a fence, or wait for one.
struct Task {
  std::string name;
  std::function<void()> run;
  std::function<bool()> finished;  // collectives: polled after run(); empty for kernels
  FencePtr reaches, waits_for;
  double launched_us = 0, duration_us = 0;
  bool started = false;
};

struct Stream {
  const int64_t id;
  const int device, priority;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;  // the first one is running; it leaves when it has ended
  std::thread thread;      // mode threads, from the first launch on
  double time_us = 0;
  int64_t bound_by;  // the stream whose work ended at `time_us`: this one, or one it waited for

  Stream(int64_t id, int device, int priority)
      : id(id), device(device), priority(priority), bound_by(id) {}
  bool idle();
};

// Devices and streams of the calling thread.
int current_device();
void set_device(int device);
Stream* current_stream(int device);
void set_stream(Stream* stream);
Stream* default_stream(int device);
Stream* stream_of(int64_t id);
Stream* new_stream(int device, int priority);

struct DeviceScope {
  int previous = current_device();
  explicit DeviceScope(int device) { set_device(device); }
  ~DeviceScope() { set_device(previous); }
};

// Launching. `launch` counts as a kernel; `launch_hidden` is for what the device does by itself.
void launch(Stream* stream, Task task);
void launch_hidden(Stream* stream, Task task);
FencePtr record(Stream* stream);
void wait_for(Stream* stream, const FencePtr& fence);

// The host's waits. They let go of the interpreter lock and raise what a kernel has raised.
void synchronize(const FencePtr& fence);
void synchronize_stream(Stream* stream);
void synchronize_device(int device);
// All devices, as freeing memory does where no allocator keeps it: no wait of the user's is counted,
// and no error raised.
void drain();
void report_error(std::exception_ptr error);  // raised by the next wait of the host
void shutdown();

// Asked before a stream is made to wait, with "stream" or "work"; false leaves the wait out.
using WaitFilter = std::function<bool(const char* kind)>;
void set_wait_filter(WaitFilter filter);
bool keeps_wait(const char* kind);

struct Counters {
  std::atomic<int64_t> launches{0}, host_waits{0}, collectives{0}, copies_to_device{0},
      copies_to_host{0}, bytes_to_device{0}, bytes_to_host{0}, bytes_collective{0};
};
Counters& counters();

}  // namespace sim
