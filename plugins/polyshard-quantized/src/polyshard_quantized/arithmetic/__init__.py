"""Arrays of equal blocks as codes and back, in tensor operations or in kernels."""
