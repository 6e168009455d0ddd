// What torch asks of a device type: the guard (devices, streams, events) and the hooks
// (generators, pinned memory).
#include <ATen/core/TensorBase.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device.h"
#include "memory.h"
#include "random.h"
#include "streams.h"

namespace sim {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

struct Event {
  FencePtr last;  // the last recording; none: the event counts as reached
};

Event* event_of(void* event) { return static_cast<Event*>(event); }
FencePtr last_of(void* event) { return event ? event_of(event)->last : nullptr; }

c10::Stream shown(const Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::PrivateUse1, stream->device),
                     stream->id);
}

int index_of(Device device) { return device.index() < 0 ? current_device() : device.index(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::PrivateUse1; }
  Device getDevice() const override { return Device(type(), current_device()); }
  void setDevice(Device device) const override {
    if (device.index() >= 0) set_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < settings().devices) set_device(device.index());
  }
  Device exchangeDevice(Device device) const override {
    const Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  DeviceIndex deviceCount() const noexcept override { return settings().devices; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  c10::Stream getStream(Device device) const override {
    return shown(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return shown(default_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool high_priority) const override {
    return shown(new_stream(index_of(device), high_priority ? -1 : 0));
  }
  c10::Stream getNewStream(Device device, int priority) const override {
    return shown(new_stream(index_of(device), priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream previous = getStream(stream.device());
    set_stream(stream_of(stream.id()));
    return previous;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return stream_of(stream.id());
  }
  bool queryStream(const c10::Stream& stream) const override {
    return stream_of(stream.id())->idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream_of(stream.id()));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    event_of(*event)->last = sim::record(stream_of(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && keeps_wait("stream")) wait_for(stream_of(stream.id()), last_of(event));
  }
  bool queryEvent(void* event) const override {
    const FencePtr last = last_of(event);
    return !last || last->reached();
  }
  void synchronizeEvent(void* event) const override { synchronize(last_of(event)); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete event_of(event);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    const FencePtr from = last_of(begin), to = last_of(end);
    TORCH_CHECK(from && to, "sim: both events must be recorded before elapsed_time is asked");
    synchronize(from);
    synchronize(to);
    return (to->time_us() - from->time_us()) / 1000;  // of the virtual clock, in milliseconds
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return settings().devices; }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const int previous = current_device();
    set_device(device);
    return previous;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* address) const override {
    if (is_device_address(address)) return Device(DeviceType::PrivateUse1, current_device());
    return Device(DeviceType::CPU);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

void register_device() {
  c10::SetAllocator(DeviceType::PrivateUse1, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace sim
