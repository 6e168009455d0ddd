#include "operands.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/from_blob.h>

#include "memory.h"
#include "random.h"

namespace sim {

using at::Tensor;
using c10::IValue;

namespace {

// Torch checks sizes against storages when views are made; memory may have been freed since.
char* checked_address(const Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto* base = static_cast<const char*>(storage.unsafeGetStorageImpl()->data_ptr().get());
  if (tensor.numel() == 0) return nullptr;
  TORCH_CHECK(base, "sim: a kernel was given a tensor whose memory has been freed");
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  TORCH_CHECK((last + 1) * tensor.itemsize() <= storage.nbytes(),
              "sim: a kernel was given a tensor that ends behind its memory (", storage.nbytes(),
              " bytes)");
  return kernel_address(base + tensor.storage_offset() * tensor.itemsize());
}

Tensor copy_of_host(const Tensor& tensor) {
  KernelScope scope;
  Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

bool is_optional_tensors(const IValue& value) {
  if (!value.isList() || value.isTensorList()) return false;
  const auto& element = value.toList().elementType();
  return element->kind() == c10::TypeKind::OptionalType &&
         element->castRaw<c10::OptionalType>()->getElementType()->kind() ==
             c10::TypeKind::TensorType;
}

}  // namespace

Operand Operand::of(const Tensor& tensor) {
  Operand it;
  if (!tensor.defined()) return it;
  it.defined = true;
  it.wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (!on_device(tensor)) {
    it.host = copy_of_host(tensor);
    return it;
  }
  it.sizes = tensor.sizes();
  it.strides = tensor.strides();
  it.dtype = tensor.scalar_type();
  it.conj = tensor.is_conj();
  it.neg = tensor.is_neg();
  it.address = checked_address(tensor);
  return it;
}

Tensor Operand::as_cpu_tensor() const {
  if (!defined) return Tensor();
  if (host.defined()) return host;
  static char nothing[64];
  Tensor tensor = at::for_blob(address ? address : nothing, sizes)
                      .strides(strides)
                      .options(at::TensorOptions().dtype(dtype))
                      .make_tensor();
  if (conj) tensor._set_conj(true);
  if (neg) tensor._set_neg(true);
  if (wrapped_number) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

int64_t Operand::num_bytes() const {
  if (!defined || host.defined()) return 0;
  return c10::multiply_integers(sizes) * c10::elementSize(dtype);
}

Argument Argument::of(const IValue& value, bool takes_generator) {
  Argument it;
  if (value.isTensor()) {
    it.kind = Kind::tensor;
    it.operands.push_back(Operand::of(value.toTensor()));
  } else if (value.isTensorList()) {
    it.kind = Kind::tensors;
    for (const Tensor& tensor : value.toTensorVector())
      it.operands.push_back(Operand::of(tensor));
  } else if (is_optional_tensors(value)) {
    it.kind = Kind::optional_tensors;
    for (const IValue& one : value.toListRef())
      it.operands.push_back(one.isNone() ? Operand() : Operand::of(one.toTensor()));
  } else if (value.isDevice()) {
    it.kind = Kind::device;
  } else if (takes_generator) {
    it.kind = Kind::generator;
    it.seed = draw_seed(value.isGenerator() ? value.toGenerator()
                                            : default_generator(current_device()));
  } else {
    it.value = value;
  }
  return it;
}

IValue Argument::for_cpu() const {
  switch (kind) {
    case Kind::tensor: return operands[0].as_cpu_tensor();
    case Kind::tensors: {
      c10::List<Tensor> tensors;
      for (const Operand& operand : operands) tensors.push_back(operand.as_cpu_tensor());
      return tensors;
    }
    case Kind::optional_tensors: {
      c10::List<std::optional<Tensor>> tensors;
      for (const Operand& operand : operands)
        tensors.push_back(operand.defined ? std::optional(operand.as_cpu_tensor()) : std::nullopt);
      return tensors;
    }
    case Kind::device: return c10::Device(c10::kCPU);
    case Kind::generator: return at::detail::createCPUGenerator(seed);
    default: return value;
  }
}

Tensor empty_on_device(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                       at::ScalarType dtype) {
  DeviceScope scope(device);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype);
}

}  // namespace sim
