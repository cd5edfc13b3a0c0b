"""Augmentations of an image by torchvision: python3 augment.py > data/tests/references/augment.json.

Needs torch and torchvision.
"""

import json
import torch
import torchvision.transforms.functional as F
from torchvision.transforms import InterpolationMode

width, height = 7, 5
pixels = [(37 * i * i + 11 * i) % 251 for i in range(width * height * 3)]
image = torch.tensor(pixels, dtype=torch.uint8).reshape(height, width, 3).permute(2, 0, 1)


def flat(image):
    return image.permute(1, 2, 0).flatten().tolist()


def affine(**given):
    given = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]} | given
    return F.affine(image, **given, interpolation=InterpolationMode.NEAREST)


def degrees(x):
    return torch.rad2deg(torch.atan(torch.tensor(x, dtype=torch.float64))).item()


out = {
    "brightness": {x: flat(F.adjust_brightness(image, float(x))) for x in ("0", "0.6", "1.37")},
    "contrast": {x: flat(F.adjust_contrast(image, float(x))) for x in ("0", "0.6", "1.37")},
    "saturation": {x: flat(F.adjust_saturation(image, float(x))) for x in ("0", "0.6", "1.37")},
    "hue": {x: flat(F.adjust_hue(image, float(x))) for x in ("-0.5", "0.07", "0.31")},
    "sharpness": {x: flat(F.adjust_sharpness(image, float(x))) for x in ("0", "0.6", "1.9")},
    "posterize": {x: flat(F.posterize(image, int(x))) for x in ("1", "4", "8")},
    "solarize": {x: flat(F.solarize(image, float(x))) for x in ("0", "128", "255")},
    "auto_contrast": {"0": flat(F.autocontrast(image // 2 + 20))},
    "equalize": {"0": flat(F.equalize(image.repeat(1, 4, 4))[:, :height, :width])},
    "rotate": {x: flat(F.rotate(image, float(x), InterpolationMode.NEAREST)) for x in ("-21", "13", "90")},
    "shear_x": {x: flat(affine(shear=[degrees(float(x)), 0.0], center=[0, 0])) for x in ("-0.23", "0.3")},
    "shear_y": {x: flat(affine(shear=[0.0, degrees(float(x))], center=[0, 0])) for x in ("-0.23", "0.3")},
    "translate": {x: flat(affine(translate=[int(x), -1])) for x in ("-2", "3")},
}
print(json.dumps({"width": width, "height": height, "pixels": pixels, "ops": out}, separators=(",", ":")))
