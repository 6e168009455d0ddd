"""Tensors over memory that is known by its address, on any device.

[Note: addressed memory]
Tensors that lie end to end in memory can be worked on as one, but torch makes a tensor over several
storages only from a pointer. DLPack is the protocol that hands pointers over on every device: a
tensor of the same kind is exported, the description is copied with another address and length, and
imported. The description lives in memory of the C library, whose ``free`` is what the importer
calls when it is through. Such a tensor keeps nothing alive: the code that makes one keeps the
memory for as long as the tensor is used.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

_NAME = b"dltensor"


class _Described(ctypes.Structure):
    """A ``DLTensor``, see dlpack.h; the device is two words of 32 bits, the dtype one."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int64),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """A ``DLManagedTensor``, and the shape and stride of one dim behind it."""

    _fields_ = (
        ("tensor", _Described),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("shape", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    return libc


@functools.cache
def _capsules() -> ctypes.PyDLL:
    api = ctypes.PyDLL(None)
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return api


def tensor_at(address: int, numel: int, like: Tensor) -> Tensor:
    """``[numel]`` at ``address``, of the dtype and on the device of ``like`` (not empty).

    See [Note: addressed memory].
    """
    raw = like.detach().view(-1)[:1].view(torch.uint8)  # DLPack does not know every dtype
    capsule = to_dlpack(raw)
    found = _Managed.from_address(_capsules().PyCapsule_GetPointer(capsule, _NAME))
    place = _libc().malloc(ctypes.sizeof(_Managed))
    if not place:
        raise MemoryError("no memory to describe a tensor")
    made = _Managed.from_address(place)
    made.tensor.data, made.tensor.device = address, found.tensor.device
    made.tensor.ndim, made.tensor.dtype = 1, found.tensor.dtype
    made.shape, made.stride = numel * like.itemsize, 1
    made.tensor.shape = place + _Managed.shape.offset
    made.tensor.strides = place + _Managed.stride.offset
    made.tensor.byte_offset, made.context = 0, None
    made.deleter = ctypes.cast(_libc().free, ctypes.c_void_p).value
    whole = from_dlpack(_capsules().PyCapsule_New(place, _NAME, None))
    return whole.view(like.dtype)
