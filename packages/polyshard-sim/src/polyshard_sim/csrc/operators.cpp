// Operators that a device writes by hand: memory, copies, views, and those whose way the CPU
// chooses by its device type.
#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "clock.h"
#include "memory.h"
#include "operands.h"
#include "streams.h"

namespace sim {

using at::Tensor;

namespace {

int index_of(std::optional<at::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

// ---- memory

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  DeviceScope scope(index_of(device));
  return at::detail::empty_generic(sizes, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  return empty_on_device(index_of(device), sizes, strides, c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef sizes,
                     std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    const int64_t numel = c10::multiply_integers(sizes);
    const size_t needed = (self.storage_offset() + numel) * self.itemsize();
    if (numel && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
    impl->set_sizes_contiguous(sizes);
  }
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                    c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.data() == nullptr || (strides.empty() && !sizes.empty())) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const int64_t elements = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {elements}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

Tensor& set_empty(Tensor& self) {
  DeviceScope scope(self.device().index());
  return set_storage(self, at::Storage(at::Storage::use_byte_size_t(), 0, device_allocator(), true),
                     0, {0}, {1});
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// ---- copies

Task copy_task(const char* name, double duration_us, Operand to, Operand from) {
  Task task;
  task.name = name;
  task.duration_us = duration_us;
  task.run = [to = std::move(to), from = std::move(from)] {
    KernelScope scope;
    to.as_cpu_tensor().copy_(from.as_cpu_tensor());
  };
  return task;
}

// Memory of the host under the address that it has, without keeping it alive.
Operand raw_host(const Tensor& host) {
  Operand it;
  it.defined = true;
  it.address = static_cast<char*>(host.data_ptr());
  it.sizes = host.sizes();
  it.strides = host.strides();
  it.dtype = host.scalar_type();
  it.conj = host.is_conj();
  it.neg = host.is_neg();
  return it;
}

void copy_on_device(const Tensor& from, const Tensor& to) {
  const int source = from.device().index(), target = to.device().index();
  Stream* stream = current_stream(source);
  if (source != target) wait_for(stream, record(current_stream(target)));
  const double num_bytes = 2.0 * from.numel() * from.itemsize();
  launch(stream, copy_task("copy", kernel_duration_us(num_bytes, 0, 0), Operand::of(to),
                           Operand::of(from)));
  if (source != target) wait_for(current_stream(target), record(stream));
}

bool is_pinned_tensor(const Tensor& host) {
  return host.numel() && is_pinned(host.storage().data());
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  Stream* stream = current_stream(to.device().index());
  const bool pinned = is_pinned_tensor(from);
  counters().copies_to_device++;
  counters().bytes_to_device += from.nbytes();
  // Pageable memory is staged before the call returns; pinned memory is read by the copy.
  Operand source = pinned || !settings().compute ? raw_host(from) : Operand::of(from);
  launch(stream, copy_task("copy to device", copy_duration_us(from.nbytes()), Operand::of(to),
                           std::move(source)));
  if (pinned) pinned_used_on(from.storage().data(), stream);
  if (!non_blocking) synchronize_stream(stream);
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  Stream* stream = current_stream(from.device().index());
  counters().copies_to_host++;
  counters().bytes_to_host += from.nbytes();
  launch(stream, copy_task("copy to host", copy_duration_us(from.nbytes()), raw_host(to),
                           Operand::of(from)));
  if (is_pinned_tensor(to) && non_blocking) {
    pinned_used_on(to.storage().data(), stream);
  } else {
    synchronize_stream(stream);
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (on_device(from) && on_device(to)) {
    copy_on_device(from, to);
  } else if (on_device(to)) {
    copy_to_device(from, to, non_blocking);
  } else {
    copy_to_host(from, to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.numel() == 0) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  synchronize_stream(current_stream(self.device().index()));
  if (!settings().compute) return at::Scalar(1.0);
  KernelScope scope;
  return Operand::of(self).as_cpu_tensor().item();
}

// ---- what the CPU does in a way of its own

// Torch takes another way for devices that are not the CPU, with other roundings.
Tensor dropout(const Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  noise.div_(1 - p);
  return input.mul(noise);
}

Tensor& dropout_inplace(Tensor& input, double p, bool train) {
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul_(at::zeros({}, input.options()));
  Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  noise.div_(1 - p);
  return input.mul_(noise);
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  const auto mask_options = input.options().dtype(at::kBool);
  if (train && !*train) return {input.clone(), at::ones_like(input, mask_options)};
  Tensor mask = at::empty_like(input).bernoulli_(1 - p).to(at::kBool);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// The choice depends on shapes, dtypes and flags only, so the CPU's code may look at our tensors.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& mask, double dropout_p, bool is_causal,
                         std::optional<double> scale, bool enable_gqa) {
  return at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout_p, is_causal, scale,
                                           enable_gqa);
}

Tensor view(const Tensor& self, at::IntArrayRef sizes) { return at::native::view(self, sizes); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_empty);
  library.impl("record_stream", &record_stream);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &view);
  library.impl("is_set_to", &at::native::is_set_to);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("native_dropout", &native_dropout);
  library.impl("_fused_sdp_choice", &choose_attention);
  library.impl("dropout", &dropout);
  library.impl("dropout_", &dropout_inplace);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("dropout", &dropout);
  library.impl("dropout_", &dropout_inplace);
}

// Operands carry these bits; torch would resolve them by a copy, which comes here again.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}  // namespace at::native
