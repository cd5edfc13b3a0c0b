"""Files that NumPy and Hugging Face write: python3 data_files.py data/tests/references.

Needs numpy, datasets, pyarrow and Pillow.
"""

import io, json, os, shutil, sys
import numpy as np

out = sys.argv[1]

# Each type with the values 0, 1, 2, ... in both byte orders; a shape of three axes in both memory orders.
arrays = {}
for code in "i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8".split():
    for order in "<>":
        arrays[f"{code}{'le' if order == '<' else 'be'}"] = np.array([0, 1, 100], dtype=order + code)
arrays["bool"] = np.array([True, False, True])
arrays["negative"] = np.array([-1, -100], dtype="i2")
arrays["c"] = np.arange(24, dtype="f4").reshape(2, 3, 4)
arrays["fortran"] = np.asfortranarray(arrays["c"])
arrays["single"] = np.array(2.5)
arrays["empty"] = np.zeros((0, 3), dtype="f4")
np.savez_compressed(os.path.join(out, "packed.npz"), **arrays)
np.savez(os.path.join(out, "plain.npz"), c=arrays["c"], fortran=arrays["fortran"])
