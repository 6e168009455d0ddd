"""The head of a safetensors file: JSON that says where each tensor's bytes are.

Format: https://huggingface.co/docs/safetensors/index#format. Eight bytes with the length of the
header, little-endian; the header; the bytes of all tensors, row by row, without gaps.

The reader and writer here use no library for that, because each rank has to read and write its own
bytes at their places in files that ranks share; the tests compare with the ``safetensors`` package.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyshard.errors import CheckpointError

LENGTH_BYTES = 8
MOST_BYTES = 100_000_000
"""Of a header, as the format says."""
ALIGNMENT = 8
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""By the names of the format, in the order of its own list."""
Described = tuple[torch.dtype, torch.Size]
"""Dtype and shape of a tensor."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file.

    Attributes:
        shape: of the whole tensor.
        begin: where its first byte is in the file.
    """

    dtype: torch.dtype
    shape: torch.Size
    begin: int

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def name_of(fqn: str, dtype: torch.dtype) -> str:
    """The format's name of a dtype.

    Raises:
        CheckpointError: when it has none.
    """
    if dtype not in _NAMES:
        raise CheckpointError(f"'{fqn}' is {dtype}, which safetensors files cannot hold")
    return _NAMES[dtype]


def read_header(path: Path) -> dict[str, Stored]:
    """What a file holds, by name. Nothing else of it is read.

    Raises:
        CheckpointError: when it is no safetensors file, or the place of a tensor is outside of it.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 0 < length <= min(MOST_BYTES, size - LENGTH_BYTES):
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            found = json.loads(file.read(length))
        found.pop("__metadata__", None)
        start = LENGTH_BYTES + length
        stored = {name: _stored(name, entry, start, size) for name, entry in found.items()}
        _check_places(stored, start, size)
        return stored
    except CheckpointError as error:
        raise CheckpointError(f"'{path}': {error}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"'{path}' is no safetensors file: {type(error).__name__}: {error}"
        ) from error


def _stored(name: str, entry: Mapping[str, Any], start: int, size: int) -> Stored:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"'{name}' has dtype {entry['dtype']}, which is not supported")
    found = Stored(DTYPES[entry["dtype"]], torch.Size(entry["shape"]), start + begin)
    if begin < 0 or min(found.shape, default=0) < 0 or start + end > size:
        raise ValueError(f"'{name}' would be outside of the file")
    if end - begin != found.nbytes:
        raise ValueError(f"'{name}' has {end - begin:,} bytes, its shape means {found.nbytes:,}")
    return found


def _check_places(stored: Mapping[str, Stored], start: int, size: int) -> None:
    """Every byte belongs to one tensor; else the header is not that of this file."""
    end = start
    for name, tensor in sorted(stored.items(), key=lambda one: (one[1].begin, one[1].nbytes)):
        if tensor.begin != end:
            raise ValueError(f"there is a gap before '{name}', or it begins inside another")
        end += tensor.nbytes
    if end != size:
        raise ValueError(f"its tensors end at {end:,}, the file at {size:,}")


def in_order(tensors: Mapping[str, Described]) -> dict[str, Described]:
    """``tensors`` in the order in which the ``safetensors`` package writes them to a file."""
    ranks = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}
    known = sorted(tensors.items(), key=lambda one: (-ranks.get(one[1][0], -1), one[0]))
    return dict(known)


def make_header(tensors: Mapping[str, Described]) -> bytes:
    """The head of a file that holds ``tensors``, in that order.

    Raises:
        CheckpointError: for a dtype that the format has no name for.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": name_of(name, dtype),
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
