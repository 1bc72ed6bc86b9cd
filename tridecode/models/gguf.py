"""GGUF files: the container of llama.cpp, with metadata and tensors. A file is not trusted, so all of it is checked.

The format is little-endian. It begins with "GGUF", a u32 version, and u64 numbers of tensors and keys. The keys with
their values follow. An entry of a tensor contains its name, u32 dimensions, u64 sizes (the contiguous one first), a u32
type, and a u64 offset. Padding and the data of the tensors follow.
Source: docs/gguf.md of the ggml project.
"""

import os
import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..arguments import shown
from ..errors import CheckpointError, counted
from .files import open_regular, present, unreadable
from .reader import ConfigReader

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # Version 3 added only files of big-endian machines, which are refused.
_FIRST_READ = 2**24  # Bytes that are read at first. Most metadata is smaller.
_MAX_COUNT = 2**16  # Maximum keys, and maximum tensors.
_MAX_ITEMS = 2**24  # Maximum elements of an array, more than the tokens and merges of any vocabulary.
_MAX_KEY = 2**16 - 1  # Maximum bytes of a key.
_MAX_NAME = 64  # Maximum bytes of a tensor's name.
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**16
_MAX_PARTS = 999
_LISTED = 4096  # Arrays of at most this many numbers are part of the values.
# Types of values -> format of struct. 8 is a string, 9 an array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_U32, _FLOAT, _BOOL, _STRING, _ARRAY, _U64 = 4, 6, 7, 8, 9, 10
_LEAST = 12  # Minimum bytes of a key or of a tensor's entry: the length of its name, and its type.
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class BlockType(NamedTuple):
    """A type of tensors: its name, the columns of a block of numbers, and the bytes of a block."""

    name: str
    columns: int
    nbytes: int


# Source: ggml.h and ggml-common.h of the ggml project.
TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}


class GGUFTensor(NamedTuple):
    """A tensor of a file.

    Args:
        file: the file.
        type: its type.
        shape: its shape; the last axis is contiguous.
        begin: byte of the file at which it begins.
    """

    file: Path
    type: BlockType
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) // self.type.columns * self.type.nbytes


class _Array(NamedTuple):
    """An array in the metadata that is not part of the values.

    Args:
        kind: type of its elements.
        size: number of its elements.
        begin: byte of the header at which they begin.
    """

    kind: int
    size: int
    begin: int


class GGUF:
    """A GGUF file, or the files of a split one.

    Attributes:
        path: the file, or the first one.
        values: the metadata by key: numbers, strings, and short lists of numbers. Other arrays are read by `strings`
            and `numbers`.
        tensors: the tensors by name.
    """

    def __init__(self, path: Path, values: dict[str, Any], tensors: dict[str, GGUFTensor], header: bytes):
        self.path, self.values, self.tensors, self._header = path, values, tensors, header

    def reader(self) -> ConfigReader:
        """Return the reader of the values."""
        return ConfigReader(self.values, str(self.path))

    def length(self, key: str) -> int:
        """Return the number of elements of an array; 0 if the key is absent or no array."""
        value = self.values.get(key)
        return len(value) if isinstance(value, list) else value.size if isinstance(value, _Array) else 0

    def strings(self, key: str) -> list[str]:
        """Return an array of strings; [] if the key is absent. Raises CheckpointError."""
        array = self.values.get(key)
        if array is None:
            return []
        if not isinstance(array, _Array) or array.kind != _STRING:
            raise self._malformed(key, "an array of strings")
        try:
            return [text.decode() for text in _strings(self._header, array.begin, array.size)]
        except UnicodeDecodeError:
            raise self._malformed(key, "an array of strings in UTF-8") from None

    def numbers(self, key: str) -> list[Any]:
        """Return an array of numbers; [] if the key is absent. Raises CheckpointError."""
        array = self.values.get(key)
        if array is None or isinstance(array, list):
            return array or []
        if not isinstance(array, _Array) or array.kind not in _NUMBERS:
            raise self._malformed(key, "an array of numbers")
        return list(struct.unpack_from(f"<{array.size}{_NUMBERS[array.kind]}", self._header, array.begin))

    def floats(self, name: str) -> list[float]:
        """Return the numbers of a small tensor in F32. Raises CheckpointError."""
        tensor = self.tensors[name]
        if tensor.type.name != "F32" or tensor.nbytes > _LISTED * 4:
            raise CheckpointError(f"{self.path}: tensor {name} must hold at most {_LISTED:,} numbers in F32")
        try:
            with open_regular(tensor.file, gguf=True) as file:
                data = os.pread(file.fileno(), tensor.nbytes, tensor.begin)
        except OSError as error:
            raise unreadable(tensor.file, error) from None
        if len(data) < tensor.nbytes:
            raise CheckpointError(f"{tensor.file}: became shorter while it was read; load it again when it is complete")
        return list(struct.unpack(f"<{prod(tensor.shape)}f", data))

    def _malformed(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} must be {expected}; use another copy of the file")


def _strings(data: bytes, at: int, count: int) -> Iterator[bytes]:
    """Yield `count` strings that begin at byte `at`. Their bounds are already checked."""
    length = struct.Struct("<Q").unpack_from
    for _ in range(count):
        end = at + 8 + length(data, at)[0]
        yield data[at + 8 : end]
        at = end


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as GGUF files do. Raises CheckpointError."""
    with open_regular(path, gguf=True) as file:
        return file.read(4) == MAGIC


def part_names(path: Path) -> list[Path]:
    """Return the files of a split model by the name of one of them; a file with another name is alone."""
    match = _PART.fullmatch(path.name)
    if match is None or not 0 < int(match[3]) <= _MAX_PARTS:
        return [path]
    return [path.with_name(f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf") for i in range(int(match[3]))]


def read_gguf(path: Path) -> GGUF:
    """Read the metadata of a GGUF file, and of the other files if it is split. Raises CheckpointError."""
    names = part_names(path)
    for name in names:
        if not present(name):
            raise CheckpointError(f"{path}: {name.name}, another part of the model, is not next to it; download it too")
    try:
        changed = tuple((info.st_size, info.st_mtime_ns) for info in map(os.stat, names))
    except OSError as error:
        raise unreadable(path, error) from None
    return _read(tuple(names), changed)


@lru_cache(maxsize=2)  # A load reads the metadata several times.
def _read(names: tuple[Path, ...], changed: tuple[tuple[int, int], ...]) -> GGUF:
    """Read the files of a model.

    Args:
        changed: sizes and times of the last change, a part of the cache's key.
    """
    first, *others = (_Header(name).parsed() for name in names)
    count = first.values.get("split.count", 0)
    if count not in (0, len(names)):
        raise CheckpointError(
            f"{first.path}: is one of {count} parts (split.count), but its name contains no part number; "
            "restore names like model-00001-of-00002.gguf"
        )
    for number, part in enumerate((first, *others)):
        if len(names) > 1 and (part.values.get("split.no"), part.values.get("split.count")) != (number, len(names)):
            raise CheckpointError(
                f"{part.path}: must be part {number + 1} of {len(names)} by its name, but its metadata has split.no "
                f"{shown(part.values.get('split.no'))} and split.count {shown(part.values.get('split.count'))}"
            )
        if twice := part is not first and first.tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{part.path}: tensor {shown(min(twice))} is also in another part of the model")
        first.tensors.update(part.tensors)
    total = first.values.get("split.tensors.count", len(first.tensors))
    if total != len(first.tensors):
        raise CheckpointError(
            f"{first.path}: the parts hold {counted(len(first.tensors), 'tensor')}, not {shown(total)} "
            "(split.tensors.count); download them again"
        )
    return first


class _Header:
    """The parser of one file's header: the bytes before the data of the tensors."""

    _file: BufferedReader
    _size: int  # Bytes of the file.

    def __init__(self, path: Path):
        self._path, self._at, self._data = path, 0, b""  # `_at` is the next byte of `_data` to parse.

    def parsed(self) -> GGUF:
        """Read the header. Raises CheckpointError."""
        try:
            with open_regular(self._path, gguf=True) as self._file:
                self._size = self._file.seek(0, 2)
                self._file.seek(0)
                return self._parse()
        except OSError as error:
            raise unreadable(self._path, error) from None

    def _broken(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {reason}; use another copy of the file")

    def _need(self, end: int, what: str) -> None:
        """Read more of the file if its first `end` bytes are not read yet. Raises CheckpointError if it is shorter.

        Args:
            what: name of the item that ends at byte `end`, for messages.
        """
        if end > self._size:
            raise self._broken(f"truncated: {what} ends at byte {end:,} of a file of {self._size:,}")
        while end > len(self._data):
            more = self._file.read(min(max(len(self._data), _FIRST_READ), self._size - len(self._data)))
            if not more:
                raise self._broken("became shorter while it was read")
            self._data += more

    def _take(self, size: int, what: str) -> bytes:
        """Return the next bytes of the header."""
        start, self._at = self._at, self._at + size
        self._need(self._at, what)
        return self._data[start : self._at]

    def _skip_strings(self, count: int, what: str) -> None:
        """Skip the strings of an array."""
        at, length = self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > len(self._data):
                self._need(at + 8, what)
            at += 8 + length(self._data, at)[0]
            if at > len(self._data):
                self._need(at, what)
        self._at = at

    def _number(self, kind: int, what: str) -> Any:
        """Read a number or a bool of a type of _NUMBERS."""
        form = "<" + _NUMBERS[kind]
        value = struct.unpack(form, self._take(struct.calcsize(form), what))[0]
        if kind == _BOOL:
            if value > 1:
                raise self._broken(f"{what} must be 0 or 1, got {value}")
            return bool(value)
        return shortest(value) if kind == _FLOAT else value

    def _string(self, what: str, limit: int | None = None) -> str:
        length = self._number(_U64, what)
        if limit is not None and length > limit:
            raise self._broken(f"{what} has {counted(length, 'byte')}, at most {limit:,} are allowed")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise self._broken(f"{what} is not UTF-8") from None

    def _parse(self) -> GGUF:
        if self._take(4, "the first word") != MAGIC:
            raise self._broken("is not a GGUF file")
        if (version := self._number(_U32, "the version")) not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise self._broken("is written for big-endian machines, which is not supported")
            raise self._broken(f"has version {version}; versions {' and '.join(map(str, VERSIONS))} are supported")
        tensors, keys = self._number(_U64, "the number of tensors"), self._number(_U64, "the number of keys")
        for count, what in ((tensors, "tensor"), (keys, "key")):
            if count > min(_MAX_COUNT, self._size // _LEAST):
                raise self._broken(f"cannot hold {counted(count, what)}")
        values: dict[str, Any] = {}
        for i in range(keys):
            key = self._string(f"the name of key {i}", _MAX_KEY)
            if key in values:
                raise self._broken(f"the key {shown(key)} occurs twice")
            values[key] = self._value(self._number(_U32, f"the type of {shown(key)}"), shown(key))
        alignment = values.get("general.alignment", 32)
        valid = type(alignment) is int and 8 <= alignment <= _MAX_ALIGNMENT
        if not valid or alignment & (alignment - 1):
            raise self._broken(f"general.alignment must be a power of two from 8 to {_MAX_ALIGNMENT:,}")
        infos = self._tensors(tensors, alignment)
        return GGUF(self._path, values, infos, self._data[: self._at])

    def _value(self, kind: int, what: str) -> Any:
        """Read a value of the metadata. Arrays that are not part of the values become an _Array."""
        if kind in _NUMBERS:
            return self._number(kind, what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            raise self._broken(f"{what} has the unknown type {kind}")
        kind, count = self._number(_U32, what), self._number(_U64, what)
        if kind == _ARRAY:
            raise self._broken(f"{what} is an array of arrays, which is not supported")
        if kind != _STRING and kind not in _NUMBERS:
            raise self._broken(f"{what} has elements of the unknown type {kind}")
        if count > _MAX_ITEMS:
            raise self._broken(f"{what} has {counted(count, 'element')}, at most {_MAX_ITEMS:,} are allowed")
        begin = self._at
        if kind == _STRING:
            self._skip_strings(count, what)
            return _Array(kind, count, begin)
        items = self._take(count * struct.calcsize("<" + _NUMBERS[kind]), what)
        if count > _LISTED:
            return _Array(kind, count, begin)
        numbers = struct.unpack(f"<{count}{_NUMBERS[kind]}", items)
        if kind == _BOOL:
            return [bool(number) for number in numbers]
        return [shortest(number) for number in numbers] if kind == _FLOAT else list(numbers)

    def _tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        """Read the entries of the tensors, and check that their data are in the file and do not overlap."""
        entries: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
        for i in range(count):
            name = self._string(f"the name of tensor {i}", _MAX_NAME)
            what = f"tensor {shown(name)}"
            if name in entries:
                raise self._broken(f"{what} occurs twice")
            dimensions = self._number(_U32, what)
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise self._broken(f"{what} has {counted(dimensions, 'dimension')}, 1 to {_MAX_DIMENSIONS} are allowed")
            shape = tuple(self._number(_U64, what) for _ in range(dimensions))[::-1]
            number, offset = self._number(_U32, what), self._number(_U64, what)
            if number not in TYPES:
                raise self._broken(f"{what} has the unknown type {number}")
            kind = TYPES[number]
            if not all(0 < size < 2**31 for size in shape) or shape[-1] % kind.columns:
                raise self._broken(f"{what}, {kind.name}, cannot have the shape {list(shape)}")
            if offset % alignment:
                raise self._broken(f"{what} begins at {offset:,}, which is not a multiple of {alignment}")
            entries[name] = kind, shape, offset
        start = -(-self._at // alignment) * alignment  # Offsets count from here.
        tensors = {
            name: GGUFTensor(self._path, kind, shape, start + offset) for name, (kind, shape, offset) in entries.items()
        }
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
            if tensor.begin < end:
                raise self._broken(f"tensors {shown(before)} and {shown(name)} overlap")
            end, before = tensor.begin + tensor.nbytes, name
            if end > self._size:
                raise self._broken(f"truncated: tensor {shown(name)} ends at byte {end:,} of a file of {self._size:,}")
        return tensors


def shortest(value: float) -> float:
    """Return the shortest decimal number that has the same value in fp32: 1e-05 for 9.999999747378752e-06."""
    if value != value or value in (float("inf"), float("-inf")):
        return value
    exact = struct.pack("<f", value)
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if abs(short) < 3.4e38 and struct.pack("<f", short) == exact:
            return short
    return value
