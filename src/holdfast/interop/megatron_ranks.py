"""Reads the older form of Megatron's checkpoints: a file ``model_optim_rng.pt`` for each rank.

A file has the shards of one tensor-parallel rank and one stage of a pipeline, and the arguments of
the run. It does not say how weights are joined: that is known of the modules of Megatron-Core's
dense transformers, by their names, and checked against the sizes that the arguments give. What is
not known for certain is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from holdfast.errors import ForeignFormatError, HoldfastError, UsageError
from holdfast.interop.arrange import MODEL, Orders, is_extra
from holdfast.interop.deepspeed_files import TagFiles
from holdfast.interop.foreign import ForeignCheckpoint, ForeignLeaf
from holdfast.interop.master_copies import NARROW, is_master_of
from holdfast.interop.pickle_records import Record, shown
from holdfast.interop.rank_copies import RankCopies
from holdfast.interop.source_files import SourceFiles
from holdfast.interop.state_files import Gathered, checkpoint_of, is_step, step_of
from holdfast.interop.tensor_ranks import HALVES, REPLICATED, ROW, TensorRanks

#: The file of a rank: of tensor parallelism, and of a pipeline's stages or of experts, or both.
RANK_FILE = re.compile(
    r"mp_rank_([0-9]{1,6})(?:_([0-9]{1,6}))?(?:_([0-9]{1,6}))?/model_optim_rng\.pt"
)
#: What a distributed optimizer leaves beside it.
_BUCKETS = "distrib_optim.pt"
_LAYER = re.compile(r"(decoder|encoder)\.layers\.([0-9]{1,6})\.(.+)", re.DOTALL)
_MODEL_KEY = re.compile(r"model([0-9]{0,3})")
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
#: How the shards of the modules are joined: by rows, by columns, or the same on all ranks.
_BY_ROWS = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\.(?:weight|bias)"
    r"|[a-z]+\.layers\.[0-9]+\.(?:self_attention\.linear_qkv|mlp\.linear_fc1)\.(?:weight|bias)"
)
_BY_COLUMNS = re.compile(
    r"[a-z]+\.layers\.[0-9]+\.(?:self_attention\.linear_proj|mlp\.linear_fc2)\.weight"
)
_WHOLE = re.compile(
    r"embedding\.position_embeddings\.weight"
    r"|[a-z]+\.final_(?:layernorm|norm)\.(?:weight|bias)"
    r"|[a-z]+\.layers\.[0-9]+\.(?:(?:input|pre_mlp)_layernorm\.(?:weight|bias)"
    r"|(?:self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(?:weight|bias)"
    r"|self_attention\.[qk]_layernorm\.(?:weight|bias)"
    r"|(?:self_attention\.linear_proj|mlp\.linear_fc2)\.bias)"
)
#: The orders of queries, keys and values in one weight: one of before is another.
_VERSIONS = (2.0, 3.0)
#: What ranks have of one save alike.
_ALIKE = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "hidden_size"),
    *("ffn_hidden_size", "num_attention_heads", "num_query_groups", "swiglu", "params_dtype"),
)
#: What arguments each rank has of its own: ``rank``, ``local_rank``, devices.
_OF_A_RANK = re.compile("rank|device|host")
#: What a file has of each rank by itself, or is taken apart.
_TAKEN = frozenset(("optimizer", "rng_state", "checkpoint_version"))

Place = tuple[int, int]
Tree = dict[str, Any]


def has_rank_files(names: Sequence[str]) -> bool:
    """True for the names in a directory of one step, ``iter_0000020``."""
    return any(map(RANK_FILE.fullmatch, names))


def step_in_ranks(files: SourceFiles) -> int | None:
    """The step that the first file says it is of."""
    name = next(filter(RANK_FILE.fullmatch, files.names()))
    step = TagFiles(files, "").value(name).get("iteration")
    return step if is_step(step) else None


def read_rank_files(files: SourceFiles, orders: Orders) -> ForeignCheckpoint:
    """Read the files of all ranks of one step."""
    try:
        gathered, step = _RankFiles(files).read()
    except HoldfastError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        where = str(files.path)
        raise ForeignFormatError(
            f"{where} is not in the form of Megatron's ranks: {error!s:.200}", path=where, offset=0
        ) from None
    return checkpoint_of("megatron", files, step_of(files, step), gathered, orders)


class _Unfit(ValueError):
    """Why the optimizer is left out: which parameter a moment is of is not certain."""


class _RankFiles:
    def __init__(self, files: SourceFiles) -> None:
        self._source, self._files = files, TagFiles(files, "")
        self._copies = RankCopies(files)
        self._notes: list[str] = []
        numbered = self._files.numbered(RANK_FILE)
        self._first = numbered[min(numbered)]
        self._args = self._arguments(self._first)
        self._tensor = self._size("tensor_model_parallel_size", None)
        self._stages = self._size("pipeline_model_parallel_size", None)
        self._names = self._placed(numbered)
        self._trees = {place: self._files.tree(name) for place, name in self._names.items()}
        self._refuse_mixed()
        #: The names that the parameters of a rank have in the whole model, in their order.
        self._local: dict[Place, dict[str, ForeignLeaf]] = {}

    # ── the ranks ────────────────────────────────────────────────────────────────────────

    def _arguments(self, name: str) -> Mapping[str, Any]:
        args = self._files.value(name).get("args")
        if not isinstance(args, Record):
            raise UsageError(
                f"{self._files.where(name)} has no args: nothing says how many ranks wrote it and "
                "how their weights are joined. Load it with Megatron and save it as torch_dist"
            )
        return args.fields

    def _size(self, key: str, default: int | None) -> int:
        size = self._args.get(key, default)
        if type(size) is not int or not 0 < size < 1 << 20:
            raise self._files.error(self._first, f"its args have {key} {shown(size)}")
        return size

    def _placed(self, numbered: Mapping[tuple[int, ...], str]) -> dict[Place, str]:
        """The file of each tensor-parallel rank and stage, in their order."""
        if self._size("expert_model_parallel_size", 1) > 1 or self._args.get("num_experts"):
            raise UsageError(
                f"{self._files.where(self._first)} is of a model with experts, whose ranks' files "
                "can't be joined: convert it to torch_dist with Megatron's own tools "
                "(--ckpt-convert-format torch_dist)"
            )
        found: dict[Place, str] = {}
        for rank in range(self._tensor):
            for stage in range(self._stages):
                numbers = (rank, stage if self._stages > 1 else -1, -1)
                if numbers not in numbered:
                    end = f"_{stage:03d}" if self._stages > 1 else ""
                    raise self._files.missing(
                        f"mp_rank_{rank:02d}{end}/model_optim_rng.pt",
                        f"the files of {self._tensor} tensor-parallel ranks and {self._stages} "
                        "stages",
                    )
                found[rank, stage] = numbered[numbers]
        if others := sorted({*numbered.values()} - {*found.values()}):
            raise self._files.error(
                others[0],
                f"{self._tensor} tensor-parallel ranks and {self._stages} stages wrote this "
                "checkpoint; the file is of another one",
            )
        return found

    def _refuse_mixed(self) -> None:
        first = self._files.value(self._first)
        version = first.get("checkpoint_version")
        if version not in _VERSIONS:
            raise UsageError(
                f"{self._files.where(self._first)} has the checkpoint_version {shown(version)}; "
                "queries, keys and values have another order before 2.0, which can't be read"
            )
        for name in self._names.values():
            args, value = self._arguments(name), self._files.value(name)
            pairs = [(key, self._args.get(key), args.get(key)) for key in _ALIKE]
            for key in ("iteration", "checkpoint_version"):
                pairs.append((key, first.get(key), value.get(key)))
            for key, one, other in pairs:
                if self._copies.differing([{key: one}, {key: other}]):
                    raise self._files.error(
                        name, f"its {key} is {shown(other)}, that of {self._first} {shown(one)}"
                    )
        self._refuse_misplaced()

    def _refuse_misplaced(self) -> None:
        """Holds the rank that wrote a file against its place: tensor-parallel ranks follow each
        other, and stages are in the order of their ranks. Megatron's converter writes all files in
        one process: then it is only seen that none is another's copy.
        """
        writers = {name: self._arguments(name).get("rank") for name in self._names.values()}
        if len(writers) > 1 and len({*writers.values()}) == 1:
            self._refuse_copies()
            return
        before = dict[int, int]()
        for (rank, stage), name in self._names.items():
            writer = writers[name]
            if type(writer) is not int:
                continue
            if writer % self._tensor != rank or writer <= before.get(rank, -1):
                raise self._files.error(
                    name,
                    f"its args are those of rank {writer}, which can't be tensor-parallel rank "
                    f"{rank} of stage {stage}: files were renamed, or put in each other's place",
                )
            before[rank] = writer

    def _refuse_copies(self) -> None:
        found: dict[tuple[tuple[str, int, int], ...], str] = {}
        for name in self._names.values():
            opened = self._files.open(name)
            stored = sorted((key, one.size_bytes, one.crc) for key, one in opened.storages.items())
            other = found.setdefault(tuple(stored), name)
            if opened.has_sums and other != name:
                raise self._files.error(name, f"it has the tensors of {other}: it is a copy of it")

    # ── the model ────────────────────────────────────────────────────────────────────────

    def read(self) -> tuple[Gathered, Any]:
        extra: dict[str, dict[str, Any]] = {}
        for rank in range(self._tensor):
            self._number_layers(rank, extra)
        first = self._trees[0, 0]
        model, tied = self._stages_joined(self._local)
        gathered = Gathered(notes=self._notes)
        tree = gathered.tree
        tree[MODEL] = {name: self._joined(name, leaves, tied) for name, leaves in model.items()}
        objects: dict[str, dict[str, Any]] = {}
        for name, values in extra.items():  # of most modules None, which they want to get back
            if self._copies.differing([{name: one} for one in values.values()]):
                objects[name] = values
            else:
                tree[MODEL][name] = next(iter(values.values()))
        self._take_optimizer(tree, tied)
        for (rank, stage), one in self._trees.items():
            if one.get("rng_state") is not None:
                objects.setdefault("rng_state", {})[f"{stage}.{rank}"] = one["rng_state"]
        if objects:
            tree["objects"] = objects
        rest = {
            key: value
            for key, value in first.items()
            if key not in _TAKEN and not _MODEL_KEY.fullmatch(key)
        }
        every = [{k: v for k, v in one.items() if k in rest} for one in self._trees.values()]
        for one in every:  # each with the number of its rank
            args = one.pop("args").fields
            one |= {f"args.{k}": v for k, v in args.items() if not _OF_A_RANK.search(str(k))}
        self._notes += [
            f"{key} is not the same on all ranks: that of {self._first} is taken"
            for key in self._copies.differing(every)
        ]
        self._notes += [
            f"{key} of {self._first} is left out: what else is read is called so"
            for key in sorted(rest.keys() & tree.keys())
        ]
        tree |= {key: value for key, value in rest.items() if key not in tree}
        return gathered, first.get("iteration")

    def _chunks(self, place: Place) -> list[Tree]:
        """The parts of the model that a rank has, as virtual stages make several of it."""
        tree, name = self._trees[place], self._names[place]
        keys = [key for key in tree if type(key) is str and _MODEL_KEY.fullmatch(key)]
        expected = [MODEL] if keys == [MODEL] else [f"{MODEL}{n}" for n in range(len(keys))]
        if not keys or sorted(keys) != sorted(expected):
            raise self._files.error(name, f"its parts of the model are called {keys!s:.100}")
        chunks = [tree[key] for key in expected]
        for chunk in chunks:
            for key, value in chunk.items():
                if not isinstance(value, ForeignLeaf) and not is_extra(key):
                    raise UsageError(
                        f"{self._files.where(name)}: {key!r:.100} of the model is no tensor, as "
                        "with the models before Megatron-Core, which can't be read: convert it to "
                        "torch_dist with Megatron's own tools"
                    )
        return chunks

    def _number_layers(self, rank: int, extra: dict[str, dict[str, Any]]) -> None:
        """Give the parameters of a tensor-parallel rank the names that they have in the whole.

        Each part counts its layers from 0. The parts follow each other as the pipeline runs: the
        first parts of all stages, then their second ones.
        """
        parts = {stage: self._chunks((rank, stage)) for stage in range(self._stages)}
        counts = {len(chunks) for chunks in parts.values()}
        if len(counts) > 1:
            raise self._files.error(self._names[rank, 0], "the stages have other numbers of parts")
        begin = 0
        stacks: set[str] = set()
        for number in range(counts.pop()):
            for stage, chunks in parts.items():
                named = self._named_part(chunks[number], begin, (rank, stage), extra)
                local = self._local.setdefault((rank, stage), {})
                if local.keys() & named.keys():
                    raise self._files.error(self._names[rank, stage], "a parameter is there twice")
                local |= named
                found = [one for name in chunks[number] if (one := _LAYER.fullmatch(name))]
                layers = {int(one[2]) for one in found}
                if layers != set(range(len(layers))):
                    raise self._files.error(
                        self._names[rank, stage], f"its layers are {sorted(layers)!s:.100}"
                    )
                stacks |= {one[1] for one in found}
                begin += len(layers)
        total = self._args.get("num_layers")
        if len(stacks) > 1 or begin != total:
            raise UsageError(
                f"{self._files.where(self._names[rank, 0])}: the stages have {begin} layers of "
                f"{' and '.join(sorted(stacks)) or 'nothing'}, the args {shown(total)}: only "
                "models with one stack of layers are read"
            )

    def _named_part(
        self, part: Tree, begin: int, place: Place, extra: dict[str, dict[str, Any]]
    ) -> dict[str, ForeignLeaf]:
        """The parameters of a part whose first layer is number ``begin``; ``extra`` gets what its
        modules have as extra state, by the rank.
        """
        named: dict[str, ForeignLeaf] = {}
        for key, value in part.items():
            name = key
            if matched := _LAYER.fullmatch(key):
                name = f"{matched[1]}.layers.{begin + int(matched[2])}.{matched[3]}"
            if not is_extra(key):
                named[name] = value
            else:
                extra.setdefault(name, {})[f"{place[1]}.{place[0]}"] = value
        return named

    def _stages_joined(
        self, local: Mapping[Place, Mapping[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """What the tensor-parallel ranks have under each name, of whichever stage has it; and what
        the last stage has of the embedding of the first, which is one weight.
        """
        found: dict[str, list[Any]] = {}
        tied: dict[str, list[Any]] = {}
        for stage in range(self._stages):
            some = [local[rank, stage] for rank in range(self._tensor)]
            for name in some[0]:
                if any(name not in one for one in some):
                    self._refuse(name, "not all tensor-parallel ranks have it")
                values = [one[name] for one in some]
                if self._is_tied(name):
                    tied[_EMBEDDING] = values
                elif name in found:
                    self._refuse(name, "two stages have it")
                else:
                    found[name] = values
            if extra := sorted({key for one in some for key in one} - some[0].keys()):
                self._refuse(extra[0], "not all tensor-parallel ranks have it")
        if tied and _EMBEDDING not in found:
            self._refuse(_OUTPUT, "it is that of the embedding, which no stage has")
        return found, tied

    def _joined(
        self, name: str, leaves: Sequence[Any], tied: Mapping[str, Sequence[Any]]
    ) -> ForeignLeaf:
        """The whole of what the tensor-parallel ranks have of a parameter, or of a moment of it."""
        whole = self._one(name, leaves)
        if name not in tied:
            return whole
        other = self._one(name, tied[name])
        if (whole.dtype, whole.shape) != (other.dtype, other.shape):
            self._refuse(name, f"the last stage has it as {other.dtype} {other.shape}")
        copies = (*whole.copies, *other.parts, *other.copies)
        return ForeignLeaf(whole.dtype, whole.shape, whole.parts, copies)

    def _one(self, name: str, leaves: Sequence[Any]) -> ForeignLeaf:
        if len(leaves) == 1:
            leaf: ForeignLeaf = leaves[0]
            return leaf
        shapes = {leaf.shape if isinstance(leaf, ForeignLeaf) else None for leaf in leaves}
        if shapes == {()}:
            info = {REPLICATED: [f"^{re.escape(name)}$"]}
        else:
            info = self._rule(name, [leaf.shape for leaf in leaves])
            if len(shapes) > 1 and not info[REPLICATED]:
                self._refuse(name, f"its shards have the shapes {[*shapes]}, and should be equal")
        where = self._files.where(self._first)
        return TensorRanks(info, self._tensor, where).join_leaves(name, leaves)

    def _rule(self, name: str, shapes: Sequence[tuple[int, ...]]) -> dict[str, list[str]]:
        """How the shards of a parameter are joined, in the form of DeepSpeed's lists of names."""
        rule: dict[str, list[str]] = {REPLICATED: []}
        this = [f"^{re.escape(name)}$"]
        if _WHOLE.fullmatch(name):
            rule[REPLICATED] = this
        elif _BY_COLUMNS.fullmatch(name):
            rule[ROW] = this
        elif not _BY_ROWS.fullmatch(name):
            self._refuse(
                name,
                "along which dimension is not known of this module. Convert it to torch_dist with "
                "Megatron's own tools (--ckpt-convert-format torch_dist)",
            )
        rows = sum(shape[0] for shape in shapes)
        if ".linear_qkv." in name and not rule[REPLICATED]:
            self._require_rows(name, rows, self._heads_rows())
        if ".linear_fc1." in name and not rule[REPLICATED]:
            inner = self._size("ffn_hidden_size", None)
            self._require_rows(name, rows, 2 * inner if self._is_gated() else inner)
            if self._is_gated():
                rule[HALVES] = this
        return rule

    def _is_gated(self) -> bool:
        gated = [self._args.get(key, False) for key in ("swiglu", "quick_geglu")]
        if any(type(one) is not bool for one in gated):
            raise self._files.error(self._first, "its args do not say whether units are gated")
        return any(gated)

    def _heads_rows(self) -> int:
        """The rows of queries, keys and values: each rank has whole groups of them."""
        heads = self._size("num_attention_heads", None)
        groups = heads
        if self._args.get("group_query_attention"):
            groups = self._size("num_query_groups", None)
        width = self._args.get("kv_channels")
        width = self._size("hidden_size", None) // heads if width is None else width
        if groups % self._tensor:
            self._refuse(
                "linear_qkv",
                f"{groups} groups of keys and values are not cut evenly over the ranks",
            )
        return (heads + 2 * groups) * width

    def _require_rows(self, name: str, rows: int, expected: int) -> None:
        if rows != expected:
            self._refuse(
                name, f"the ranks have {rows} rows of it together, the args say {expected}"
            )

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise UsageError(
            f"{self._files.where(self._first)}: {name!r:.200} of {self._tensor} tensor-parallel "
            f"ranks and {self._stages} stages can't be joined: {why}",
            leaf=name[:200],
        )

    # ── the optimizer ────────────────────────────────────────────────────────────────────

    def _take_optimizer(self, tree: Tree, tied: Mapping[str, Sequence[Any]]) -> None:
        try:
            found = self._optimizer()
        except _Unfit as error:
            masters = "" if self._args.get("params_dtype") is None else self._narrow_note()
            self._notes.append(f"the optimizer is left out: {error}{masters}")
            return
        if found is None:
            return
        state, groups, beside = found
        moments: dict[str, Any] = {}
        kinds = sorted({kind for some in state.values() for one in some.values() for kind in one})
        for kind in kinds:
            local = {
                place: {name: one[kind] for name, one in some.items() if kind in one}
                for place, some in state.items()
            }
            joined, again = self._stages_joined(local)
            for name, leaves in joined.items():
                moments.setdefault(name, {})[kind] = self._joined(name, leaves, again)
        tree["optimizer"] = {"state": moments, "param_groups": groups}
        if beside:
            tree["optimizer_common"] = beside

    def _narrow_note(self) -> str:
        narrow = any(
            leaf.dtype in NARROW for some in self._local.values() for leaf in some.values()
        )
        return "; parameters are the copies of 16 bits that the model has" if narrow else ""

    def _optimizer(
        self,
    ) -> tuple[dict[Place, dict[str, Tree]], list[dict[str, Any]], Tree] | None:
        """The moments of each rank by the names of the whole model, and the groups of all."""
        state: dict[Place, dict[str, Tree]] = {}
        groups: dict[float, dict[str, Any]] = {}
        beside: Tree = {}
        there = {place: tree.get("optimizer") for place, tree in self._trees.items()}
        if all(one is None for one in there.values()):
            return None
        if any(name.endswith(f"/{_BUCKETS}") for name in self._files.names):
            raise _Unfit(
                f"{_BUCKETS} has its state in buckets (--use-distributed-optimizer), of which it "
                "is not stored which parameter lies where. Convert it to torch_dist with "
                "Megatron's own tools (--ckpt-convert-format torch_dist)"
            )
        first: list[dict[str, Any]] | None = None
        for place, saved in there.items():
            inner = saved.get("optimizer", saved) if isinstance(saved, dict) else None
            if not isinstance(inner, dict) or not {"state", "param_groups"} <= inner.keys():
                raise _Unfit(f"that of {self._names[place]} has no state and groups")
            members = self._members(place, inner["param_groups"])
            masters = saved.get("fp32_from_fp16_params") if inner is not saved else None
            state[place] = self._moments(place, inner, members, masters)
            options = [
                {k: v for k, v in group.items() if k != "params"} for group in inner["param_groups"]
            ]
            # Stages may meet parameters of the two groups in another order, and number them so.
            ordered = sorted(options, key=lambda one: float(one["wd_mult"]))
            first = first or ordered
            if len(options) != len(first):
                raise _Unfit(f"{self._names[place]} has other groups than {self._first}")
            if self._copies.differing([{"groups": first}, {"groups": ordered}]):
                raise self._files.error(
                    self._names[place],
                    f"its hyperparameters are not those of {self._first}: of another save",
                )
            for group, names in zip(options, members, strict=True):
                one = groups.setdefault(float(group["wd_mult"]), {**group, "params": {}})
                one["params"] |= dict.fromkeys(n for n in names if not self._is_tied(n))
            if inner is not saved and place == (0, 0):
                beside = {
                    k: v
                    for k, v in saved.items()
                    if k not in ("optimizer", "fp32_from_fp16_params") and v is not None
                }
        listed = [{**one, "params": list(one["params"])} for one in groups.values()]
        return state, listed, beside

    def _is_tied(self, name: str) -> bool:
        """True for what the last stage has of the embedding of the first."""
        is_tied = self._args.get("untie_embeddings_and_output_weights") is not True
        return is_tied and name == _OUTPUT and self._stages > 1

    def _members(self, place: Place, groups: Any) -> list[list[str]]:
        """The names of the parameters of each group, in their order: Megatron gives no weight decay
        to biases and to what has one dimension, and numbers the others as the model has them.
        """
        file = self._names[place]
        if not isinstance(groups, list) or not all(isinstance(one, dict) for one in groups):
            raise _Unfit(f"{file} has no groups")
        members: dict[float, list[str]] = {0.0: [], 1.0: []}
        keeps_decay = self._args.get("apply_wd_to_qk_layernorm") is True
        for name, leaf in self._local[place].items():
            is_spared = keeps_decay and re.search(r"\.[qk]_layernorm\.", name)
            is_bare = (len(leaf.shape) == 1 or name.endswith(".bias")) and not is_spared
            members[0.0 if is_bare else 1.0].append(name)
        found, taken, at = [], set(), 0
        for group in groups:
            decay = group.get("wd_mult")
            if decay not in members or decay in taken:
                raise _Unfit(
                    f"{file} has groups that are not those of weight decay alone: which parameter "
                    "is in which is not stored"
                )
            taken.add(decay)
            names = members[decay]
            if group.get("params") != [*range(at, at + len(names))]:
                raise _Unfit(
                    f"a group in {file} has not the {len(names)} parameters that Megatron puts "
                    "into it"
                )
            at += len(names)
            found.append(names)
        if at != len(self._local[place]):
            raise _Unfit(
                f"{file} has {at} parameters in its groups, {len(self._local[place])} in all"
            )
        return found

    def _moments(
        self, place: Place, inner: Tree, members: list[list[str]], masters: Any
    ) -> dict[str, Tree]:
        file, local = self._names[place], self._local[place]
        found: dict[str, Tree] = {name: {} for names in members for name in names}
        for number, name in enumerate(name for names in members for name in names):
            kinds = inner["state"].get(number) or {}
            for kind, value in kinds.items():
                is_leaf = isinstance(value, ForeignLeaf)
                if not is_leaf or (value.shape != local[name].shape and value.shape != ()):
                    raise _Unfit(f"{kind!r:.60} of parameter {number} in {file} is not that of it")
                found[name][kind] = value
        if inner["state"].keys() - set(range(len(found))):
            raise _Unfit(f"{file} has state of parameters that are in no group")
        if masters is None:
            return found
        narrow = [[n for n in names if local[n].dtype in NARROW] for names in members]
        if not isinstance(masters, list) or [*map(len, masters)] != [*map(len, narrow)]:
            raise _Unfit(f"the masters in {file} are not those of its groups")
        for names, some in zip(narrow, masters, strict=True):
            for name, master in zip(names, some, strict=True):
                if not isinstance(master, ForeignLeaf) or not is_master_of(
                    self._source, master, local[name]
                ):
                    raise _Unfit(
                        f"a master in {file} is not that of {name!r:.200}: its groups have another "
                        "order than Megatron's"
                    )
                found[name]["fp32_param"] = master
        return found
