"""Files made to run code, to use up memory, or to say two things: none is taken, nothing runs."""

from __future__ import annotations

import io
import json
import resource
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import ForeignFormatError
from holdfast.interop.pickles import interpret
from holdfast.interop.source_files import SourceFiles
from support.checkpoints.commands import SOURCE

P = b"\x80\x02"


def call(module: str, name: str, argument: bytes = b"X\x01\x00\x00\x00x") -> bytes:
    """The call of a function, as REDUCE has it."""
    return P + f"c{module}\n{name}\n".encode() + argument + b"\x85R."


CALLS = [
    ("os", "system"),
    ("posix", "system"),
    ("nt", "system"),
    ("subprocess", "Popen"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("__builtin__", "eval"),
    ("builtins", "open"),
    ("builtins", "getattr"),
    ("builtins", "__import__"),
    ("builtins", "compile"),
    ("importlib", "import_module"),
    ("runpy", "run_path"),
    ("socket", "create_connection"),
    ("urllib.request", "urlopen"),
    ("shutil", "rmtree"),
    ("pty", "spawn"),
    ("pdb", "run"),
    ("code", "interact"),
    ("timeit", "timeit"),
    ("cProfile", "run"),
    ("pickle", "loads"),
    ("ctypes", "CDLL"),
    ("functools", "partial"),
    ("functools", "reduce"),
    ("operator", "attrgetter"),
    ("webbrowser", "open"),
    ("asyncio", "run"),
    ("bdb", "Bdb"),
    ("types", "CodeType"),
    ("types", "FunctionType"),
    ("_pickle", "loads"),
    ("marshal", "loads"),
    ("imaplib", "IMAP4"),
    ("ssl", "get_server_certificate"),
    ("pydoc", "pipepager"),
    ("__main__", "Anything"),
    ("multiprocessing.util", "spawnv_passfds"),
    ("venv", "create"),
]

PICKLES: dict[str, bytes] = {
    **{f"calls {module}.{name}": call(module, name) for module, name in CALLS},
    "inst": P + b"(X\x01\x00\x00\x00xios\nsystem\n.",
    "obj": P + b"(cos\nsystem\nX\x01\x00\x00\x00xo.",
    "newobj": P + b"cos\nsystem\nX\x01\x00\x00\x00x\x85\x81.",
    "newobj_ex": b"\x80\x04cargparse\nNamespace\n)}\x92.",
    "stack_global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.",
    "ext1": P + b"\x82\x01.",
    "ext2": P + b"\x83\x01\x00.",
    "ext4": P + b"\x84\x01\x00\x00\x00.",
    "persid": P + b"P0\n.",
    "a persistent id of another kind": P + b"X\x05\x00\x00\x00moduleK\x00\x86Q.",
    "a persistent id that is a call": P + b"X\x07\x00\x00\x00storagecposix\nsystem\n\x86Q.",
    "out-of-band buffer": b"\x80\x05\x97.",
    "read-only buffer": b"\x80\x05K\x01\x98.",
    "stacked": P + b"K\x01." + call("os", "system"),
    "breaks after its payload": call("os", "system")[:-1] + b"\xff",
    "no end": P + b"K\x01",
    "empty": b"",
    "protocol 0": b"(dp0\n.",
    "protocol 9": b"\x80\x09N.",
    "protocol twice": P + P + b"N.",
    "two values": P + b"NN.",
    "nothing on the stack": P + b"0.",
    "mark without items": P + b"(.",
    "no mark": P + b"t.",
    "memo that is not there": P + b"h\x05.",
    "text of 2^31": P + b"X\xff\xff\xff\x7f" + b"a" * 10,
    "text of 2^62": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62),
    "bytes of 2^62": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62),
    "integer of 2^31": P + b"\x8b\xff\xff\xff\x7f",
    "integer of a negative length": P + b"\x8b\xff\xff\xff\xff",
    "integer of 2000 bytes": P + b"\x8b" + struct.pack("<i", 2000) + b"\x01" * 2000 + b".",
    "frame of 2^62": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "text that is none": P + b"X\x02\x00\x00\x00\xff\xfe.",
    "key that is a list": P + b"}]K\x01s.",
    "key that is large": P + b"}\x8a\x09" + b"\x01" * 9 + b"K\x01s.",
    "items for a number": P + b"K\x01(K\x01K\x02u.",
    "build of a list": P + b"]}b.",
    "name without an end": P + b"cos",
    "name of 2000 characters": P + b"c" + b"a" * 2000 + b"\nb\n.",
    "a million lists": P + b"(" + b"]" * 1_000_000 + b"l.",
    "a million sets": b"\x80\x04(" + b"\x8f" * 1_000_000 + b"l.",
    "a million dictionaries": P + b"(" + b"}" * 1_000_000 + b"l.",
    "ever deeper tuples": P + b"N" + b"\x85" * 1_000_000 + b".",
    "a dtype of numpy with parts": P
    + b"cnumpy\ndtype\nX\x02\x00\x00\x00V8K\x00K\x01\x87R(K\x03X\x01\x00\x00\x00|}}}t b.",
    "a tensor outside of its storage": P
    + b"ctorch._utils\n_rebuild_tensor_v2\n(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x03K\x05\x85K\x01\x85\x89Nt R.",
    "set of large integers": b"\x80\x04\x8f(\x8a\x09" + b"\x01" * 9 + b"\x90.",
}

#: Those of them that call something, or take a name from a registry, and that scanners of pickles
#: let through: picklescan 1.0.5 all but the last, fickling 0.1.12 the last.
UNSEEN = (
    "calls builtins.__import__",
    "calls importlib.import_module",
    "calls code.interact",
    "calls functools.reduce",
    "calls types.FunctionType",
    "calls marshal.loads",
    "calls imaplib.IMAP4",
    "calls multiprocessing.util.spawnv_passfds",
    "newobj_ex",
    "ext1",
    "ext2",
    "ext4",
    "stacked",
)


def test_what_scanners_let_through_is_in_the_corpus() -> None:
    assert len(UNSEEN) >= 10 and set(UNSEEN) <= PICKLES.keys()
    assert len(PICKLES) + len(ZIPS) >= 60


@pytest.mark.promise
@pytest.mark.parametrize("raw", PICKLES.values(), ids=PICKLES.keys())
def test_a_hostile_pickle_is_refused_with_file_and_offset(raw: bytes) -> None:
    began_s = time.process_time()
    with pytest.raises(ForeignFormatError, match=r"evil\.pt, byte \d+ of its pickle") as error:
        interpret(raw, "evil.pt")
    assert error.value.fields["path"] == "evil.pt"
    assert 0 <= error.value.fields["offset"] <= len(raw)
    assert time.process_time() - began_s < 10


def test_a_list_that_contains_itself_becomes_no_state(tmp_path: Path) -> None:
    zipped = zip_of({"a/data.pkl": P + b"}X\x01\x00\x00\x00a]q\x00h\x00as."})
    (tmp_path / "a.pt").write_bytes(zipped)
    with holdfast.open(tmp_path / "a.pt") as opened:
        assert not opened.leaves and not opened.values


def test_values_that_double_become_no_state(tmp_path: Path) -> None:
    doubled = b"]" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(60))
    (tmp_path / "a.pt").write_bytes(
        zip_of({"a/data.pkl": P + b"}X\x01\x00\x00\x00a" + doubled + b"s."})
    )
    try:
        with holdfast.open(tmp_path / "a.pt") as opened:
            assert not opened.values
    except ForeignFormatError:
        pass


def zip_of(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        for name, data in entries.items():
            made.writestr(zipfile.ZipInfo(name), data, method)
    return file.getvalue()


GOOD = zip_of({"a/data.pkl": P + b"}.", "a/data/0": b"1234", "a/version": b"3"})


def changed(find: bytes, put: bytes, count: int = -1) -> bytes:
    assert find in GOOD and len(find) == len(put)
    return GOOD.replace(find, put, count)


CENTRAL = GOOD.index(b"PK\1\2")
END = GOOD.index(b"PK\5\6")


def at(offset: int, data: bytes) -> bytes:
    return GOOD[:offset] + data + GOOD[offset + len(data) :]


ZIPS: dict[str, bytes] = {
    "compressed": zip_of({"a/data.pkl": b"x" * 1000}, zipfile.ZIP_DEFLATED),
    "a bomb": zip_of({"a/data.pkl": bytes(10_000_000)}, zipfile.ZIP_DEFLATED),
    "encrypted by its flags": at(CENTRAL + 8, b"\x01\x00"),
    "hidden by its flags": at(CENTRAL + 8, b"\x00\x20"),
    "a wrong checksum": at(CENTRAL + 16, b"\0\0\0\0"),
    "a changed pickle": changed(P + b"}.", P + b"]."),
    "called otherwise where it lies": GOOD.replace(b"a/data.pkl", b"b/data.pkl", 1),
    "two of a name": zip_of({"a/data.pkl": P + b"}.", "a/data.pkm": P + b"}."}).replace(
        b"pkm", b"pkl"
    ),
    "lies outside": at(CENTRAL + 42, b"\xff\xff\xff\x00"),
    "other sizes": at(CENTRAL + 24, b"\xff\x00\x00\x00"),
    "overlapping": at(GOOD.index(b"PK\1\2", CENTRAL + 4) + 42, b"\0\0\0\0"),
    "more entries than there are": at(END + 8, b"\x09\x00\x09\x00"),
    "a comment": GOOD[:-2] + b"\x02\x00hi",
    "something behind it": GOOD + b"junk",
    "cut short": GOOD[:-7],
    "no zip": b"PK\3\4" + b"\0" * 100,
    "a name that leads out": zip_of({"a/../data.pkl": b"x"}),
    "an absolute name": zip_of({"/a/data.pkl": b"x"}),
    "two pickles": zip_of({"a/data.pkl": P + b"}.", "b/data.pkl": P + b"}."}),
    "a program": zip_of({"a/data.pkl": P + b"}.", "a/constants.pkl": P + b"}."}),
    "big-endian": zip_of({"a/data.pkl": P + b"}.", "a/byteorder": b"big"}),
}


@pytest.mark.promise
@pytest.mark.parametrize("raw", ZIPS.values(), ids=ZIPS.keys())
def test_a_hostile_zip_is_refused_with_file_and_offset(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "a.pt"
    file.write_bytes(raw)
    with pytest.raises(ForeignFormatError) as error:
        holdfast.open(file)
    assert str(file) in str(error.value) and "offset" in error.value.fields


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "", 3])
def test_an_index_that_leads_out_is_refused(tmp_path: Path, name: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ForeignFormatError, match="not below its directory"):
        holdfast.open(tmp_path)


def test_a_link_to_a_device_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").symlink_to("/dev/zero")
    with pytest.raises(ForeignFormatError, match="no plain file"):
        SourceFiles(tmp_path).size_bytes("m.safetensors")


@pytest.mark.promise
def test_nothing_is_imported_opened_started_or_connected(tmp_path: Path) -> None:
    """All pickles in one process: an audit hook ends it at any act, and memory stays bounded."""
    (tmp_path / "raws.json").write_text(json.dumps([raw.hex() for raw in PICKLES.values()]))
    script = """
import json, os, sys
from holdfast.errors import ForeignFormatError
from holdfast.interop.pickles import interpret
raws = [bytes.fromhex(one) for one in json.load(open(sys.argv[1]))]
acts = ("import", "open", "os.", "subprocess.", "socket.", "exec", "compile", "ctypes.", "pickle.")
def hook(event, arguments):
    if event.startswith(acts):
        os._exit(99)
sys.addaudithook(hook)
for raw in raws:
    try:
        interpret(raw, "evil")
    except ForeignFormatError:
        continue
    os._exit(98)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "raws.json")],
        env={"PYTHONPATH": SOURCE},
        timeout=100,
    )
    assert done.returncode == 0
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
