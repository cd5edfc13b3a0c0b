"""Small models that torch.onnx.export writes, with onnxruntime's outputs and PyTorch's gradients.

    python3 make.py FOLDER

Needs torch 2.15, onnxscript 0.7, onnx 1.23.2, onnxruntime 1.32.0 and safetensors. Each model is FOLDER/NAME.onnx, and its values are
FOLDER/NAME.safetensors: inputs `in.NAME`, outputs `out.NAME`, and gradients of the sum of the squares of all outputs, `grad.NAME`, in evaluation.
"""

import sys, warnings
from pathlib import Path

warnings.filterwarnings("ignore")
import onnx, onnxruntime, torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=64)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 10), nn.Linear(10, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.fc2(self.dropout(F.gelu(self.fc1(x))))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, stride=2, groups=2), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, image):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(image))), 2)
        x = F.hardswish(self.bn2(self.conv2(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    """A block that attends with a causal mask made of its input's length."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(20, 16), nn.Embedding(32, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids):
        batch, length = ids.shape
        x = self.embed(ids) + self.positions(torch.arange(length, device=ids.device))
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / 2.0
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        scores = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, 16))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(14, 6, batch_first=True)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.gru(self.lstm(x)[0])[0][:, -1])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8, padding_idx=0)
        self.fc = nn.Linear(8, 3)

    def forward(self, ids):
        kept = (ids != 0).unsqueeze(-1).float()
        return F.log_softmax(self.fc((self.embed(ids) * kept).sum(1) / kept.sum(1).clamp(min=1)), -1)


def filled(model):
    """Random norms and statistics, so that a wrong one shows, and the exporter does not join equal ones."""
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
            nn.init.normal_(module.weight, 1, 0.2), nn.init.normal_(module.bias, 0, 0.2)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
    return model.eval()


def write(folder, name, model, inputs, dynamic, script):
    """Exports by torch.export, or by TorchScript if it has options."""
    path = folder / f"{name}.onnx"
    names = list(inputs)
    args = tuple(inputs.values())
    if script is None:
        shapes = tuple({i: dim for i, dim in enumerate(dims) if dim} for dims in dynamic.values())
        torch.onnx.export(model, args, path, input_names=names, output_names=["y"], dynamic_shapes=shapes, dynamo=True, external_data=False, verbose=False)
    else:
        axes = {key: {i: dim.__name__ for i, dim in enumerate(dims) if dim} for key, dims in dynamic.items()}
        torch.onnx.export(model, args, path, input_names=names, output_names=["y"], dynamic_axes=axes, dynamo=False, opset_version=17, **script)
        model.eval()
    written = onnx.load(path)
    print(name, path.stat().st_size, "bytes:", sorted({n.op_type for n in written.graph.node}))
    print("   ", [t.name for t in written.graph.initializer])
    # Texts of the exporter, several times as large as the model.
    written.ClearField("metadata_props")
    for node in written.graph.node:
        node.ClearField("metadata_props"), node.ClearField("doc_string")
    for value in list(written.graph.value_info) + list(written.graph.input) + list(written.graph.output) + list(written.graph.initializer):
        value.ClearField("metadata_props"), value.ClearField("doc_string")
    written.graph.ClearField("value_info")
    onnx.save(written, path)


def values(folder, name, model, inputs):
    session = onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
    outs = session.run(["y"], {key: x.numpy() for key, x in inputs.items()})
    leaves = {key: x.clone().requires_grad_() for key, x in inputs.items() if x.is_floating_point()}
    y = model(**{key: leaves.get(key, x) for key, x in inputs.items()})
    print("    onnxruntime differs from PyTorch by", float((y - torch.from_numpy(outs[0])).abs().max()))
    y.square().sum().backward()
    # A graph for training drops in onnxruntime.
    found = {f"in.{key}": x for key, x in inputs.items()} | {"out.y": y.detach() if name == "mlp" else torch.from_numpy(outs[0])}
    found |= {f"grad.{key}": x.grad for key, x in leaves.items()}
    found |= {f"grad.{key}": p.grad for key, p in model.named_parameters()}
    return found


def trained(model, inputs):
    """The output of a step in training, and the batch norms' statistics after it, with ONNX's variance: of the batch itself."""
    before = {key: x.clone() for key, x in model.named_buffers()}
    counts = {"bn1.running_var": 3 * 12 * 12, "bn2.running_var": 3 * 2 * 2}
    model.train()
    y = model(**inputs)
    model.zero_grad()
    y.square().sum().backward()
    found = {"train.y": y.detach()} | {f"train.grad.{key}": p.grad for key, p in model.named_parameters()}
    for key, x in model.named_buffers():
        if key in counts:
            x = 0.9 * before[key] + (x - 0.9 * before[key]) * (counts[key] - 1) / counts[key]
        if "running" in key:
            found[f"train.{key}"] = x
    return found


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    ids = lambda *shape: torch.randint(0, 20, shape)
    train, same = torch.onnx.TrainingMode.TRAINING, torch.onnx.TrainingMode.PRESERVE
    cases = [
        ("mlp", Mlp(), {"x": torch.randn(2, 6)}, {"x": (BATCH, None)}, {"x": torch.randn(5, 6)}, {"do_constant_folding": False, "training": train}),
        ("cnn", Cnn(), {"image": torch.randn(2, 3, 12, 12)}, {"image": (BATCH, None, None, None)}, {"image": torch.randn(3, 3, 12, 12)}, {"do_constant_folding": False, "training": same}),
        ("block", Block(), {"ids": ids(2, 6)}, {"ids": (BATCH, LENGTH)}, {"ids": ids(3, 9)}, None),
        ("block_script", Block(), {"ids": ids(2, 6)}, {"ids": (BATCH, LENGTH)}, {"ids": ids(3, 9)}, {"do_constant_folding": False}),
        ("lstm", Lstm(), {"x": torch.randn(2, 6, 5)}, {"x": (BATCH, LENGTH, None)}, {"x": torch.randn(3, 4, 5)}, {}),
        ("classifier", Classifier(), {"ids": ids(2, 6)}, {"ids": (BATCH, LENGTH)}, {"ids": ids(4, 5)}, None),
    ]
    for name, model, example, dynamic, inputs, script in cases:
        model = filled(model)
        write(folder, name, model, example, dynamic, script)
        found = values(folder, name, model, inputs)
        if name == "cnn":
            found |= trained(model, inputs)
        save_file({key: x.contiguous() for key, x in found.items()}, folder / f"{name}.safetensors")


main(Path(sys.argv[1]))
