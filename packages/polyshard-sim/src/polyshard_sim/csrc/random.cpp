#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <vector>

#include "streams.h"

namespace sim {
namespace {

constexpr int64_t kStateBytes = 16;
constexpr uint64_t kOffsetOfDraw = 4;  // DTensor rounds offsets to multiples of four

// An offset counts numbers drawn since the seed. Going back to one seeds anew and draws as many.
class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(int device)
      : GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, device),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::make_generator<at::CPUGeneratorImpl>()) {
    set_current_seed(c10::default_rng_seed_val);
  }

  at::Generator host;

  void set_current_seed(uint64_t seed) override { go_to(seed, 0); }
  uint64_t current_seed() const override { return cpu().current_seed(); }
  uint64_t seed() override {
    const uint64_t fresh = c10::detail::getNonDeterministicRandom();
    set_current_seed(fresh);
    return fresh;
  }
  void set_offset(uint64_t offset) override { go_to(current_seed(), offset); }
  uint64_t get_offset() const override {
    const at::mt19937_data_pod now = cpu().engine().data();
    while (!same(counted_.data(), now)) {
      counted_();
      ++draws_;
    }
    return draws_ * kOffsetOfDraw;
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const uint64_t state[2] = {current_seed(), get_offset()};
    auto tensor = at::detail::empty_cpu({kStateBytes}, at::kByte);
    std::memcpy(tensor.mutable_data_ptr(), state, kStateBytes);
    return tensor.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& given) override {
    TORCH_CHECK(given.numel() == kStateBytes && given.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "sim: the state of a generator is 16 bytes (seed and offset) in a uint8 tensor");
    uint64_t state[2];
    std::memcpy(state, given.data(), kStateBytes);
    go_to(state[0], state[1]);
  }

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

 private:
  at::CPUGeneratorImpl& cpu() const { return *host.get<at::CPUGeneratorImpl>(); }

  void go_to(uint64_t seed, uint64_t offset) {
    cpu().set_current_seed(seed);  // forgets cached normal samples too
    counted_ = cpu().engine();
    draws_ = offset / kOffsetOfDraw;
    for (uint64_t i = 0; i < draws_; ++i) counted_();
    cpu().set_engine(counted_);
  }

  static bool same(const at::mt19937_data_pod& a, const at::mt19937_data_pod& b) {
    return a.next_ == b.next_ && a.left_ == b.left_ && a.state_ == b.state_;
  }

  SimGenerator* clone_impl() const override {
    auto* copy = new SimGenerator(device().index());
    copy->go_to(current_seed(), get_offset());
    return copy;
  }

  mutable at::mt19937 counted_;  // where the engine was when its draws were counted last
  mutable uint64_t draws_ = 0;
};

}  // namespace

at::Generator new_generator(int device) { return at::make_generator<SimGenerator>(device); }

const at::Generator& default_generator(int device) {
  static const auto* all = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; ++i) generators->push_back(new_generator(i));
    return generators;
  }();
  return all->at(device);
}

at::Generator host_generator(const at::Generator& of) {
  // A CPU generator is taken as it is: torch allows it for operators on a device's tensors.
  auto* given = dynamic_cast<SimGenerator*>(of.unsafeGetGeneratorImpl());
  return given ? given->host : of;
}

uint64_t draw_seed(const at::Generator& of) {
  at::Generator host = host_generator(of);
  std::lock_guard<std::mutex> lock(host.mutex());
  return host.get<at::CPUGeneratorImpl>()->random64();
}

}  // namespace sim
