"""Picture files: exact pixels, upright, and an error for whatever is not whole."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from media import cv2, encode, error_of, exif, image_of, jpeg_with, only, photo, png_with

# EXIF orientation -> how the stored pixels are turned to stand upright (the EXIF standard, written with numpy).
UPRIGHT = {
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: np.rot90(p, 2),
    4: lambda p: p[::-1],
    5: lambda p: p.transpose(1, 0, 2),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: np.rot90(p.transpose(1, 0, 2), 2),
    8: lambda p: np.rot90(p, 1),
}


def test_png_pixels_are_exact(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode(".png", photo()))
    frame = only(str(tmp_path / "a.png"))
    assert np.array_equal(frame.image, photo())
    assert (frame.index, frame.timestamp, frame.path) == (0, None, str(tmp_path / "a.png"))
    assert not frame.from_array


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_of_jpeg_and_png(tmp_path: Path, orientation: int) -> None:
    jpeg = encode(".jpg", photo())
    stored = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    (tmp_path / "a.jpg").write_bytes(jpeg_with(exif(orientation), jpeg))
    assert np.array_equal(image_of(tmp_path / "a.jpg"), UPRIGHT[orientation](stored))
    if hasattr(cv2, "IMAGE_METADATA_EXIF"):  # OpenCV reads eXIf chunks since 4.11
        (tmp_path / "a.png").write_bytes(png_with(b"eXIf", exif(orientation), encode(".png", photo())))
        assert np.array_equal(image_of(tmp_path / "a.png"), UPRIGHT[orientation](photo()))


def test_exif_orientation_is_honoured_however_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jpeg = encode(".jpg", photo())
    upright = UPRIGHT[6](cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR))
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "B.JPG", "no_suffix", "wrong.png", "wrong.mp4", "odd.txt", "Tür 門 [1].jpeg"):
        folder = tmp_path / f"folder of {name}"
        folder.mkdir()
        file = folder / name
        file.write_bytes(jpeg_with(exif(6), jpeg))
        ways = [file, str(file), os.fsencode(file), f"folder of {name}/{name}", folder, [file], iter([file])]
        ways += [] if "[" in name else [str(folder / "*"), f"folder of {name}/*"]
        for way in ways:
            assert np.array_equal(image_of(way), upright), way


def test_grey_alpha_and_palette_pictures_come_as_three_channels(tmp_path: Path) -> None:
    grey = photo()[:, :, 0]
    (tmp_path / "grey.png").write_bytes(encode(".png", grey))
    assert np.array_equal(image_of(tmp_path / "grey.png"), np.dstack([grey] * 3))
    alpha = np.dstack([photo(), np.full((48, 67), 7, np.uint8)])
    (tmp_path / "alpha.png").write_bytes(encode(".png", alpha))
    assert np.array_equal(image_of(tmp_path / "alpha.png"), photo())


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_16_bits_are_divided_by_257(tmp_path: Path, suffix: str, channels: int) -> None:
    deep = np.random.default_rng(channels).integers(0, 65536, (20, 30, channels), dtype=np.uint16)
    deep[0, :4] = np.array([0, 128, 129, 65535], np.uint16)[:, None]
    (tmp_path / f"a{suffix}").write_bytes(encode(suffix, deep))
    expected = np.floor(deep[:, :, : min(channels, 3)] / 257 + 0.5).astype(np.uint8)
    got = image_of(tmp_path / f"a{suffix}")
    assert got[0, :4, 0].tolist() == [0, 0, 1, 255]
    assert np.array_equal(got, np.broadcast_to(expected, got.shape))


@pytest.mark.parametrize("highest", [1, 15, 100, 254, 255, 256, 1023, 4095, 65535])
@pytest.mark.parametrize("kind", [b"P5", b"P6", b"P7"])
def test_binary_pnm_is_scaled_by_its_highest_value(tmp_path: Path, kind: bytes, highest: int) -> None:
    if kind == b"P7" and highest == 1:
        pytest.skip("OpenCV reads such a PAM picture as black")
    channels = 3 if kind == b"P6" else 1
    values = np.random.default_rng(highest).integers(0, highest + 1, (4, 6, channels))
    values[0, :3] = np.array([0, 1, highest])[:, None]
    if kind == b"P7":
        head = b"P7\n# made here\nWIDTH 6\nHEIGHT 4\nDEPTH 1\nMAXVAL %d\nTUPLTYPE GRAYSCALE\nENDHDR\n" % highest
    else:
        head = kind + b"\n# made 9 9 9\n6 4 # here\n%d\n" % highest
    (tmp_path / "a.pnm").write_bytes(head + values.astype(">u2" if highest > 255 else "u1").tobytes())
    expected = np.floor(values * 255 / highest + 0.5).astype(np.uint8)[:, :, ::-1]  # BGR
    assert np.array_equal(image_of(tmp_path / "a.pnm"), np.broadcast_to(expected, (4, 6, 3)))


@pytest.mark.parametrize("highest", [15, 255, 1023, 65535])
def test_text_pnm_is_scaled_by_its_highest_value(tmp_path: Path, highest: int) -> None:
    values = np.array([0, highest // 5 * 2, highest // 5 * 3, highest])
    text = f"P2\n4 1\n{highest}\n{' '.join(map(str, values))}\n"
    (tmp_path / "a.pgm").write_text(text)
    assert image_of(tmp_path / "a.pgm")[0, :, 1].tolist() == np.floor(values * 255 / highest + 0.5).tolist()


CODECS = {
    "JPEG": (".jpg", ()),
    "progressive JPEG": (".jpg", (cv2.IMWRITE_JPEG_PROGRESSIVE, 1)),
    "JPEG with restart marks": (".jpg", (cv2.IMWRITE_JPEG_RST_INTERVAL, 2)),
    "PNG": (".png", ()),
    "WebP": (".webp", (cv2.IMWRITE_WEBP_QUALITY, 80)),
    "lossless WebP": (".webp", (cv2.IMWRITE_WEBP_QUALITY, 101)),
    "BMP": (".bmp", ()),
    "TIFF": (".tiff", ()),
    "plain TIFF": (".tiff", (cv2.IMWRITE_TIFF_COMPRESSION, 1)),
    "JPEG 2000": (".jp2", ()),
    "PNM": (".ppm", ()),
}


@pytest.mark.parametrize("codec", CODECS)
def test_a_file_cut_at_any_length_is_an_error(tmp_path: Path, codec: str) -> None:
    suffix, parameters = CODECS[codec]
    data = encode(suffix, photo(120, 151), *parameters)
    file = tmp_path / f"a{suffix}"
    file.write_bytes(data)
    image_of(file)
    lengths = {1, 2, 3, 4, 8, 12, 20, 33, *range(len(data) - 12, len(data)), *range(40, len(data), len(data) // 40)}
    for length in sorted(lengths):
        file.write_bytes(data[:length])
        assert "a" + suffix in error_of(file), length


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_an_end_of_zeros_is_an_error(tmp_path: Path, suffix: str) -> None:
    data = encode(suffix, photo(120, 151))
    file = tmp_path / f"a{suffix}"
    for missing in (1, 2, 3, 4, 100, len(data) // 2, len(data) - 40):
        file.write_bytes(data[:-missing] + bytes(missing))
        assert "truncated" in error_of(file) or "damaged" in error_of(file), missing


def test_bytes_after_the_end_and_a_thumbnail_do_not_mislead(tmp_path: Path) -> None:
    jpeg = encode(".jpg", photo())
    with_thumbnail = jpeg_with(exif(1) + encode(".jpg", photo(8, 8)), jpeg)
    (tmp_path / "whole.jpg").write_bytes(with_thumbnail + b"a second picture, as phones append it")
    image_of(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes(with_thumbnail[: -len(jpeg) // 2])
    assert "truncated" in error_of(tmp_path / "cut.jpg")


def test_a_changed_byte_in_a_png_is_an_error(tmp_path: Path) -> None:
    data = bytearray(encode(".png", photo()))
    data[len(data) // 2] ^= 1
    (tmp_path / "a.png").write_bytes(data)
    assert "checksum" in error_of(tmp_path / "a.png")


def test_what_is_said_of_files_that_are_no_pictures(tmp_path: Path) -> None:
    for name, data, words in [
        ("empty.jpg", b"", "empty (0 bytes)"),
        ("empty.mp4", b"", "empty (0 bytes)"),
        ("notes.txt", b"a note\n", "not a picture: expected JPEG, PNG"),
        ("text.jpg", b"a note\n", "found text that begins with 'a note"),
        ("zeros.png", bytes(500), "nothing but zeros"),
        ("program.bin", b"\x7fELF\x02\x01\x01", "data that begins with 7f 45 4c 46"),
        ("phone.heic", b"\0\0\0\x18ftypheic" + bytes(12), "convert it to JPEG"),
        ("text.mp4", b"a note\n" * 100, "no frame could be read"),
    ]:
        (tmp_path / name).write_bytes(data)
        assert words in error_of(tmp_path / name), name
        assert name in error_of(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    assert "found a folder, a pipe or a device" in error_of(tmp_path / "pipe")
    (tmp_path / "lost.jpg").symlink_to(tmp_path / "nowhere.jpg")
    assert "cannot be read" in error_of(tmp_path / "lost.jpg")


def test_a_picture_of_absurd_size_is_an_error(tmp_path: Path) -> None:
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    body = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(body))
    error_of(tmp_path / "bomb.png")


def test_a_float_picture_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.tiff").write_bytes(encode(".tiff", photo().astype(np.float32)))
    assert "float32" in error_of(tmp_path / "a.tiff")
