"""Metrics of fixed inputs as others compute them: python3 metrics.py > watch/tests/all/metrics.json.

Needs scikit-learn, sacrebleu, rouge-score, jiwer and pycocotools. Number i of series k is
(37 i² + 101 i + 13 k + 7) mod 97, as a share of 97 where a real number is asked for.
"""

import contextlib, io, json

import jiwer, numpy as np, sacrebleu, sklearn.metrics as of
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from rouge_score import rouge_scorer

TEXTS = [
    ("the cat sat on mats, 3.5 m wide - and \"slept\"", ["The cat sat on the mat, 3.5 m wide, and slept."]),
    ("a quick brown fox jumped over lazy dogs (twice)", ["the quick brown fox jumps over the lazy dog", "A quick brown fox jumped over dogs."]),
    ("it's 1,000-fold better &amp; cheaper", ["it's 1,000-fold better & cheaper than before"]),
    ("naïve words", ["entirely other ones here"]),
    ("words in another order, here", ["here, in another order, words"]),
    ("", ["nothing was said"]),
]


def series(k, n):
    i = np.arange(n)
    return (37 * i * i + 101 * i + 13 * k + 7) % 97


def classes():
    given, right = series(1, 60) % 5, series(2, 60) % 4
    out, labels = {}, sorted(set(given) | set(right))
    for average in ["macro", "weighted", "micro"]:
        options = {"average": average, "labels": labels, "zero_division": 0}
        out[f"precision_{average}"] = of.precision_score(right, given, **options)
        out[f"recall_{average}"] = of.recall_score(right, given, **options)
        out[f"f2_{average}"] = of.fbeta_score(right, given, beta=2, **options)
        out[f"iou_{average}"] = of.jaccard_score(right, given, **options)
    out["precision_of_1"] = of.precision_score(right == 1, given == 1)
    out["iou_of_4"] = of.jaccard_score(right == 4, given == 4, zero_division=0)
    return out


def numbers():
    given, right = series(3, 40) / 97, series(4, 40) / 97
    return {
        "mae": of.mean_absolute_error(right, given),
        "mse": of.mean_squared_error(right, given),
        "rmse": of.root_mean_squared_error(right, given),
        "r2": of.r2_score(right, given),
        "average_precision": of.average_precision_score(series(6, 80) % 3 == 0, (series(5, 80) % 20) / 20),
        "roc": of.roc_auc_score(series(6, 80) % 3 == 0, (series(5, 80) % 20) / 20),
    }


def texts():
    given, right = [g for g, _ in TEXTS], [r[0] for _, r in TEXTS]
    most = max(len(r) for _, r in TEXTS)
    references = [[r[k] if k < len(r) else None for _, r in TEXTS] for k in range(most)]
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"])
    ascii_only = [(g, r) for g, r in zip(given, right) if g.isascii()]
    rouge = [scorer.score(r, g) for g, r in ascii_only]
    return {
        "wer": jiwer.wer(right, given),
        "cer": jiwer.cer(right, given),
        "bleu": sacrebleu.corpus_bleu(given, references).score / 100,
        "bleu_first": sacrebleu.corpus_bleu(given[:1], [right[:1]]).score / 100,
        "bleu_smoothed": sacrebleu.corpus_bleu(given[1:2], [right[1:2]]).score / 100,
        **{name: np.mean([r[name].fmeasure for r in rouge]) for name in ["rouge1", "rouge2", "rougeL"]},
    }


def boxes(k, n):
    x, y, w, h = (series(k + j, n) for j in range(4))
    return [[int(a) % 40, int(b) % 40, int(a) % 40 + 10 + int(c) % 20, int(b) % 40 + 10 + int(d) % 20] for a, b, c, d in zip(x, y, w, h)]


def detection():
    truth, found = [], []
    for image in range(6):
        for j, (x1, y1, x2, y2) in enumerate(boxes(10 * image, 5)):
            box = {"image_id": image, "category_id": j % 3, "bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
            truth.append({**box, "iscrowd": 0, "id": len(truth) + 1})
            # Each object is found, more or less: moved by up to 4, with a score of few values.
            moved = int(series(image, 5)[j]) % 5
            score = (int(series(image + 3, 5)[j]) % 8) / 8
            found.append({**box, "bbox": [x1 + moved, y1, x2 - x1, y2 - y1], "score": score})
            if j % 2 == 0:
                found.append({**box, "bbox": [x1, y1 + 2, x2 - x1, y2 - y1], "score": score})
    coco = COCO()
    categories = [{"id": k, "name": str(k)} for k in range(3)]
    coco.dataset = {"images": [{"id": k} for k in range(6)], "annotations": truth, "categories": categories, "info": {}}
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
        run = COCOeval(coco, coco.loadRes(found), "bbox")
        run.evaluate(), run.accumulate(), run.summarize()
    return {"map": run.stats[0], "map_50": run.stats[1], "map_75": run.stats[2]}


all_texts = [{"given": given, "references": references} for given, references in TEXTS]
values = {**classes(), **numbers(), **texts(), **detection()}
print(json.dumps({"texts": all_texts, "values": {name: float(x) for name, x in values.items()}}, indent=1, ensure_ascii=False))
