"""Opens a GGUF file with the `gguf` package: metadata as Python values, tensors as mapped arrays."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor

from stepgraph.engine.errors import ModelError
from stepgraph.engine.fields import one_line

_MAGIC = b"GGUF"


@dataclass(frozen=True)
class GGUFFile:
    """metadata: key -> int, float, bool, str or a list of one of them. tensors: still quantised, in file order."""

    path: Path
    metadata: dict[str, Any]
    tensors: list[ReaderTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Reads the header; tensor data stays mapped. Raises ModelError for a file that is truncated or is not GGUF."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
        if start != _MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it starts with {start!r}, not {_MAGIC!r}")
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from None
    except (ValueError, IndexError, KeyError, OverflowError, RecursionError, struct.error) as error:
        raise ModelError(f"{path} is truncated or damaged: {one_line(error)}; fetch it again") from None
    return GGUFFile(path, metadata, reader.tensors)


class _Reader(GGUFReader):
    """The package's reader, with arrays read at once.

    It makes three NumPy objects an element, which takes seconds for a vocabulary. Should the package rename this
    method, reading falls back to that speed.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        data = self.data.view(np.ndarray)  # slices of a memmap object cost ten times as much
        kind, count = struct.unpack_from("<IQ", data, orig_offs)
        start = orig_offs + 12
        types = [GGUFValueType.ARRAY, GGUFValueType(kind)]
        if types[1] in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[types[1]], count)
            if len(values) != count:
                raise ValueError("an array runs past the end of the file")
            return 12 + values.nbytes, [values], [0], types
        if types[1] != GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        strings, position = [], start
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", data, position)
            position += 8 + length
            if position > len(data):
                raise ValueError("a string runs past the end of the file")
            strings.append(data[position - length : position])
        return position - orig_offs, strings, list(range(count)), types
