"""Splits and weights of classes by scikit-learn: python3 sklearn_data.py > data/tests/references/sklearn.json.

Needs scikit-learn.
"""

import json
import numpy as np
from sklearn.model_selection import StratifiedKFold, StratifiedShuffleSplit, KFold
from sklearn.utils.class_weight import compute_class_weight

out = {}
classes = np.array([0] * 13 + [1] * 7 + [2] * 20 + [3] * 3)
out["classes"] = classes.tolist()
out["weights"] = compute_class_weight("balanced", classes=np.arange(4), y=classes).tolist()
out["split"] = {}
for first in (10, 21, 30, 39):
    [(train, _)] = StratifiedShuffleSplit(1, train_size=first, test_size=43 - first, random_state=0).split(classes, classes)
    out["split"][first] = np.bincount(classes[train], minlength=4).tolist()
out["folds"] = {}
for k in (2, 3):
    parts = [v for _, v in StratifiedKFold(k, shuffle=True, random_state=0).split(classes, classes)]
    out["folds"][k] = sorted(np.bincount(classes[v], minlength=4).tolist() for v in parts)
out["sizes"] = sorted(len(v) for _, v in KFold(5, shuffle=True, random_state=0).split(classes))
print(json.dumps(out))
