"""Columns of a table by scikit-learn: python3 columns.py > data/tests/references/columns.json.

Needs scikit-learn.
"""

import json
import numpy as np
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import MinMaxScaler, OrdinalEncoder, RobustScaler, StandardScaler

nan = np.nan
training = np.array([3.0, nan, -1.5, 10.0, 4.25, nan, 0.5, 10.0]).reshape(-1, 1)
other = np.array([2.0, nan, 20.0, -7.0]).reshape(-1, 1)


def flat(x):
    return [None if np.isnan(v) else float(v) for v in np.asarray(x, dtype=float).flatten()]


out = {"training": flat(training), "other": flat(other), "filled": {}, "scaled": {}}
for strategy in ("mean", "median", "constant"):
    imputer = SimpleImputer(strategy=strategy, fill_value=-1.0 if strategy == "constant" else None).fit(training)
    out["filled"][strategy] = flat(imputer.transform(other))
for name, scaler in (("standard", StandardScaler()), ("min_max", MinMaxScaler()), ("robust", RobustScaler())):
    out["scaled"][name] = flat(scaler.fit(training).transform(other))
    constant = np.full((3, 1), 2.5)
    out["scaled"][name + " constant"] = flat(scaler.fit(constant).transform(other))
encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
words = np.array([["red"], ["green"], ["red"], ["blue"], ["Zinc"]])
encoder.fit(words)
out["words"] = words.flatten().tolist()
out["codes"] = flat(encoder.transform([["blue"], ["red"], ["pink"], ["Zinc"]]))
print(json.dumps(out))
