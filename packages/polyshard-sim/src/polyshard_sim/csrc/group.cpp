// The process group `simccl`: collectives that run on streams, as NCCL's do, and move bytes by gloo.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <map>

#include "clock.h"
#include "group.h"
#include "operands.h"
#include "streams.h"

namespace sim {

using at::Tensor;
using c10d::ReduceOp;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Works = std::vector<WorkPtr>;
using Tensors = std::vector<Tensor>;

namespace {

// ---- memory of the device, as gloo gets it

Operand contiguous(const Tensor& tensor) {
  TORCH_CHECK(on_device(tensor), "simccl: tensors must be on sim, and one is on ",
              tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "simccl: tensors must be contiguous");
  return Operand::of(tensor);
}

// A copy, made when the collective begins: gloo may go on with it after an abort.
Tensor staged(const Operand& operand) {
  KernelScope scope;
  Tensor tensor = operand.as_cpu_tensor().clone();
  return tensor.scalar_type() == at::kBool ? tensor.view(at::kByte) : tensor;
}

Tensor staged_bytes(const Operand& operand) {
  KernelScope scope;
  return staged(operand).view(-1).view(at::kByte);
}

Tensor empty_bytes(int64_t count) { return at::empty({count}, at::kByte); }

void store(const Operand& to, const Tensor& from) {
  if (to.num_bytes()) std::memcpy(to.address, from.const_data_ptr(), to.num_bytes());
}

// ---- one collective

// What a collective does: start on gloo, and store what came. A coalesced one has several.
struct Exchange {
  std::function<Works()> start;
  std::function<void()> finish;
  int64_t num_bytes = 0;
  int rounds = 1;             // around the ring
  bool ends_in_wait = false;  // gloo's messages and reduce-scatters report their end there only
  bool is_even = true;        // every rank knows of as many bytes
};

// What a group shares with its collectives and with the watchdog.
struct GroupState {
  int size = 1;
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::mutex mutex;
  std::string failure;  // empty while the group works
  std::atomic<bool> failed{false};
  std::chrono::milliseconds timeout{};

  // What fails releases the streams that wait for it, so the host's error has to be there before.
  void fail(const std::string& why, bool is_reported) {
    std::lock_guard<std::mutex> lock(mutex);
    if (failed) return;
    if (is_reported) report_error(std::make_exception_ptr(c10::DistBackendError(why, nullptr)));
    failure = why;
    failed = true;
    gloo.release();  // its threads may be held by ranks that never come: it cannot be destroyed
  }
  void check() {
    std::lock_guard<std::mutex> lock(mutex);
    if (failed) C10_THROW_ERROR(DistBackendError, failure);
  }
  c10::intrusive_ptr<c10d::Backend> backend() {  // null where it has failed
    std::lock_guard<std::mutex> lock(mutex);
    return gloo;
  }
};

using Clock = std::chrono::steady_clock;

// [Note: Collectives that do not end] NCCL checks neither that ranks make the same call nor that
// they are all alive: a kernel waits, or mixes data. Here ranks first tell each other what they are
// about to do. Where that differs, and where a connection breaks, the collective does not end.
struct Collective : std::enable_shared_from_this<Collective> {
  std::string name;
  std::string kind;  // empty for messages
  std::shared_ptr<GroupState> group;
  std::vector<Exchange> exchanges;
  Clock::time_point launched = Clock::now();
  FencePtr end;
  std::mutex mutex;
  std::vector<std::pair<WorkPtr, std::shared_ptr<std::atomic<bool>>>> started;
  std::string error;  // of a thread that waits for a message

  void start() {
    if (group->failed) return;
    unless_lost([this] { kind.empty() ? start_exchanges() : start_comparison(); });
  }

  bool finished() {
    if (group->failed) return true;  // works and the host's next wait say why
    if (!is_stuck_) unless_lost([this] { advance(); });
    return is_over_;
  }

 private:
  void start_comparison() {
    int64_t num_bytes = 0;
    for (auto& exchange : exchanges) num_bytes += exchange.is_even ? exchange.num_bytes : 0;
    KernelScope scope;
    own_ = at::empty({2}, at::kLong);
    own_.data_ptr<int64_t>()[0] = int64_t(std::hash<std::string>()(kind) + exchanges.size());
    own_.data_ptr<int64_t>()[1] = num_bytes;
    all_ = at::empty({2 * group->size}, at::kLong);
    if (const auto gloo = group->backend()) comparison_ = gloo->_allgather_base(all_, own_);
  }

  void start_exchanges() {
    for (auto& exchange : exchanges)
      for (auto& work : exchange.start())
        started.emplace_back(work, exchange.ends_in_wait ? wait_in_thread(work) : nullptr);
  }

  void advance() {
    if (comparison_) {
      if (!comparison_->isCompleted()) return;
      comparison_->wait();  // raises what went wrong
      comparison_.reset();
      const int64_t* told = all_.data_ptr<int64_t>();
      for (int i = 0; i < 2 * group->size; ++i) is_stuck_ |= told[i] != told[i % 2];
      if (is_stuck_) return;
      start_exchanges();
    }
    for (auto& [work, flag] : started)
      if (flag ? !*flag : !work->isCompleted()) return;
    check_works();
    started.clear();
    for (auto& exchange : exchanges)
      if (exchange.finish) exchange.finish();
    exchanges.clear();
    is_over_ = true;
  }

  void unless_lost(const std::function<void()>& go_on) {
    try {
      go_on();
    } catch (const std::exception& failure) {
      is_stuck_ = std::string(failure.what()).find("gloo/transport") != std::string::npos;
      is_over_ = !is_stuck_;
      if (!is_stuck_) throw;
    }
  }

  void check_works() {
    for (auto& [work, flag] : started)
      if (!flag) work->wait();  // completed: raises what went wrong
    std::lock_guard<std::mutex> lock(mutex);
    TORCH_CHECK(error.empty(), error);
  }

  std::shared_ptr<std::atomic<bool>> wait_in_thread(WorkPtr work) {
    auto flag = std::make_shared<std::atomic<bool>>(false);
    std::thread([self = shared_from_this(), work, flag] {
      try {
        work->wait();
      } catch (const std::exception& failure) {
        std::lock_guard<std::mutex> lock(self->mutex);
        self->error = failure.what();
      }
      *flag = true;
    }).detach();
    return flag;
  }

  Tensor own_, all_;
  WorkPtr comparison_;
  bool is_stuck_ = false, is_over_ = false;
};
using CollectivePtr = std::shared_ptr<Collective>;

// ---- watchdog

class Watchdog {
 public:
  void watch(const CollectivePtr& collective) {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back(collective);
    if (!running_) std::thread([this] { run(); }).detach();
    running_ = true;
  }

 private:
  [[noreturn]] void run() {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      std::lock_guard<std::mutex> lock(mutex_);
      std::erase_if(watched_, [this](const std::weak_ptr<Collective>& weak) {
        const CollectivePtr collective = weak.lock();
        return !collective || collective->end->reached() || judge(*collective);
      });
    }
  }

  bool judge(Collective& collective) {
    const auto waited = Clock::now() - collective.launched;
    if (waited < collective.group->timeout) return false;
    const auto seconds = std::chrono::duration<double>(collective.group->timeout).count();
    const std::string why = c10::str("simccl: ", collective.name, " did not end within ", seconds,
                                     " s: ranks have not made the same call. The group is aborted");
    collective.group->fail(why, true);
    return true;
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<Collective>> watched_;
  bool running_ = false;
};

Watchdog& watchdog() {
  static auto* it = new Watchdog;
  return *it;
}

// ---- works

// Tensors of works that were dropped before their end, on which kernels still work. As with NCCL the
// next collective lets go of them, on a thread of the user's.
class Shelf {
 public:
  void put(const FencePtr& end, Tensors tensors) {
    std::lock_guard<std::mutex> lock(mutex_);
    kept_.emplace_back(end, std::move(tensors));
  }
  void clear_ended() {
    std::vector<Tensors> ended;  // freed without the lock
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(kept_, [&](auto& one) {
      if (!one.first->reached()) return false;
      ended.push_back(std::move(one.second));
      return true;
    });
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<FencePtr, Tensors>> kept_;
};

Shelf& shelf() {
  static auto* it = new Shelf;
  return *it;
}

class SimWork final : public Work {
 public:
  ~SimWork() override {
    if (!kept_.empty() && !collective_->end->reached())
      shelf().put(collective_->end, std::move(kept_));
  }
  SimWork(int rank, CollectivePtr collective, Tensors outputs, Tensors kept, int device)
      : Work(rank),
        collective_(std::move(collective)),
        outputs_(std::move(outputs)),
        kept_(std::move(kept)),
        device_(device) {}

  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool holds_host = false;

  bool isCompleted() override { return collective_->end->reached(); }
  bool isSuccess() const override {
    return collective_->end->reached() && !collective_->group->failed;
  }
  void synchronize() override {
    collective_->group->check();
    if (keeps_wait("work")) wait_for(current_stream(device_), collective_->end);
    if (holds_host) sim::synchronize(collective_->end);
    kept_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

 private:
  const CollectivePtr collective_;
  const Tensors outputs_;
  Tensors kept_;  // until wait(), as with NCCL
  const int device_;
};

// Of a collective inside start/endCoalescing: the work of the whole is what one waits for.
class CoalescedWork final : public Work {
 public:
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds) override { return true; }
};

// ---- the group

struct Launch {
  std::string name;
  std::vector<Exchange> exchanges;
  Tensors kept, outputs;
  bool async = false;
  std::string kind;  // of a collective: what all ranks have to call
};

// Collectives of a communicator run in the order of their launches, whatever their streams.
struct Channel {
  Stream* stream = nullptr;  // for asynchronous ones
  FencePtr last;
};

class Group final : public c10d::Backend {
 public:
  Group(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo,
        std::chrono::milliseconds timeout, std::vector<Ring> rings)
      : Backend(rank, size), state_(std::make_shared<GroupState>()), rings_(std::move(rings)) {
    state_->size = size;
    state_->gloo = std::move(gloo);
    state_->timeout = timeout;
  }

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { state_->timeout = timeout; }
  // Its memory is freed, for which CUDA waits until the device is idle: behind collectives of other
  // communicators too, which have to be aborted meanwhile, on other threads.
  void abort() override {
    state_->fail("simccl: the process group was aborted", false);
    drain();
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override {
    return state_->failed ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
  }

  void startCoalescing() override {
    coalescing_ = true;
    coalesced_ = Launch();
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    Launch all = std::move(coalesced_);
    coalesced_ = Launch();
    if (all.exchanges.empty()) return c10::make_intrusive<CoalescedWork>();
    return launch(std::move(all), channels_[-1]);
  }

  // -- all-gather

  WorkPtr _allgather_base(Tensor& output, Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return go({"all_gather", {gather_into(output, input)}, {input, output}, {output},
               options.asyncOp});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    Launch all{"all_gather", {}, together(inputs, outputs), outputs, options.asyncOp};
    for (size_t i = 0; i < inputs.size(); ++i)
      all.exchanges.push_back(gather_into(outputs[i], inputs[i]));
    return go(std::move(all));
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    const Tensors& parts = outputs.at(0);
    const Tensor& own = inputs.at(0);
    TORCH_CHECK(int(parts.size()) == getSize(), "simccl: all-gather of ", getSize(),
                " ranks into ", parts.size(), " tensors");
    TORCH_CHECK(parts[getRank()].nbytes() == own.nbytes(), "simccl: all-gather of ", own.sizes(),
                " does not fit into ", parts[getRank()].sizes());
    Launch all{"all_gather", {}, together(inputs, parts), parts, options.asyncOp};
    if (have_size(parts, own.nbytes()))
      all.exchanges.push_back(gather_list(parts, own));
    else  // as NCCL's: each rank broadcasts its own
      for (int root = 0; root < getSize(); ++root)
        all.exchanges.push_back(
            broadcast_from(parts[root], root == getRank() ? own : parts[root], root));
    return go(std::move(all));
  }

  // -- reductions

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return go({"all_reduce", {all_reduce(tensors.at(0), options.reduceOp)}, tensors, tensors,
               options.asyncOp});
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    Launch all{"all_reduce", {}, tensors, tensors, options.asyncOp};
    for (auto& tensor : tensors) all.exchanges.push_back(all_reduce(tensor, options.reduceOp));
    return go(std::move(all));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Exchange one = all_reduce(tensors.at(0), options.reduceOp);
    if (options.rootRank != getRank()) one.finish = nullptr;
    return go({"reduce", {std::move(one)}, tensors, tensors, options.asyncOp});
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return go({"reduce_scatter", {reduce_scatter(output, input, options.reduceOp)},
               {input, output}, {output}, options.asyncOp});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    Launch all{"reduce_scatter", {}, together(inputs, outputs), outputs, options.asyncOp};
    for (size_t i = 0; i < inputs.size(); ++i)
      all.exchanges.push_back(reduce_scatter(outputs[i], inputs[i], options.reduceOp));
    return go(std::move(all));
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return go({"reduce_scatter", {reduce_scatter(outputs.at(0), inputs.at(0), options.reduceOp)},
               together(inputs[0], outputs), outputs, options.asyncOp});
  }

  // -- one to all, all to one, all to all

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return go({"broadcast", {broadcast_from(tensors.at(0), tensors[0], options.rootRank)}, tensors,
               tensors, options.asyncOp});
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    Tensors parts = inputs.empty() ? Tensors() : inputs[0];
    return go({"scatter", {scatter_from(outputs.at(0), parts, options.rootRank)},
               together(parts, outputs), outputs, options.asyncOp});
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    Tensors parts = outputs.empty() ? Tensors() : outputs[0];
    TORCH_CHECK(have_size(parts, inputs.at(0).nbytes()),
                "simccl: gather of tensors of other sizes");
    Exchange one = gather_list(parts, inputs[0]);
    return go({"gather", {std::move(one)}, together(inputs, parts), parts, options.asyncOp});
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    c10d::checkSplitSizes(output_splits, output, getSize());
    c10d::checkSplitSizes(input_splits, input, getSize());
    return go({"all_to_all", {all_to_all(output, input, output_splits, input_splits)},
               {input, output}, {output}, options.asyncOp});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    return go({"all_to_all", {all_to_all(outputs, inputs)}, together(inputs, outputs), outputs,
               options.asyncOp});
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Exchange one;
    one.start = [gloo = state_->gloo] { return Works{gloo->barrier()}; };
    WorkPtr work = go({"barrier", {std::move(one)}, {}, {}, false});
    if (auto* ours = dynamic_cast<SimWork*>(work.get())) ours->holds_host = true;
    return work;
  }

  // -- messages

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    Exchange one = message(tensors.at(0));
    one.start = [gloo = state_->gloo, from = contiguous(tensors[0]), to, tag] {
      Tensors sent{staged_bytes(from)};
      return Works{gloo->send(sent, to, tag)};
    };
    return go_to({"send", {std::move(one)}, tensors, tensors, true}, to);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    Exchange one = message(tensors.at(0));
    const Operand to = contiguous(tensors[0]);
    auto received = std::make_shared<Tensor>();
    one.start = [gloo = state_->gloo, bytes = to.num_bytes(), from, tag, received] {
      *received = empty_bytes(bytes);
      Tensors into{*received};
      return Works{gloo->recv(into, from, tag)};
    };
    one.finish = [to, received] { store(to, *received); };
    return go_to({"recv", {std::move(one)}, tensors, tensors, true}, from);
  }

 private:
  static Tensors together(const Tensors& first, const Tensors& second) {
    Tensors all = first;
    all.insert(all.end(), second.begin(), second.end());
    return all;
  }

  WorkPtr go(Launch one) {
    one.kind = one.name;
    return go_to(std::move(one), -1);
  }

  // Messages to and from a peer have an order of their own, unless they are coalesced.
  WorkPtr go_to(Launch one, int channel) {
    state_->check();
    if (!coalescing_) return launch(std::move(one), channels_[channel]);
    coalesced_.name = one.name;
    coalesced_.kind = one.kind;
    coalesced_.async = one.async;
    for (auto& exchange : one.exchanges) coalesced_.exchanges.push_back(std::move(exchange));
    coalesced_.kept = together(coalesced_.kept, one.kept);
    coalesced_.outputs = together(coalesced_.outputs, one.outputs);
    return c10::make_intrusive<CoalescedWork>();
  }

  WorkPtr launch(Launch one, Channel& channel) {
    shelf().clear_ended();
    const int device = one.kept.empty() ? current_device() : one.kept[0].device().index();
    Stream* caller = current_stream(device);
    Stream* stream = caller;
    if (one.async) {
      if (!channel.stream) channel.stream = new_stream(device, -1);
      stream = channel.stream;
      wait_for(stream, record(caller));
    }
    wait_for(stream, channel.last);
    auto collective = std::make_shared<Collective>();
    collective->name = c10::str(one.name, " number ", ++sequence_, " of rank ", getRank());
    collective->kind = one.kind;
    collective->group = state_;
    collective->exchanges = std::move(one.exchanges);
    sim::launch(stream, task_of(one.name, collective));
    collective->end = channel.last = record(stream);
    if (settings().compute) watchdog().watch(collective);
    auto work = c10::make_intrusive<SimWork>(getRank(), collective, one.outputs,
                                             one.async ? one.kept : Tensors(), device);
    work->future = future_of(one.outputs, stream);
    return work;
  }

  Task task_of(const std::string& name, const CollectivePtr& collective) const {
    int64_t num_bytes = 0;
    int rounds = 0;
    for (const auto& exchange : collective->exchanges) {
      num_bytes += exchange.num_bytes;
      rounds = std::max(rounds, exchange.rounds);
    }
    counters().collectives++;
    counters().bytes_collective += num_bytes;
    Task task;
    task.name = name;
    task.run = [collective] { collective->start(); };
    task.finished = [collective] { return collective->finished(); };
    const double passed_on = double(num_bytes) * (getSize() - 1) / getSize();
    task.duration_us = collective_duration_us(rings_, rounds, passed_on);
    return task;
  }

  static c10::intrusive_ptr<c10::ivalue::Future> future_of(const Tensors& outputs,
                                                           Stream* stream) {
    const c10::Device device(c10::kPrivateUse1, stream->device);
    c10::OptionalStreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, stream->id));
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    future->markCompleted(c10::IValue(outputs));
    return future;
  }

  // ---- exchanges

  Exchange gather_rows(const Operand& input, std::function<void(const Tensor&)> take) const {
    Exchange one;
    const int64_t bytes = input.num_bytes();
    const int size = getSize();
    auto rows = std::make_shared<Tensor>();
    one.num_bytes = bytes * size;
    one.start = [gloo = state_->gloo, input, rows, bytes, size] {
      *rows = empty_bytes(bytes * size);
      if (!bytes) return Works();
      Tensor from = staged_bytes(input), into = *rows;
      return Works{gloo->_allgather_base(into, from)};
    };
    one.finish = [rows, take] { take(*rows); };
    return one;
  }

  Exchange gather_into(const Tensor& output, const Tensor& input) const {
    const Operand to = contiguous(output), from = contiguous(input);
    TORCH_CHECK(to.num_bytes() == from.num_bytes() * getSize(),
                "simccl: all-gather of ", input.sizes(), " by ", getSize(),
                " ranks does not fit into ", output.sizes());
    return gather_rows(from, [to](const Tensor& rows) { store(to, rows); });
  }

  Exchange gather_list(const Tensors& outputs, const Tensor& input) const {
    std::vector<Operand> to;
    for (const Tensor& output : outputs) to.push_back(contiguous(output));
    return gather_rows(contiguous(input), [to](const Tensor& rows) {
      const char* from = static_cast<const char*>(rows.const_data_ptr());
      for (const Operand& one : to) {
        if (one.num_bytes()) std::memcpy(one.address, from, one.num_bytes());
        from += one.num_bytes();
      }
    });
  }

  static bool have_size(const Tensors& tensors, size_t num_bytes) {
    return std::all_of(tensors.begin(), tensors.end(),
                       [&](const Tensor& one) { return one.nbytes() == num_bytes; });
  }

  // As torch has NCCL do it: sums of booleans are what any rank holds, and have no average.
  static ReduceOp on_gloo(const ReduceOp& op, const Operand& operand) {
    TORCH_CHECK(op.op_ != ReduceOp::PREMUL_SUM, "simccl: PREMUL_SUM is not implemented");
    const bool is_bool = operand.dtype == at::kBool;
    TORCH_CHECK(!is_bool || op.op_ != ReduceOp::AVG, "simccl: booleans have no average");
    if (is_bool && op.op_ == ReduceOp::SUM) return ReduceOp(ReduceOp::MAX);
    return op.op_ == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : op;
  }

  Exchange all_reduce(const Tensor& tensor, const ReduceOp& op) const {
    Exchange one;
    const Operand operand = contiguous(tensor);
    auto result = std::make_shared<Tensor>();
    one.num_bytes = 2 * operand.num_bytes();
    one.rounds = 2;
    one.start = [gloo = state_->gloo, operand, result, op = on_gloo(op, operand)] {
      *result = staged(operand);
      if (!operand.num_bytes()) return Works();
      Tensors tensors{*result};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      return Works{gloo->allreduce(tensors, options)};
    };
    one.finish = store_mean(operand, result, op);
    return one;
  }

  std::function<void()> store_mean(const Operand& to, std::shared_ptr<Tensor> result,
                                   const ReduceOp& op) const {
    return [to, result, mean = op.op_ == ReduceOp::AVG, size = getSize()] {
      KernelScope scope;
      if (mean && at::isIntegralType(result->scalar_type(), false))
        result->div_(size, "trunc");  // as NCCL's averages of integers
      else if (mean)
        result->div_(size);
      store(to, *result);
    };
  }

  Exchange reduce_scatter(const Tensor& output, const Tensor& input, const ReduceOp& op) const {
    const Operand from = contiguous(input);
    return reduce_scatter_of(contiguous(output), from.num_bytes(), op,
                             [from] { return staged(from).view(-1); });
  }

  Exchange reduce_scatter(const Tensor& output, const Tensors& inputs, const ReduceOp& op) const {
    std::vector<Operand> parts;
    for (const Tensor& input : inputs) parts.push_back(contiguous(input));
    const Operand to = contiguous(output);
    TORCH_CHECK(have_size(inputs, output.nbytes()),
                "simccl: reduce-scatter of tensors of other sizes");
    return reduce_scatter_of(to, to.num_bytes() * getSize(), op, [parts] {
      Tensors flat;
      for (const Operand& part : parts) flat.push_back(staged(part).view(-1));
      return at::cat(flat);
    });
  }

  Exchange reduce_scatter_of(const Operand& to, int64_t input_bytes, const ReduceOp& op,
                             std::function<Tensor()> stage) const {
    TORCH_CHECK(input_bytes == to.num_bytes() * getSize(), "simccl: reduce-scatter of ",
                input_bytes, " bytes by ", getSize(), " ranks does not give ", to.num_bytes());
    Exchange one;
    auto result = std::make_shared<Tensor>();
    one.num_bytes = input_bytes;
    one.ends_in_wait = true;
    one.start = [gloo = state_->gloo, to, result, stage, op = on_gloo(op, to)] {
      KernelScope scope;
      *result = staged(to).view(-1);
      if (!to.num_bytes()) return Works();
      Tensor from = stage(), into = *result;
      c10d::ReduceScatterOptions options;
      options.reduceOp = op;
      return Works{gloo->_reduce_scatter_base(into, from, options)};
    };
    one.finish = store_mean(to, result, op);
    return one;
  }

  Exchange broadcast_from(const Tensor& output, const Tensor& input, int root) const {
    Exchange one;
    const Operand to = contiguous(output), from = contiguous(input);
    auto bytes = std::make_shared<Tensor>();
    one.num_bytes = to.num_bytes();
    one.start = [gloo = state_->gloo, from, bytes, root] {
      *bytes = staged_bytes(from);
      if (!from.num_bytes()) return Works();
      Tensors tensors{*bytes};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return Works{gloo->broadcast(tensors, options)};
    };
    one.finish = [to, bytes] { store(to, *bytes); };
    return one;
  }

  Exchange scatter_from(const Tensor& output, const Tensors& inputs, int root) const {
    Exchange one;
    const Operand to = contiguous(output);
    std::vector<Operand> parts;
    for (const Tensor& input : inputs) parts.push_back(contiguous(input));
    auto received = std::make_shared<Tensor>();
    one.num_bytes = to.num_bytes();
    one.start = [gloo = state_->gloo, to, parts, received, root] {
      *received = empty_bytes(to.num_bytes());
      if (!to.num_bytes()) return Works();
      Tensors into{*received};
      std::vector<Tensors> from;
      if (!parts.empty()) from.emplace_back();
      for (const Operand& part : parts) from[0].push_back(staged_bytes(part));
      c10d::ScatterOptions options;
      options.rootRank = root;
      return Works{gloo->scatter(into, from, options)};
    };
    one.finish = [to, received] { store(to, *received); };
    return one;
  }

  static std::vector<int64_t> in_bytes(std::vector<int64_t> splits, const Tensor& tensor,
                                       int size) {
    const int64_t rows = tensor.dim() ? tensor.size(0) : 1;
    const int64_t row_bytes = rows ? tensor.nbytes() / rows : 0;
    if (splits.empty()) {
      TORCH_CHECK(rows % size == 0, "simccl: all_to_all of ", tensor.sizes(), " by ", size,
                  " ranks needs split sizes");
      splits.assign(size, rows / size);
    }
    for (int64_t& split : splits) split *= row_bytes;
    return splits;
  }

  Exchange all_to_all(const Tensor& output, const Tensor& input,
                      const std::vector<int64_t>& output_splits,
                      const std::vector<int64_t>& input_splits) const {
    const Operand to = contiguous(output), from = contiguous(input);
    return all_to_all_of(
        in_bytes(output_splits, output, getSize()), in_bytes(input_splits, input, getSize()),
        [from] { return staged_bytes(from); }, [to](const Tensor& bytes) { store(to, bytes); });
  }

  Exchange all_to_all(const Tensors& outputs, const Tensors& inputs) const {
    std::vector<Operand> to, from;
    std::vector<int64_t> to_bytes, from_bytes;
    for (const Tensor& one : outputs) {
      to.push_back(contiguous(one));
      to_bytes.push_back(one.nbytes());
    }
    for (const Tensor& one : inputs) {
      from.push_back(contiguous(one));
      from_bytes.push_back(one.nbytes());
    }
    return all_to_all_of(
        to_bytes, from_bytes,
        [from] {
          Tensors parts;
          for (const Operand& one : from) parts.push_back(staged_bytes(one));
          return at::cat(parts);
        },
        [to](const Tensor& bytes) {
          int64_t offset = 0;
          for (const Operand& one : to) {
            if (one.num_bytes()) store(one, bytes.slice(0, offset, offset + one.num_bytes()));
            offset += one.num_bytes();
          }
        });
  }

  Exchange all_to_all_of(std::vector<int64_t> to_bytes, std::vector<int64_t> from_bytes,
                         std::function<Tensor()> stage,
                         std::function<void(const Tensor&)> take) const {
    Exchange one;
    one.is_even = false;
    auto received = std::make_shared<Tensor>();
    for (int64_t bytes : from_bytes) one.num_bytes += bytes;
    int64_t total = 0;
    for (int64_t bytes : to_bytes) total += bytes;
    one.start = [gloo = state_->gloo, to_bytes, from_bytes, total, stage, received] {
      KernelScope scope;
      *received = empty_bytes(total);
      Tensor from = stage(), into = *received;
      auto to_splits = to_bytes, from_splits = from_bytes;
      return Works{gloo->alltoall_base(into, from, to_splits, from_splits)};
    };
    one.finish = [received, take] {
      KernelScope scope;
      take(*received);
    };
    return one;
  }

  static Exchange message(const Tensor& tensor) {
    Exchange one;
    one.num_bytes = tensor.nbytes();
    one.ends_in_wait = true;
    return one;
  }

  const std::shared_ptr<GroupState> state_;
  const std::vector<Ring> rings_;
  std::map<int, Channel> channels_;  // by peer; -1: collectives
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  Launch coalesced_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> gloo, int rank,
                                             int size, double timeout_seconds,
                                             std::vector<Ring> rings) {
  return c10::make_intrusive<Group>(rank, size, std::move(gloo),
                                    std::chrono::milliseconds(int64_t(timeout_seconds * 1000)),
                                    std::move(rings));
}

}  // namespace sim
