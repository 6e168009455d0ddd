#include "memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

namespace sim {

// ---- pages

namespace {

constexpr size_t kArenaBytes = size_t(1) << 40;  // addresses; pages come with the first write
constexpr size_t kPage = 4096;

// One file mapped twice: `shown` faults when the host follows a tensor's address by mistake.
class Arena {
 public:
  Arena() {
    fd_ = memfd_create("polyshard-sim", MFD_CLOEXEC);
    TORCH_CHECK(fd_ >= 0 && ftruncate(fd_, kArenaBytes) == 0, "sim: memfd_create failed");
    shown_ = map(PROT_NONE);
    used_ = map(PROT_READ | PROT_WRITE);
    holes_[0] = kArenaBytes;
  }

  // First fit; nullptr when no addresses are left.
  char* take(size_t num_bytes) {
    for (auto it = holes_.begin(); it != holes_.end(); ++it) {
      const auto [offset, size] = *it;
      if (size < num_bytes) continue;
      holes_.erase(it);
      if (size > num_bytes) holes_[offset + num_bytes] = size - num_bytes;
      return shown_ + offset;
    }
    return nullptr;
  }

  void give_back(char* shown, size_t num_bytes) {
    size_t offset = shown - shown_;
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, num_bytes);
    auto next = holes_.lower_bound(offset);
    if (next != holes_.end() && offset + num_bytes == next->first) {
      num_bytes += next->second;
      next = holes_.erase(next);
    }
    if (next != holes_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += num_bytes;
        return;
      }
    }
    holes_[offset] = num_bytes;
  }

  bool holds(const void* address) const {
    return address >= shown_ && address < shown_ + kArenaBytes;
  }
  ptrdiff_t distance() const { return used_ - shown_; }

 private:
  char* map(int rights) const {
    void* at = mmap(nullptr, kArenaBytes, rights, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    TORCH_CHECK(at != MAP_FAILED, "sim: mmap of the device's memory failed");
    return static_cast<char*>(at);
  }

  int fd_;
  char *shown_, *used_;
  std::map<size_t, size_t> holes_;  // offset, bytes
};

Arena& arena() {
  static auto* it = new Arena;
  return *it;
}

void poison(Stream* stream, char* shown, size_t num_bytes) {
  Task task;
  task.name = "poison";
  task.run = [at = kernel_address(shown), num_bytes] { std::memset(at, 0xff, num_bytes); };
  launch_hidden(stream, std::move(task));
}

}  // namespace

char* kernel_address(const void* shown) {
  return const_cast<char*>(static_cast<const char*>(shown)) + arena().distance();
}

bool is_device_address(const void* address) { return arena().holds(address); }

// ---- device memory

namespace {

using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

// Sizes of CUDA's caching allocator, so that reserved memory has its figures too.
constexpr size_t kMinBlock = 512, kSmall = size_t(1) << 20, kMinLarge = size_t(10) << 20;
constexpr size_t kSmallSegment = size_t(2) << 20, kLargeSegment = size_t(20) << 20;
constexpr size_t kRoundLarge = size_t(2) << 20;

size_t rounded(size_t num_bytes, size_t to) { return (num_bytes + to - 1) / to * to; }

size_t segment_size(size_t num_bytes) {
  if (num_bytes <= kSmall) return kSmallSegment;
  return num_bytes < kMinLarge ? kLargeSegment : rounded(num_bytes, kRoundLarge);
}

// A piece of a segment; pieces of one segment are linked in the order of their addresses.
struct Block {
  char* address;
  size_t size;
  int device;
  int64_t stream;
  bool small;
  size_t requested = 0;
  bool allocated = false;
  int64_t uses_left = 0;      // fences of other streams that have not been reached
  Block *before = nullptr, *after = nullptr;
  std::set<int64_t> used_on;  // streams given to record_stream

  bool is_free() const { return !allocated && uses_left == 0; }
};

struct BestFit {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->address) < std::tie(b->stream, b->size, b->address);
  }
};
using Pool = std::set<Block*, BestFit>;

void change(StatArray& stat, bool small, int64_t by) {
  for (auto type : {StatType::AGGREGATE, small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
    auto& one = stat[static_cast<size_t>(type)];
    by >= 0 ? one.increase(by) : one.decrease(-by);
  }
}

class Heap {
 public:
  size_t capacity = size_t(80) << 30;

  // nullptr when the device is full. What is cached may go back only when no kernel is queued.
  Block* take(size_t requested, int device, int64_t stream, bool may_release) {
    std::lock_guard<std::mutex> lock(mutex_);
    collect_ended_uses();
    const size_t size = rounded(requested, kMinBlock);
    const bool small = size <= kSmall;
    Block* block = find(size, stream, small);
    if (!block) block = new_segment(size, device, stream, small);
    if (!block && may_release) {
      stats_.num_alloc_retries++;
      release_cached();
      block = new_segment(size, device, stream, small);
    }
    if (!block) return nullptr;
    split(block, size);
    block->allocated = true;
    block->requested = requested;
    count(block, +1);
    live_[block->address] = block;
    return block;
  }

  // The block of an address, which stops being allocated; nullptr for an unknown one.
  Block* begin_free(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(address);
    if (found == live_.end()) return nullptr;
    Block* block = found->second;
    live_.erase(found);
    return block;
  }

  void end_free(Block* block, const std::vector<FencePtr>& uses) {
    std::lock_guard<std::mutex> lock(mutex_);
    count(block, -1);
    block->allocated = false;
    block->used_on.clear();
    block->uses_left = uses.size();
    for (const auto& fence : uses) uses_.emplace_back(fence, block);
    if (uses.empty()) return_to_pool(block);
  }

  void use(void* address, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(address);
    if (found != live_.end() && found->second->stream != stream)
      found->second->used_on.insert(stream);
  }

  std::vector<FencePtr> pending_uses() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<FencePtr> fences;
    for (const auto& [fence, block] : uses_) fences.push_back(fence);
    return fences;
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    collect_ended_uses();
    release_cached();
  }

  DeviceStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void reset(void (c10::CachingAllocator::Stat::*how)()) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.inactive_split,
                       &stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes,
                       &stats_.inactive_split_bytes, &stats_.requested_bytes})
      for (auto& one : *stat) (one.*how)();
  }

  void note_out_of_memory() {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.num_ooms++;
  }

  size_t reserved() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_.reserved_bytes[0].current;
  }

 private:
  Pool& pool(bool small) { return small ? small_ : large_; }

  Block* find(size_t size, int64_t stream, bool small) {
    Block key{nullptr, size, 0, stream, small};
    auto& blocks = pool(small);
    auto found = blocks.lower_bound(&key);
    if (found == blocks.end() || (*found)->stream != stream) return nullptr;
    Block* block = *found;
    blocks.erase(found);
    if (is_part(block)) change_inactive(block, -1);
    return block;
  }

  Block* new_segment(size_t size, int device, int64_t stream, bool small) {
    const size_t bytes = segment_size(size);
    if (stats_.reserved_bytes[0].current + bytes > capacity) return nullptr;
    char* address = arena_take(bytes);
    if (!address) return nullptr;
    stats_.num_device_alloc++;
    change(stats_.segment, small, 1);
    change(stats_.reserved_bytes, small, bytes);
    return new Block{address, bytes, device, stream, small};
  }

  void split(Block* block, size_t size) {
    const size_t rest = block->size - size;
    if (block->small ? rest < kMinBlock : rest <= kSmall) return;
    auto* tail = new Block{block->address + size, rest, block->device, block->stream, block->small};
    block->size = size;
    tail->before = block;
    tail->after = block->after;
    if (tail->after) tail->after->before = tail;
    block->after = tail;
    pool(block->small).insert(tail);
    change_inactive(tail, +1);
  }

  void return_to_pool(Block* block) {
    for (Block* other : {block->before, block->after}) {
      if (!other || !other->is_free()) continue;
      change_inactive(other, -1);
      pool(other->small).erase(other);
      if (other == block->before) block->address = other->address;
      block->size += other->size;
      unlink(other);
      delete other;
    }
    pool(block->small).insert(block);
    if (is_part(block)) change_inactive(block, +1);
  }

  static void unlink(Block* block) {
    if (block->before) block->before->after = block->after;
    if (block->after) block->after->before = block->before;
  }

  void collect_ended_uses() {
    for (size_t i = 0; i < uses_.size();) {
      auto [fence, block] = uses_[i];
      if (!fence->reached()) {
        ++i;
        continue;
      }
      uses_.erase(uses_.begin() + i);
      if (--block->uses_left == 0) return_to_pool(block);
    }
  }

  void release_cached() {
    for (bool small : {true, false}) {
      auto& blocks = pool(small);
      for (auto it = blocks.begin(); it != blocks.end();) {
        Block* block = *it;
        if (is_part(block)) {
          ++it;
          continue;
        }
        it = blocks.erase(it);
        stats_.num_device_free++;
        change(stats_.segment, small, -1);
        change(stats_.reserved_bytes, small, -static_cast<int64_t>(block->size));
        arena_give_back(block->address, block->size);
        delete block;
      }
    }
  }

  static bool is_part(const Block* block) { return block->before || block->after; }

  void change_inactive(const Block* block, int sign) {
    change(stats_.inactive_split, block->small, sign);
    change(stats_.inactive_split_bytes, block->small, sign * static_cast<int64_t>(block->size));
  }

  void count(const Block* block, int sign) {
    change(stats_.allocation, block->small, sign);
    change(stats_.active, block->small, sign);
    change(stats_.allocated_bytes, block->small, sign * static_cast<int64_t>(block->size));
    change(stats_.active_bytes, block->small, sign * static_cast<int64_t>(block->size));
    change(stats_.requested_bytes, block->small, sign * static_cast<int64_t>(block->requested));
  }

  static std::mutex& arena_mutex() {
    static auto* it = new std::mutex;
    return *it;
  }
  static char* arena_take(size_t num_bytes) {
    std::lock_guard<std::mutex> lock(arena_mutex());
    return arena().take(num_bytes);
  }
  static void arena_give_back(char* address, size_t num_bytes) {
    std::lock_guard<std::mutex> lock(arena_mutex());
    arena().give_back(address, num_bytes);
  }

  std::mutex mutex_;
  Pool small_, large_;
  std::unordered_map<void*, Block*> live_;
  std::vector<std::pair<FencePtr, Block*>> uses_;
  DeviceStats stats_;
};

class Allocator final : public c10::DeviceAllocator {
 public:
  std::array<Heap, kMaxDevices> heaps;

  c10::DataPtr allocate(size_t num_bytes) override {
    const int device = current_device();
    const c10::Device shown(c10::DeviceType::PrivateUse1, device);
    if (num_bytes == 0) return {nullptr, nullptr, &free_block, shown};
    Stream* stream = current_stream(device);
    Block* block = heaps[device].take(num_bytes, device, stream->id, false);
    if (!block) block = take_after_release(num_bytes, device, stream);
    if (settings().poison && settings().compute) poison(stream, block->address, block->size);
    return {block->address, block->address, &free_block, shown};
  }

  void release(void* address) {
    for (Heap& heap : heaps) {
      Block* block = heap.begin_free(address);
      if (!block) continue;
      std::vector<FencePtr> uses;
      for (int64_t stream : block->used_on) uses.push_back(record(stream_of(stream)));
      if (settings().strict && settings().compute) {
        Stream* owner = stream_of(block->stream);
        Stream* poisoning = uses.empty() ? owner : poisoning_stream(block->device);
        if (!uses.empty()) {  // the owner waits for nothing: freeing orders no streams
          wait_for(poisoning, record(owner));
          for (const auto& fence : uses) wait_for(poisoning, fence);
        }
        poison(poisoning, block->address, block->size);
        if (!uses.empty()) uses = {record(poisoning)};
      }
      heap.end_free(block, uses);
      return;
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    Task task;
    task.name = "copy_data";
    task.run = [to = kernel_address(to), from = kernel_address(from), num_bytes] {
      std::memcpy(to, from, num_bytes);
    };
    launch(current_stream(current_device()), std::move(task));
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    drain_kernels();
    for (int device = 0; device < settings().devices; ++device) heaps[device].empty_cache();
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_context())
      heaps[pointer.device().index()].use(pointer.get_context(), stream.id());
  }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override { return heaps[device].stats(); }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    heaps[device].reset(&c10::CachingAllocator::Stat::reset_accumulated);
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    heaps[device].reset(&c10::CachingAllocator::Stat::reset_peak);
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const size_t capacity = heaps[device].capacity;
    return {capacity - std::min(capacity, heaps[device].reserved()), capacity};
  }

 private:
  static void free_block(void* address);

  std::mutex mutex_;
  std::array<Stream*, kMaxDevices> poisoning_ = {};

  // Like cudaFree: memory goes back when the device is idle. In virtual time nothing is queued.
  static void drain_kernels() {
    if (settings().compute) drain();
  }

  Stream* poisoning_stream(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    Stream*& stream = poisoning_[device];
    if (!stream) stream = new_stream(device, 0);
    return stream;
  }

  // Like CUDA: give back what is cached; then wait for the streams that still use freed memory.
  Block* take_after_release(size_t num_bytes, int device, Stream* stream) {
    drain_kernels();
    Block* block = heaps[device].take(num_bytes, device, stream->id, true);
    if (block) return block;
    for (const auto& fence : heaps[device].pending_uses()) synchronize(fence);
    block = heaps[device].take(num_bytes, device, stream->id, true);
    if (!block) heaps[device].note_out_of_memory();
    const auto stats = heaps[device].stats();
    TORCH_CHECK_WITH(OutOfMemoryError, block, "sim: out of memory on device ", device,
                     ": tried to allocate ", num_bytes, " bytes; the capacity is ",
                     heaps[device].capacity, " bytes, ", stats.allocated_bytes[0].current,
                     " are allocated and ", stats.reserved_bytes[0].current, " reserved");
    return block;
  }
};

Allocator& the_allocator() {
  static auto* it = new Allocator;
  return *it;
}

void Allocator::free_block(void* address) {
  if (address) the_allocator().release(address);
}

}  // namespace

c10::DeviceAllocator* device_allocator() { return &the_allocator(); }

void set_capacity(size_t num_bytes) {
  for (Heap& heap : the_allocator().heaps) heap.capacity = num_bytes;
}

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  DeviceScope scope(storage.device().index());
  c10::DataPtr fresh = device_allocator()->allocate(num_bytes);
  const size_t kept = std::min(num_bytes, impl->nbytes());
  if (kept && impl->data_ptr().get() && settings().compute) {
    Task task;
    task.name = "resize";
    task.run = [to = kernel_address(fresh.get()), from = kernel_address(impl->data_ptr().get()),
                kept] { std::memcpy(to, from, kept); };
    launch(current_stream(current_device()), std::move(task));
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(num_bytes);
}

// ---- pinned memory

namespace {

// Blocks of powers of two, reused once the copies on all streams that used them have ended.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    size_t size = kPage;
    while (size < num_bytes) size *= 2;
    std::lock_guard<std::mutex> lock(mutex_);
    collect_ended_uses();
    auto& free = free_[size];
    Pinned* block;
    if (free.empty()) {
      block = new Pinned{static_cast<char*>(std::aligned_alloc(kPage, size)), size};
    } else {
      block = free.back();
      free.pop_back();
    }
    live_[block->address] = block;
    return {block->address, block->address, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

  bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(address);
  }

  void use(const void* address, Stream* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Pinned* block = find(address)) block->used_on.insert(stream);
  }

  void release(void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(static_cast<char*>(address));
    if (found == live_.end()) return;
    Pinned* block = found->second;
    live_.erase(found);
    for (Stream* stream : block->used_on) block->uses.push_back(record(stream));
    block->used_on.clear();
    freed_.push_back(block);
  }

 private:
  struct Pinned {
    char* address;
    size_t size;
    std::set<Stream*> used_on;
    std::vector<FencePtr> uses;
  };

  static void free_block(void* address);

  Pinned* find(const void* address) {
    auto after = live_.upper_bound(static_cast<const char*>(address));
    if (after == live_.begin()) return nullptr;
    Pinned* block = std::prev(after)->second;
    return static_cast<const char*>(address) < block->address + block->size ? block : nullptr;
  }

  void collect_ended_uses() {
    for (size_t i = 0; i < freed_.size();) {
      Pinned* block = freed_[i];
      auto& uses = block->uses;
      while (!uses.empty() && uses.back()->reached()) uses.pop_back();
      if (!uses.empty()) {
        ++i;
        continue;
      }
      free_[block->size].push_back(block);
      freed_.erase(freed_.begin() + i);
    }
  }

  std::mutex mutex_;
  std::map<const char*, Pinned*> live_;
  std::map<size_t, std::vector<Pinned*>> free_;
  std::vector<Pinned*> freed_;
};

PinnedAllocator& the_pinned_allocator() {
  static auto* it = new PinnedAllocator;
  return *it;
}

void PinnedAllocator::free_block(void* address) { the_pinned_allocator().release(address); }

}  // namespace

c10::Allocator* pinned_allocator() { return &the_pinned_allocator(); }
bool is_pinned(const void* address) { return the_pinned_allocator().holds(address); }
void pinned_used_on(const void* address, Stream* stream) {
  the_pinned_allocator().use(address, stream);
}

}  // namespace sim
