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

# Two shards, with several record batches in the first, and the columns of a data set of images.
from PIL import Image
from datasets import Dataset, Features, Image as ImageFeature, Sequence, Value

def png(i):
    file = io.BytesIO()
    Image.new("RGB", (2, 1), (i, 2 * i, 7)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": f"{i}.png"}

rows = {"text": [f"row {i}" for i in range(7)], "label": list(range(7)),
        "score": [None if i == 3 else float("nan") if i == 4 else i / 2 for i in range(7)],
        "tokens": [list(range(i)) for i in range(7)], "image": [png(i) for i in range(7)],
        "good": [i % 2 == 0 for i in range(7)], "pair": [[i, -i] for i in range(7)]}
features = Features({"text": Value("string"), "label": Value("int64"), "score": Value("float32"),
                     "tokens": Sequence(Value("int32")), "image": ImageFeature(), "good": Value("bool"),
                     "pair": Sequence(Value("int8"), length=2)})
folder = os.path.join(out, "saved")
shutil.rmtree(folder, ignore_errors=True)
import datasets.config
datasets.config.DEFAULT_MAX_BATCH_SIZE = 2
Dataset.from_dict(rows, features=features).save_to_disk(folder, num_shards=2)
os.remove(os.path.join(folder, "dataset_info.json"))
import pyarrow as pa, pyarrow.parquet as pq
table = Dataset.from_dict(rows, features=features).data.table.replace_schema_metadata(None)
pq.write_table(table, os.path.join(out, "images.parquet"), compression="snappy", row_group_size=3)
# The format of files instead of streams, and a column by a dictionary, which is refused.
with pa.ipc.new_file(os.path.join(out, "file.arrow"), table.schema) as writer:
    writer.write_table(table.select(table.column_names), max_chunksize=3)
words = pa.table({"word": pa.array(["a", "b", "a"]).dictionary_encode()})
with pa.ipc.new_stream(os.path.join(out, "dictionary.arrow"), words.schema) as writer:
    writer.write_table(words)
# Compressed batches, which are refused too.
ones = pa.table({"x": pa.array([1] * 100, pa.int8())})
options = pa.ipc.IpcWriteOptions(compression="lz4")
with pa.ipc.new_stream(os.path.join(out, "compressed.arrow"), ones.schema, options=options) as writer:
    writer.write_table(ones)
print(json.load(open(os.path.join(folder, "state.json"))))
