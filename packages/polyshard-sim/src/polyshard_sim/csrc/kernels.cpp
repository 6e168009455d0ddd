// Operators of the device: the CPU's kernels, launched on the current stream and run later.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "clock.h"
#include "device.h"
#include "memory.h"
#include "outcomes.h"
#include "random.h"
#include "streams.h"

namespace sim {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;

namespace {

// ---- arguments

template <typename Visit>
void visit_tensors(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& one : value.toListRef())
      if (one.isTensor()) visit(one.toTensor());
  }
}

// The device of all tensors. Tensors of the CPU are refused, as CUDA does, unless they are scalars.
int device_of(const OperatorHandle& op, const Traits& traits, Arguments arguments) {
  int device = -1;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue& value = arguments[i];
    if (value.isDevice() && value.toDevice().is_privateuseone() && value.toDevice().has_index())
      device = value.toDevice().index();
    visit_tensors(value, [&](const Tensor& tensor) {
      if (!on_device(tensor)) {
        const bool may_be_on_host = tensor.dim() == 0 || traits.takes_host_tensors;
        TORCH_CHECK(!tensor.defined() || (may_be_on_host && !traits.is_written[i]),
                    "Expected all tensors to be on the same device, but ", op.schema().name(),
                    " was given one on ", tensor.device(), " beside others on sim");
        return;
      }
      const int index = tensor.device().index();
      TORCH_CHECK(device < 0 || device == index,
                  "Expected all tensors to be on the same device, but ", op.schema().name(),
                  " was given some on sim:", device, " and on sim:", index);
      device = index;
    });
  }
  return device < 0 ? current_device() : device;
}

std::vector<Argument> capture(const Traits& traits, Arguments arguments) {
  std::vector<Argument> captured;
  captured.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i)
    captured.push_back(Argument::of(arguments[i], traits.is_generator[i]));
  return captured;
}

Stack run_on_cpu(const OperatorHandle& op, const std::vector<Argument>& arguments) {
  KernelScope scope;
  Stack stack;
  stack.reserve(arguments.size());
  for (const Argument& argument : arguments) stack.push_back(argument.for_cpu());
  op.callBoxed(&stack);
  return stack;
}

// ---- results

Tensor fresh(int device, const Shape& shape) {
  if (!shape.defined) return Tensor();
  Tensor tensor = empty_on_device(device, shape.sizes, shape.strides, shape.dtype);
  if (shape.wrapped_number) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

struct Results {
  Stack values;                                // for the caller
  std::vector<std::vector<Operand>> operands;  // for the kernel; empty: nothing to copy
};

Results make_results(int device, const Outcome& outcome, Arguments arguments) {
  using Kind = Outcome::Return::Kind;
  Results results;
  for (const auto& one : outcome.returns) {
    std::vector<Operand> operands;
    if (one.kind == Kind::argument) {
      results.values.push_back(arguments[one.argument]);
    } else if (one.kind == Kind::tensor) {
      Tensor tensor = fresh(device, one.shapes[0]);
      operands.push_back(Operand::of(tensor));
      results.values.push_back(std::move(tensor));
    } else if (one.kind == Kind::tensors) {
      c10::List<Tensor> tensors;
      for (const Shape& shape : one.shapes) {
        tensors.push_back(fresh(device, shape));
        operands.push_back(Operand::of(tensors.get(tensors.size() - 1)));
      }
      results.values.push_back(std::move(tensors));
    } else {
      results.values.push_back(IValue());
    }
    results.operands.push_back(std::move(operands));
  }
  return results;
}

void store(const Operand& to, const Tensor& from) {
  if (!to.defined || !from.defined()) return;
  TORCH_CHECK(c10::IntArrayRef(to.sizes) == from.sizes(), "sim: the result has sizes ",
              from.sizes(), ", and ", c10::IntArrayRef(to.sizes), " were expected");
  to.as_cpu_tensor().copy_(from);
}

void store_all(const std::vector<std::vector<Operand>>& to, const Stack& from) {
  KernelScope scope;
  for (size_t i = 0; i < to.size(); ++i) {
    if (to[i].empty()) continue;
    if (from[i].isTensor()) {
      store(to[i][0], from[i].toTensor());
    } else {
      const auto tensors = from[i].toTensorVector();
      for (size_t k = 0; k < to[i].size(); ++k) store(to[i][k], tensors[k]);
    }
  }
}

// ---- costs

// Multiplications and additions of matrix products and of attention, counted as torch's
// `flop_counter` does: attention is two products forward and five backward, without its mask.
double flops_of(const std::string& name, const Traits& traits,
                const std::vector<Argument>& arguments) {
  std::vector<const Operand*> matrices;
  for (size_t i = 0; i < arguments.size(); ++i)
    for (const Operand& operand : arguments[i].operands)
      if (operand.sizes.size() >= 2 && !traits.is_out[i]) matrices.push_back(&operand);
  const auto product = [](const Operand& left, double columns) {
    return 2.0 * c10::multiply_integers(left.sizes) * columns;
  };
  if (name.find("_scaled_dot_product") != std::string::npos) {
    const bool backward = name.find("_backward") != std::string::npos;
    if (matrices.size() < (backward ? 4 : 3)) return 0;
    const Operand &query = *matrices[backward], &key = *matrices[backward + 1];
    return (backward ? 5 : 2) * product(query, key.sizes[key.sizes.size() - 2]);
  }
  if (name.find("mm") == std::string::npos || matrices.size() < 2) return 0;  // mm, addmm, bmm ...
  return product(*matrices[matrices.size() - 2], matrices.back()->sizes.back());
}

// What kernels touch: an expanded tensor once, and one that is changed in place twice.
double touched_bytes(const Operand& operand) {
  double num_bytes = operand.num_bytes();
  for (size_t dim = 0; dim < operand.sizes.size(); ++dim)
    if (operand.strides[dim] == 0 && operand.sizes[dim]) num_bytes /= operand.sizes[dim];
  return num_bytes;
}

double duration_of(const std::string& name, const Traits& traits,
                   const std::vector<Argument>& arguments, const Results& results) {
  double num_bytes = 0;
  bool is_half = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_changed =
        !traits.is_out[i] && std::count(traits.aliased.begin(), traits.aliased.end(), int(i));
    for (const Operand& operand : arguments[i].operands) {
      num_bytes += (1 + is_changed) * touched_bytes(operand);
      is_half |= operand.sizes.size() >= 2 && c10::isReducedFloatingType(operand.dtype);
    }
  }
  for (const auto& operands : results.operands)
    for (const Operand& operand : operands) num_bytes += touched_bytes(operand);
  const double flops = flops_of(name, traits, arguments);
  return kernel_duration_us(num_bytes, is_half ? flops : 0, is_half ? 0 : flops);
}

// ---- the ways an operator runs

Stack views(const OperatorHandle& op, Arguments arguments) {
  const Tensor& base = arguments[0].toTensor();
  const auto view = [&](const Tensor& meta) {
    Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), meta.dtype());
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_offset(meta.storage_offset());
    impl->set_sizes_and_strides(meta.sizes(), meta.strides());
    tensor._set_conj(meta.is_conj());
    tensor._set_neg(meta.is_neg());
    return tensor;
  };
  Stack results;
  for (const IValue& result : view_outcome(op, arguments)) {
    if (result.isTensor()) {
      results.push_back(view(result.toTensor()));
      continue;
    }
    c10::List<Tensor> tensors;
    for (const Tensor& one : result.toTensorVector()) tensors.push_back(view(one));
    results.push_back(std::move(tensors));
  }
  return results;
}

// A copy of what the host has computed, in the order of the stream.
void launch_store(int device, const Tensor& to, const Tensor& from) {
  Task task;
  task.name = "store";
  task.run = [to = Operand::of(to), from] {
    KernelScope scope;
    store(to, from);
  };
  launch_hidden(current_stream(device), std::move(task));
}

Tensor to_device(int device, const Tensor& result) {
  if (!result.defined()) return result;
  Tensor tensor = fresh(device, Shape::of(result));
  launch_store(device, tensor, result);
  return tensor;
}

// What is returned depends on values: the host waits for them, as it does on CUDA.
Stack run_now(const OperatorHandle& op, const Traits& traits, int device, Arguments arguments) {
  const std::vector<Argument> captured = capture(traits, arguments);
  Task task;
  task.name = op.schema().name();
  task.duration_us = duration_of(task.name, traits, captured, {});
  launch(current_stream(device), std::move(task));
  synchronize_stream(current_stream(device));
  const Stack computed = run_on_cpu(op, captured);
  Stack results;
  for (size_t i = 0; i < traits.aliased.size(); ++i) {
    const IValue& result = computed[i];
    if (const int argument = traits.aliased[i]; argument >= 0) {
      const IValue& given = arguments[argument];
      if (given.isTensor() && given.toTensor().sizes() != result.toTensor().sizes()) {
        Tensor out = given.toTensor();
        out.resize_(result.toTensor().sizes());
        launch_store(device, out, result.toTensor());
      }
      results.push_back(given);
    } else if (result.isTensor()) {
      results.push_back(to_device(device, result.toTensor()));
    } else if (result.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& one : result.toTensorVector()) tensors.push_back(to_device(device, one));
      results.push_back(std::move(tensors));
    } else {
      results.push_back(result);
    }
  }
  return results;
}

// Numbers that no tensor's values enter are drawn on the host at launch, from the sequence that the
// CPU would use, and copied by the kernel.
Stack draw(const OperatorHandle& op, const Traits& traits, int device, Arguments arguments) {
  const int index = traits.aliased[0];
  const Tensor& target = arguments[index].toTensor();
  Task task;
  task.name = op.schema().name();
  if (!settings().compute) {
    task.duration_us = kernel_duration_us(target.nbytes(), 0, 0);
    launch(current_stream(device), std::move(task));
    return {arguments[index]};
  }
  Stack stack(arguments.begin(), arguments.end());
  Tensor drawn;
  {
    KernelScope scope;
    drawn = at::empty_strided(target.sizes(), target.strides(),
                              at::TensorOptions().dtype(target.scalar_type()));
    stack[index] = drawn;
    for (size_t i = 0; i < arguments.size(); ++i)
      if (traits.is_generator[i])
        stack[i] = host_generator(stack[i].isGenerator() ? stack[i].toGenerator()
                                                         : default_generator(device));
    op.callBoxed(&stack);
  }
  if (target.sizes() != drawn.sizes()) target.resize_(drawn.sizes());
  task.duration_us = kernel_duration_us(target.nbytes(), 0, 0);
  task.run = [to = Operand::of(target), drawn] {
    KernelScope scope;
    store(to, drawn);
  };
  launch(current_stream(device), std::move(task));
  return {arguments[index]};
}

void resize_outs(const Outcome& outcome, Arguments arguments) {
  for (const auto& [index, shape] : outcome.resized) {
    Tensor out = arguments[index].toTensor();
    out.resize_(shape.sizes);
    if (out.strides() != c10::IntArrayRef(shape.strides))
      out.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides);
  }
}

Stack launch_kernel(const OperatorHandle& op, const Traits& traits, int device,
                    std::shared_ptr<const Outcome> outcome, Arguments arguments) {
  resize_outs(*outcome, arguments);
  std::vector<Argument> captured = capture(traits, arguments);
  Results results = make_results(device, *outcome, arguments);
  Task task;
  task.name = op.schema().name();
  task.duration_us = duration_of(task.name, traits, captured, results);
  task.run = [op, captured = std::move(captured), operands = std::move(results.operands)] {
    store_all(operands, run_on_cpu(op, captured));
  };
  launch(current_stream(device), std::move(task));
  return std::move(results.values);
}

Stack run(const OperatorHandle& op, Arguments arguments) {
  const Traits& traits = traits_of(op);
  const int device = device_of(op, traits, arguments);
  DeviceScope scope(device);
  if (traits.is_view) return views(op, arguments);
  if (traits.needs_values) return run_now(op, traits, device, arguments);
  if (traits.draws_only) return draw(op, traits, device, arguments);
  auto outcome = outcome_of(op, traits, arguments);
  if (outcome->unknown) return run_now(op, traits, device, arguments);
  return launch_kernel(op, traits, device, std::move(outcome), arguments);
}

bool is_foreach(const OperatorHandle& op) {
  return op.schema().name().rfind("aten::_foreach_", 0) == 0;
}

bool is_on_several_devices(const IValue& value) {
  if (!value.isTensorList()) return false;
  const auto tensors = value.toTensorVector();
  return std::any_of(tensors.begin(), tensors.end(), [&](const Tensor& tensor) {
    return tensor.device() != tensors[0].device();
  });
}

// Lists of tensors on several devices are taken one by one, as CUDA does.
bool is_taken_apart(const OperatorHandle& op, Arguments arguments) {
  return is_foreach(op) &&
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
         std::any_of(arguments.begin(), arguments.end(), is_on_several_devices);
}

// Autograd counts writes to single tensors; CUDA's kernels of lists count their own.
void count_writes(const OperatorHandle& op, Arguments arguments) {
  if (!is_foreach(op)) return;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !arguments[i].isTensorList()) continue;
    for (const Tensor& tensor : arguments[i].toTensorVector())
      tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void fallback(const OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  if (is_taken_apart(op, torch::jit::last(*stack, count))) {
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
    return;
  }
  Stack results = run(op, torch::jit::last(*stack, count));
  count_writes(op, torch::jit::last(*stack, count));
  torch::jit::drop(*stack, count);
  for (IValue& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// [Note: Composite operators] A backend's fallback comes last: torch prefers to take composite
// operators apart on the host. CUDA has one kernel where the CPU has one, and the CPU's numbers come
// only from the CPU's kernel, so these get the fallback as their own kernel.
bool is_one_kernel(const OperatorHandle& op) {
  using c10::DispatchKey;
  const std::string& name = op.schema().name();
  if (name == "aten::_foreach_copy_") return false;  // between devices too: copy by copy
  if (name.rfind("aten::_foreach_", 0) == 0) return true;
  for (const char* one : {"aten::convolution", "aten::convolution_backward", "aten::_chunk_cat",
                          "aten::split_with_sizes_copy"})
    if (name == one) return true;
  const bool composite =
      op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
  return composite && op.hasKernelForDispatchKey(DispatchKey::CPU);
}

}  // namespace

void register_kernels() {
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>;
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    if (!is_one_kernel(*op) || traits_of(*op).is_view) continue;
    registrations->push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::PrivateUse1,
        c10::KernelFunction::makeFromBoxedFunction<&fallback>(), std::nullopt, nullptr, "sim"));
  }
}

}  // namespace sim
