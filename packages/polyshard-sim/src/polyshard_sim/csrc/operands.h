// What a kernel is given when it is launched: addresses, sizes and strides, never storages. Who
// frees or reuses memory too early gets wrong numbers, as on CUDA.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

namespace sim {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

struct Operand {
  static Operand of(const at::Tensor& tensor);
  at::Tensor as_cpu_tensor() const;  // over the memory that kernels use

  bool defined = false, conj = false, neg = false, wrapped_number = false;
  char* address = nullptr;  // for kernels
  c10::SmallVector<int64_t, 4> sizes, strides;
  at::ScalarType dtype = at::kByte;
  at::Tensor host;  // a tensor of the CPU, copied at launch
  int64_t num_bytes() const;
};

// An argument of an operator.
struct Argument {
  enum class Kind { value, tensor, tensors, optional_tensors, device, generator };
  static Argument of(const c10::IValue& value, bool takes_generator);
  c10::IValue for_cpu() const;

  Kind kind = Kind::value;
  c10::IValue value;
  std::vector<Operand> operands;
  uint64_t seed = 0;
};

at::Tensor empty_on_device(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                           at::ScalarType dtype);

// The thread state in which kernels run: no autograd, no autocast, no modes of the caller.
struct KernelScope {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
          c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)};
  c10::AutoGradMode no_grad{false};
};

}  // namespace sim
