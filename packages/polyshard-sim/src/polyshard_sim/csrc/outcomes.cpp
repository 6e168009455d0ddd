#include "outcomes.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_strided.h>

#include <mutex>
#include <unordered_map>

#include "streams.h"

namespace sim {

using at::Tensor;
using c10::IValue;

namespace {

// ---- what schemas say

bool has_tag(const c10::OperatorHandle& op, at::Tag tag) {
  for (at::Tag one : op.getTags())
    if (one == tag) return true;
  return false;
}

bool mentions(const c10::Argument& argument, const char* type) {
  return argument.type()->str().find(type) != std::string::npos;
}

// CUDA too accepts tensors of the CPU that are not scalars for these.
bool takes_host_tensors(const std::string& name) {
  static const char* names[] = {"aten::index", "aten::_index_put_impl_", "aten::_unsafe_index",
                                "aten::index_put", "aten::_foreach_addc", "aten::tensor_split"};
  for (const char* one : names)
    if (name.rfind(one, 0) == 0) return true;
  return false;
}

Traits read_traits(const c10::OperatorHandle& op) {
  Traits it;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  bool any_tensor = false, any_out = false;
  int tensors = 0;
  for (const auto& argument : arguments) {
    any_out |= argument.is_out();
    any_tensor |= mentions(argument, "Tensor");
    tensors += mentions(argument, "Tensor");
    it.is_out.push_back(argument.is_out());
    it.is_written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    it.is_generator.push_back(mentions(argument, "Generator"));
  }
  for (const auto& argument : arguments) {
    const auto& type = argument.type()->str();
    const bool number = type == "number" || type == "Scalar" || type == "float";
    it.shapes_nothing.push_back(number && any_tensor && !any_out);
  }
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    int aliased = -1;
    for (size_t i = 0; alias && alias->isWrite() && i < arguments.size(); ++i)
      if (arguments[i].alias_info() &&
          arguments[i].alias_info()->beforeSets() == alias->beforeSets())
        aliased = i;
    it.aliased.push_back(aliased);
    it.is_view |= alias && !alias->isWrite();
    it.needs_values |= !mentions(c10::Argument("", result.type()), "Tensor");
  }
  it.needs_values |= has_tag(op, at::Tag::dynamic_output_shape);
  it.needs_values |= has_tag(op, at::Tag::data_dependent_output);
  it.draws_only = tensors == 1 && it.aliased.size() == 1 && it.aliased[0] >= 0 &&
                  has_tag(op, at::Tag::nondeterministic_seeded);
  it.takes_host_tensors = takes_host_tensors(schema.name());
  return it;
}

// ---- signatures

template <typename T>
void add(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void add_tensor(std::string& key, const Tensor& tensor) {
  if (!tensor.defined()) {
    key.push_back('u');
    return;
  }
  const auto* impl = tensor.unsafeGetTensorImpl();
  key.push_back(on_device(tensor) ? 'd' : 'h');
  key.push_back(static_cast<char>(tensor.scalar_type()));
  key.push_back(impl->is_wrapped_number() | tensor.is_conj() << 1 | tensor.is_neg() << 2);
  key.push_back(static_cast<char>(tensor.dim()));
  for (int64_t size : tensor.sizes()) add(key, size);
  for (int64_t stride : tensor.strides()) add(key, stride);
}

void add_value(std::string& key, const IValue& value, bool shapes_nothing) {
  key.push_back(value.isNone()     ? 'n'
                : value.isTensor() ? 't'
                : value.isInt()    ? 'i'
                : value.isBool()   ? 'b'
                : value.isDouble() ? 'f'
                : value.isList()   ? 'l'
                                   : 'o');
  if (value.isTensor()) {
    add_tensor(key, value.toTensor());
  } else if (value.isList()) {
    const auto& list = value.toListRef();
    add(key, list.size());
    for (const IValue& one : list) add_value(key, one, false);
  } else if (shapes_nothing || value.isNone() || value.isGenerator()) {
    // the kind of value is enough
  } else if (value.isInt()) {
    add(key, value.toInt());
  } else if (value.isBool()) {
    add(key, value.toBool());
  } else if (value.isDouble()) {
    add(key, value.toDouble());
  } else if (value.isString()) {
    key += value.toStringRef();
  } else if (value.isDevice()) {
    key.push_back(static_cast<char>(value.toDevice().type()));
  } else {
    key += c10::str(value);
  }
}

// ---- running on stand-ins

struct StandIns {
  bool meta;

  Tensor tensor(const Tensor& given) const {
    if (!given.defined() || !on_device(given)) return given;
    Tensor made;
    if (meta) {
      made = at::detail::empty_strided_meta(given.sizes(), given.strides(), given.scalar_type(),
                                            std::nullopt, c10::Device(c10::kMeta), std::nullopt);
    } else {
      made = at::detail::empty_strided_cpu(given.sizes(), given.strides(), given.scalar_type());
      std::memset(made.mutable_data_ptr(), 0, made.storage().nbytes());
    }
    if (given.is_conj()) made._set_conj(true);
    if (given.is_neg()) made._set_neg(true);
    if (given.unsafeGetTensorImpl()->is_wrapped_number())
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }

  IValue value(const IValue& given, bool is_generator) const {
    if (given.isTensor()) return tensor(given.toTensor());
    if (given.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& one : given.toTensorVector()) tensors.push_back(tensor(one));
      return tensors;
    }
    if (given.isDevice()) return c10::Device(meta ? c10::kMeta : c10::kCPU);
    if (is_generator) return meta ? IValue() : IValue(at::detail::createCPUGenerator(0));
    if (given.isList() && mentions_tensors(given)) {
      c10::List<std::optional<Tensor>> tensors;
      for (const IValue& one : given.toListRef())
        tensors.push_back(one.isNone() ? std::nullopt : std::optional(tensor(one.toTensor())));
      return tensors;
    }
    return given;
  }

  static bool mentions_tensors(const IValue& list) {
    return list.toList().elementType()->str().find("Tensor") != std::string::npos;
  }
};

void note_returns(Outcome& outcome, const Traits& traits, const Stack& results) {
  for (size_t i = 0; i < traits.aliased.size(); ++i) {
    Outcome::Return one;
    if (traits.aliased[i] >= 0) {
      one.kind = Outcome::Return::Kind::argument;
      one.argument = traits.aliased[i];
    } else if (results[i].isTensor()) {
      one.kind = Outcome::Return::Kind::tensor;
      one.shapes.push_back(Shape::of(results[i].toTensor()));
    } else if (results[i].isTensorList()) {
      one.kind = Outcome::Return::Kind::tensors;
      for (const Tensor& tensor : results[i].toTensorVector())
        one.shapes.push_back(Shape::of(tensor));
    }
    outcome.returns.push_back(std::move(one));
  }
}

Outcome learn(const c10::OperatorHandle& op, const Traits& traits, Arguments arguments,
              bool meta) {
  Outcome outcome;
  KernelScope scope;
  const StandIns stand_ins{meta};
  Stack stack;
  for (size_t i = 0; i < arguments.size(); ++i)
    stack.push_back(stand_ins.value(arguments[i], traits.is_generator[i]));
  const Stack given = stack;
  op.callBoxed(&stack);
  note_returns(outcome, traits, stack);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!traits.is_out[i] || !arguments[i].isTensor()) continue;
    const Tensor& after = given[i].toTensor();
    if (after.sizes() != arguments[i].toTensor().sizes())
      outcome.resized.emplace_back(i, Shape::of(after));
  }
  return outcome;
}

// Zeros of the CPU tell exactly what its kernel returns. Where nothing computes, models are too large
// for that, and meta tensors come first.
Outcome learn_somehow(const c10::OperatorHandle& op, const Traits& traits, Arguments arguments) {
  const std::vector<bool> ways = settings().compute ? std::vector<bool>{false}
                                                    : std::vector<bool>{true, false};
  for (bool meta : ways) {
    try {
      return learn(op, traits, arguments, meta);
    } catch (const std::exception&) {
      continue;
    }
  }
  Outcome outcome;
  outcome.unknown = true;
  return outcome;
}

constexpr size_t kMaxOutcomes = 1 << 16;

}  // namespace

Shape Shape::of(const Tensor& tensor) {
  Shape it;
  it.defined = tensor.defined();
  if (!it.defined) return it;
  it.sizes = tensor.sizes().vec();
  it.strides = tensor.strides().vec();
  it.dtype = tensor.scalar_type();
  it.wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  return it;
}

const Traits& traits_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* all = new std::unordered_map<const void*, Traits>;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = all->find(&op.schema());
  if (found == all->end()) found = all->emplace(&op.schema(), read_traits(op)).first;
  return found->second;
}

std::shared_ptr<const Outcome> outcome_of(const c10::OperatorHandle& op, const Traits& traits,
                                          Arguments arguments) {
  static std::mutex mutex;
  static auto* all = new std::unordered_map<std::string, std::shared_ptr<const Outcome>>;
  static thread_local std::string key;
  key.clear();
  add(key, &op.schema());
  for (size_t i = 0; i < arguments.size(); ++i)
    add_value(key, arguments[i], traits.shapes_nothing[i]);
  key.push_back(static_cast<char>(c10::get_default_dtype_as_scalartype()));  // of quotients, say
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = all->find(key);
    if (found != all->end()) return found->second;
  }
  const std::string own_key = key;  // learning may come by here again
  auto outcome = std::make_shared<const Outcome>(learn_somehow(op, traits, arguments));
  std::lock_guard<std::mutex> lock(mutex);
  if (all->size() >= kMaxOutcomes) all->clear();
  if (!outcome->unknown) all->emplace(own_key, outcome);
  return outcome;
}

Stack view_outcome(const c10::OperatorHandle& op, Arguments arguments) {
  Stack stack;
  for (const IValue& value : arguments) {
    if (!value.isTensor() || !on_device(value.toTensor())) {
      stack.push_back(value);
      continue;
    }
    const Tensor& tensor = value.toTensor();
    const int64_t elements = tensor.storage().nbytes() / tensor.itemsize();
    Tensor meta = at::detail::empty_strided_meta({elements}, {1}, tensor.scalar_type(),
                                                 std::nullopt, c10::Device(c10::kMeta),
                                                 std::nullopt);
    meta.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    meta.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.is_conj()) meta._set_conj(true);
    if (tensor.is_neg()) meta._set_neg(true);
    stack.push_back(meta);
  }
  KernelScope scope;
  op.callBoxed(&stack);
  return stack;
}

}  // namespace sim
