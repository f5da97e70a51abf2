"""From an encoded image to its pixels."""

import io

import numpy as np
from PIL import Image

from fedloom.platform.data.artefact import ByteArray


def decode_rgb(encoded: bytes, place: str, shape_HWC: tuple[int, int, int]) -> ByteArray:
    """Pixels (3, H, W) of a PNG or JPEG; grey images become three equal channels.

    Raises ValueError that begins with `place` if it cannot be decoded or has another shape.
    """
    # Pillow, as fast per image as torchvision's decoder (75 µs measured for both, same pixels), without its import.
    try:
        image_HWC = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{place} is not an image ({error}); expected PNG or JPEG") from error
    if image_HWC.shape != shape_HWC:
        raise ValueError(f"{place} has shape {image_HWC.shape}; expected {shape_HWC}")
    return image_HWC.transpose(2, 0, 1)
