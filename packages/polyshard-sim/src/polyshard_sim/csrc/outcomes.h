// What an operator returns for arguments of given dtypes, sizes and strides: learnt once.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <string>
#include <vector>

#include "operands.h"

namespace sim {

using torch::jit::Stack;
using Arguments = c10::ArrayRef<c10::IValue>;

// What the schema of an operator says.
struct Traits {
  std::vector<int> aliased;         // for each return the argument it is, or -1: a fresh tensor
  std::vector<bool> is_out;         // for each argument
  std::vector<bool> is_written;     // `out=`, and what is changed in place
  std::vector<bool> is_generator;
  std::vector<bool> shapes_nothing;  // a number whose value no shape depends on
  bool is_view = false;
  bool needs_values = false;  // what it returns depends on values: the host has to wait
  bool draws_only = false;    // fills a tensor with random numbers and reads no other
  bool takes_host_tensors = false;
};
const Traits& traits_of(const c10::OperatorHandle& op);

struct Shape {
  bool defined = true, wrapped_number = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kByte;
  static Shape of(const at::Tensor& tensor);
};

struct Outcome {
  struct Return {
    enum class Kind { argument, tensor, tensors, none } kind = Kind::none;
    int argument = -1;
    std::vector<Shape> shapes;
  };
  std::vector<Return> returns;
  std::vector<std::pair<int, Shape>> resized;  // arguments given as `out=` of another shape
  bool unknown = false;  // the operator fails on zeros: run it and see
};

// Runs the operator on zeros of the CPU the first time, or on meta tensors where nothing computes.
std::shared_ptr<const Outcome> outcome_of(const c10::OperatorHandle& op, const Traits& traits,
                                          Arguments arguments);

// Views, worked out by meta kernels over a storage of the same size.
Stack view_outcome(const c10::OperatorHandle& op, Arguments arguments);

}  // namespace sim
