"""Mel spectrograms by librosa and torchaudio: python3 mel.py > data/tests/references/mel.json.

Needs librosa, torch and torchaudio.
"""

import json
import numpy as np
import librosa, torch, torchaudio

rate, length = 8000, 200
i = np.arange(length)
signal = np.sin(0.05 * i) + 0.5 * np.sin(0.31 * i + 0.004 * i * i)


def rounded(x):
    return [float(f"{v:.8g}") for v in np.asarray(x, dtype=np.float64).flatten()]


out = {"rate": rate, "length": length, "filters": {}}
for scale in ("htk", "slaney"):
    for norm in (None, "slaney"):
        for low, high in ((0.0, None), (90.0, 3300.0)):
            filters = librosa.filters.mel(sr=rate, n_fft=64, n_mels=6, fmin=low, fmax=high, htk=scale == "htk",
                                          norm=norm if norm else np.inf, dtype=np.float64)
            if norm is None:
                f = librosa.mel_frequencies(8, fmin=low, fmax=high or rate / 2, htk=scale == "htk")
                ramps = np.subtract.outer(f, librosa.fft_frequencies(sr=rate, n_fft=64))
                filters = np.array([np.maximum(0, np.minimum(-ramps[k] / (f[k + 1] - f[k]), ramps[k + 2] / (f[k + 2] - f[k + 1]))) for k in range(6)])
            out["filters"][f"{scale} {norm} {low} {high or rate / 2}"] = rounded(filters)
mel = librosa.feature.melspectrogram(y=signal, sr=rate, n_fft=64, hop_length=25, n_mels=6)
out["librosa"] = rounded(mel)
out["librosa_db"] = rounded(librosa.power_to_db(mel, top_db=30.0))
out["librosa_db_all"] = rounded(librosa.power_to_db(mel * 1e-9, top_db=None))
transform = torchaudio.transforms.MelSpectrogram(rate, n_fft=64, hop_length=25, n_mels=6, f_min=90.0, f_max=3300.0, power=1.0).to(torch.float64)
out["torchaudio"] = rounded(transform(torch.tensor(signal)).numpy())
two = torch.tensor(np.stack([signal, 1e-3 * signal]))
transform = torchaudio.transforms.MelSpectrogram(rate, n_fft=64, hop_length=25, n_mels=6).to(torch.float64)
out["torchaudio_db"] = rounded(torchaudio.transforms.AmplitudeToDB("power", 40.0)(transform(two)[:, None]).numpy())
print(json.dumps(out, separators=(",", ":")))
