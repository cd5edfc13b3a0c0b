"""Reads an event file with TensorBoard itself, and compares it with the lines of JSON of the same run.

    python3 read.py FOLDER
"""

import json
import math
import pathlib
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def number(x):
    """JSON has no word for NaN and infinities: they are strings there."""
    return float(x)


def f32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def equal(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


def expect(what, is_so):
    if not is_so:
        sys.exit(f"{what} is not what was written")


def main(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0, "tensors": 0})
    events.Reload()
    written = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record["values"].items():
            written.setdefault(name, []).append((record["step"], record["time"], value))
    counts = dict.fromkeys(["scalar", "text", "histogram", "image"], 0)
    for name, values in written.items():
        kind = next(iter(values[0][2])) if isinstance(values[0][2], dict) else "scalar"
        counts[kind] += 1
        read = {
            "scalar": lambda: events.Scalars(name),
            "text": lambda: events.Tensors(f"{name}/text_summary"),
            "histogram": lambda: events.Histograms(name),
            "image": lambda: events.Images(name),
        }[kind]()
        expect(f"the steps of {name}", [e.step for e in read] == [step for step, _, _ in values])
        for event, (step, time, value) in zip(read, values):
            what = f"{name} at step {step}"
            expect(f"the time of {what}", abs(event.wall_time - time) < 1e-6)
            if kind == "scalar":
                expect(what, equal(event.value, f32(number(value))))
            elif kind == "text":
                expect(what, event.tensor_proto.string_val[0].decode() == value["text"])
            elif kind == "image":
                image = value["image"]
                expect(what, (event.width, event.height) == (image["width"], image["height"]))
                expect(what, event.encoded_image_string.startswith(b"\x89PNG\r\n\x1a\n"))
            else:
                h, read_h = value["histogram"], event.histogram_value
                expect(what, (read_h.min, read_h.max, read_h.sum) == (h["min"], h["max"], h["sum"]))
                expect(what, read_h.sum_squares == h["sum_squares"] and read_h.num == sum(h["counts"]))
                expect(what, list(read_h.bucket_limit) == h["limits"] and list(read_h.bucket) == h["counts"])
    expect(f"the run, with {counts}", all(n > 0 for n in counts.values()))
    print(f"TensorBoard reads what was written: {counts}")


main(pathlib.Path(sys.argv[1]))
