#!/usr/bin/env python3
"""Small array files of every form, for the fuzz target and its regression test.

    make_corpus.py FOLDER
"""
import json
import pathlib
import struct
import sys

import numpy


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for type_ in ("f4", "f8", "f2", "i8", "u1", "b1", ">i4"):
        numpy.save(folder / f"{type_.strip('>')}.npy", numpy.arange(6).reshape(2, 3).astype(type_))
    numpy.save(folder / "fortran.npy", numpy.asfortranarray(numpy.ones((2, 3), "f4")))
    numpy.save(folder / "record.npy", numpy.zeros(2, [("a", "f4")]))
    numpy.savez(folder / "stored.npz", x=numpy.ones((2, 3), "f4"), y=numpy.arange(2))
    numpy.savez_compressed(folder / "packed.npz", x=numpy.ones((2, 3), "f4"))
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                         "b": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [8, 12]}}).encode()
    (folder / "two.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    (folder / "images.idx").write_bytes(struct.pack(">HBBII", 0, 8, 2, 2, 3) + bytes(6))
    (folder / "empty").write_bytes(b"")


if __name__ == "__main__":
    main()
