"""What the payload benchmark sends is what arrives, in every form, and its sizes are those of the pixels."""

from __future__ import annotations

import http.client

import numpy as np
import pytest
import simplejpeg

from jobs.bench.payload import FORMS, Cost, claims_of, patches_of, post, real_frames, server_process


@pytest.fixture(scope="module")
def clip():
    frames = np.ascontiguousarray(real_frames(4)[:, :128, :160])
    return frames, [simplejpeg.encode_jpeg(frame, 95, colorsubsampling="420") for frame in frames]


def test_every_form_arrives_as_it_was_sent(clip):
    frames, jpegs = clip
    patches = patches_of(frames)
    decoded = patches_of(np.stack([simplejpeg.decode_jpeg(jpeg) for jpeg in jpegs]))
    sizes = {}
    with server_process() as port:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for name, form in FORMS.items():
            payload = form.write(frames, jpegs, patches)
            sizes[name] = len(payload)
            made = form.ready(form.read(payload))
            expected = decoded if "JPEG" in name else patches
            loss = 2**-8 if "bf16" in name else 0.0
            np.testing.assert_allclose(made.numpy(), expected.numpy(), rtol=loss, atol=0)
            assert post(connection, name, payload)["patches"] == len(patches)
        connection.close()
    pixels = frames.size
    assert sizes["fp32 patches"] == pytest.approx(4 * pixels, rel=0.01)
    assert sizes["bf16 patches"] == pytest.approx(2 * pixels, rel=0.01)
    assert sizes["uint8 frames"] == pytest.approx(pixels, rel=0.01)
    assert sizes["JPEG"] == sum(map(len, jpegs)) + 4 * (len(jpegs) + 1)
    assert sizes["JPEG base64"] == pytest.approx(4 / 3 * sum(map(len, jpegs)), rel=0.01)


def test_claims_are_ratios_of_what_was_measured():
    costs = {name: Cost(100, 0.1, 0.2, 0.3, 0.4) for name in FORMS} | {"JPEG": Cost(4, 0.05, 0, 0, 0.2)}
    for count, met in ((8, None), (64, True)):
        claims = {claim.claim: claim for claim in claims_of(count, costs)}
        assert claims[f"fp32 patches / JPEG, bytes, {count} frames"].value == 25
        ratio = claims[f"JPEG / fp32 patches, written, sent and made to patches there, {count} frames"]
        assert (ratio.value, ratio.met) == (0.5, met)
        assert claims[f"fp32 patches / uint8 frames, bytes, {count} frames"].met is False
