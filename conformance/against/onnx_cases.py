"""The node tests of ONNX's backend suite, in one compressed file: models, inputs and the outputs that are expected.

    python3 onnx_cases.py conformance/onnx/cases.zlib

Needs onnx 1.23.2. The file is a zlib stream: the header's length (u32), the header (JSON), then tensors, each as planes of its elements' first
bytes, second bytes and so on, then models as files. A case that has a type without a row in TYPES, or more than LARGEST bytes, is only named, with the reason.
"""

import json, struct, sys, warnings, zlib

warnings.filterwarnings("ignore")
import numpy as np
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

TYPES = {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "int64": "i64", "uint32": "u32", "uint8": "u8", "bool": "bool"}
LARGEST = 700_000


class LeftOut(Exception):
    pass


class Tensors:
    """Every distinct tensor once."""

    def __init__(self):
        self.rows, self.planes, self.known, self.offset = [], [], {}, 0

    def add(self, x):
        if not hasattr(x, "dtype"):
            if not hasattr(x, "data_type"):
                raise LeftOut("a sequence or an optional value")
            x = numpy_helper.to_array(x)
        x = np.asarray(x)
        if x.dtype.name not in TYPES:
            raise LeftOut(f"the type {'string' if x.dtype.kind in 'OUS' else x.dtype.name}")
        # From here on bytes in the order of little-endian machines.
        data, size = x.tobytes(), x.dtype.itemsize
        key = (x.dtype.name, x.shape, data)
        if key not in self.known:
            self.known[key] = len(self.rows)
            self.rows.append([TYPES[x.dtype.name], list(x.shape), self.offset])
            self.planes += [data[i::size] for i in range(size)]
            self.offset += len(data)
        return self.known[key]


def written(case, tensors):
    types = {v.type.WhichOneof("value") for v in list(case.model.graph.input) + list(case.model.graph.output)}
    if types - {"tensor_type"}:
        raise LeftOut("a sequence or an optional value")
    (ins, outs), = case.data_sets
    if sum(getattr(x, "nbytes", 0) for x in list(ins) + list(outs)) > LARGEST:
        raise LeftOut("its size")
    return {
        "name": case.name, "rtol": case.rtol, "atol": case.atol, "model": case.model.SerializeToString(deterministic=True),
        "ins": [tensors.add(x) for x in ins], "outs": [tensors.add(x) for x in outs],
    }


def main(to):
    tensors, cases = Tensors(), []
    for case in sorted(collect_testcases(None), key=lambda case: case.name):
        before = len(tensors.rows), len(tensors.planes), tensors.offset, dict(tensors.known)
        try:
            cases.append(written(case, tensors))
        except LeftOut as why:
            del tensors.rows[before[0]:], tensors.planes[before[1]:]
            tensors.offset, tensors.known = before[2:]
            cases.append({"name": case.name, "left_out": str(why)})
    models = b""
    for case in cases:
        if "model" in case:
            model, case["model"] = case["model"], [tensors.offset + len(models), len(case["model"])]
            models += model
    header = json.dumps({"tensors": tensors.rows, "cases": cases}, separators=(",", ":")).encode()
    stream = zlib.compress(struct.pack("<I", len(header)) + header + b"".join(tensors.planes) + models, 9)
    with open(to, "wb") as file:
        file.write(stream)
    print(f"{len(cases)} cases, {sum('model' in c for c in cases)} with their values; {len(stream)} bytes")


main(sys.argv[1])
