"""One decoded picture -> 8-bit RGB at its final size, the right way up, in the right colours."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from av.video.reformatter import ColorRange, Colorspace, Interpolation
from numpy.typing import NDArray

Rgb = NDArray[np.uint8]

UNTAGGED = 2  # AVCOL_SPC_UNSPECIFIED; also the code of an unspecified transfer characteristic
HD_LINES = 720  # untagged pictures from this height up are BT.709
PQ, HLG = 16, 18  # AVCOL_TRC_SMPTE2084, AVCOL_TRC_ARIB_STD_B67
WHITE_NITS = 203.0  # HDR reference white, ITU-R BT.2408
KNEE = 0.75  # of reference white: up to here tone mapping changes nothing
MATRICES = {
    1: Colorspace.ITU709, 4: Colorspace.FCC, 5: Colorspace.ITU601, 6: Colorspace.ITU601, 7: Colorspace.SMPTE240M,
    9: Colorspace.BT2020, 10: Colorspace.BT2020,
}  # fmt: skip


@dataclass(frozen=True)
class Orientation:
    """How a coded picture becomes upright: transpose first, then flips. degrees: counter-clockwise rotation."""

    transpose: bool = False
    flip_x: bool = False
    flip_y: bool = False

    @property
    def upright(self) -> bool:
        return not (self.transpose or self.flip_x or self.flip_y)

    @property
    def mirrored(self) -> bool:
        return self.transpose ^ self.flip_x ^ self.flip_y

    @property
    def degrees(self) -> int:
        if not self.transpose:
            return 180 if self.flip_y else 0
        return 90 if self.flip_y else 270

    def apply(self, image: Rgb) -> Rgb:
        """image: [h, w, 3] -> [w, h, 3] when transposed."""
        if self.transpose:
            image = image.transpose(1, 0, 2)
        if self.flip_x:
            image = image[:, ::-1]
        if self.flip_y:
            image = image[::-1]
        return np.ascontiguousarray(image)


def orientation_of(frame: Any) -> Orientation:
    """From the frame's display matrix: nine native int32 [a b u; c d v; x y w] that take (x, y) to (ax + cy, bx + dy).

    Angles between multiples of 90 degrees take the nearest axis-aligned form.
    """
    for side in frame.side_data:
        if side.type.name == "DISPLAYMATRIX":
            a, b, _, c, d = struct.unpack_from("<5i", bytes(side))
            if abs(b) + abs(c) > abs(a) + abs(d):
                return Orientation(True, flip_x=c < 0, flip_y=b < 0)
            return Orientation(False, flip_x=a < 0, flip_y=d < 0)
    return Orientation()


def to_rgb(frame: Any, width: int, height: int, area_scaled: bool = False, as_qwen: bool = False) -> Rgb:
    """The picture as uint8 RGB [height, width, 3]; area_scaled: libswscale scales it to that size while converting,
    else it must have it already. Transparency goes over white, PQ and HLG are tone-mapped, untagged pictures take the
    matrix that fits their size; as_qwen: none of this, as the decoders behind qwen-omni-utils do it."""
    if as_qwen:
        return frame.reformat(format="rgb24", threads=1).to_ndarray()
    transparent = frame.format.name == "pal8" or any(c.is_alpha for c in frame.format.components)
    matrix = MATRICES.get(int(frame.colorspace))
    if int(frame.colorspace) == UNTAGGED:
        matrix = Colorspace.ITU709 if frame.height >= HD_LINES else Colorspace.ITU601
    how = {
        "width": width, "height": height, "threads": 1, "src_colorspace": matrix, "src_color_range": _range(frame),
        "interpolation": Interpolation.AREA if area_scaled else None,
    }  # fmt: skip
    if int(frame.color_trc) in (PQ, HLG):
        return hdr_to_sdr(frame.reformat(format="rgb48le", **how).to_ndarray(), int(frame.color_trc))
    if transparent:
        return over_white(frame.reformat(format="rgba", **how).to_ndarray())
    return frame.reformat(format="rgb24", **how).to_ndarray()


def _range(frame: Any) -> Any:
    full = int(frame.color_range) == 2 or frame.format.name.startswith("yuvj")
    return ColorRange.JPEG if full else (ColorRange.MPEG if int(frame.color_range) == 1 else None)


def over_white(rgba: NDArray[np.uint8]) -> Rgb:
    """Composites uint8 [h, w, 4] with straight alpha over white."""
    alpha = rgba[..., 3:].astype(np.uint16)
    if alpha.min() == 255:
        return np.ascontiguousarray(rgba[..., :3])
    return ((rgba[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def resize(image: Rgb, width: int, height: int, rounding: str = "uint8") -> Rgb:
    """Bicubic with antialias, uint8 [h, w, 3] -> [height, width, 3].

    rounding: `uint8` is the fixed-point path of the model's processor, `float` that of qwen-omni-utils; they differ by
    at most a few steps.
    """
    if image.shape[:2] == (height, width):
        return image
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    if rounding == "float":
        pixels = pixels.float()
    out = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True, align_corners=False)
    if rounding == "float":
        out = out.clamp(0, 255).round().to(torch.uint8)
    return np.ascontiguousarray(out[0].permute(1, 2, 0).numpy())


# --- high dynamic range -------------------------------------------------------------------------------------------


@functools.cache
def _light_table(transfer: int) -> NDArray[np.float32]:
    """Code value 0..65535 -> light relative to reference white. PQ: SMPTE ST 2084; HLG: ITU-R BT.2100 inverse OETF."""
    code = np.linspace(0.0, 1.0, 65536)
    if transfer == PQ:
        m1, m2, c1, c2, c3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128
        power = code ** (1 / m2)
        light = 10000.0 * (np.maximum(power - c1, 0) / (c2 - c3 * power)) ** (1 / m1) / WHITE_NITS
    else:
        a, b, c = 0.17883277, 0.28466892, 0.55991073
        light = np.where(code <= 0.5, code**2 / 3, (np.exp((code - c) / a) + b) / 12)
    return light.astype(np.float32)


@functools.cache
def _gamma_table() -> NDArray[np.uint8]:
    """Light 0..1 in 4096 steps of its square root -> 8-bit code of a BT.1886 display (gamma 2.4)."""
    root = np.linspace(0.0, 1.0, 4096)
    return np.rint(255 * root ** (2 / 2.4)).astype(np.uint8)


# ITU-R BT.2087: linear BT.2020 -> linear BT.709
TO_709 = np.array([[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], np.float32)


def hdr_to_sdr(rgb: NDArray[np.uint16], transfer: int) -> Rgb:
    """PQ or HLG BT.2020 uint16 [h, w, 3] -> SDR BT.709 uint8.

    Up to KNEE of reference white light is kept; above, the brightest channel approaches white and the others follow in
    proportion, so that hue stays.
    """
    light = _light_table(transfer)[rgb]
    if transfer == HLG:  # BT.2100 OOTF of a 1000-nit display: scene light -> display light
        luma = light @ np.array([0.2627, 0.678, 0.0593], np.float32)
        light *= (1000.0 / WHITE_NITS) * np.maximum(luma, 1e-6)[..., None] ** 0.2
    light = np.maximum(light @ TO_709.T, 0)
    peak = light.max(-1, keepdims=True)
    room = 1.0 - KNEE
    mapped = np.where(peak > KNEE, 1.0 - room * np.exp(-(peak - KNEE) / room), peak)
    light *= mapped / np.maximum(peak, 1e-6)
    return _gamma_table()[np.rint(np.sqrt(np.clip(light, 0, 1)) * 4095).astype(np.int32)]
