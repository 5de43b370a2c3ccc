"""Write docs/reference/ from the signatures and docstrings of the public names: `make docs`.

The pages are checked in, and tests/docs/test_reference.py fails when they are not what this prints.
A docstring gives a parameter's text as "``name``: text", up to the next such name or the end of the
paragraph; else the clause that names the parameter is its text.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import holdfast
from holdfast import errors, events
from holdfast.restore.reading.reader import CheckpointReader

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Generated from the docstrings of src/holdfast by `make docs`: change them there. -->"
#: Methods that other modules of Holdfast call and users do not.
INTERNAL = {
    "CheckpointReader": {"checkpoint"},
    "SaveHandle": {"reach", "fail", "not_protected", "renew", "move_to"},
    "ResumableSampler": {"watch_generators", "problems_with"},
    "Rng": {"loads", "derive"},
    "Every": {"is_due_by_steps", "is_due_by_time"},
    "Keep": {"decide"},
    "Shard": {"of"},
    "FlatShard": {"of"},
    "FlatBuffer": {"of"},
    "HybridOptimizer": {"make_state"},
}
#: Classes that calls return: users read their attributes and do not construct them.
RETURNED = {"SaveHandle", "Restored", "RestorePlan", "CheckpointReader"}
UNITS = {
    "_s": "seconds",
    "_bytes": "bytes",
    "_elements": "elements",
    "minutes": "minutes",
    "steps": "steps",
    "step": "step number",
}
#: One call of each public name. A test parses it and binds it to the signature.
USAGE = {
    "Checkpointer": "holdfast.Checkpointer('runs/gpt', {'model': model, 'optimizer': optimizer})",
    "Event": "holdfast.subscribe(lambda event, time_s: print(event.step, event.rank))",
    "Every": "holdfast.Every(steps=100, minutes=10)",
    "FlatBuffer": "holdfast.FlatBuffer([('w', (4, 8), 0, 32, 0)])",
    "FlatRange": "holdfast.FlatRange('w', (4, 8), start=0, size=32, at=0)",
    "FlatShard": "holdfast.FlatShard((4, 8), start=16)",
    "Keep": "holdfast.Keep(last=3, every=1000)",
    "RestorePlan": "holdfast.plan_restore('runs/gpt', 'dp=4,tp=2').fits",
    "Restored": "restored = checkpointer.restore()",
    "ResumableSampler": "holdfast.ResumableSampler(data, global_batch_size=64)",
    "Rng": "holdfast.Rng()",
    "SaveHandle": "checkpointer.save(step, durable=True).wait_durable()",
    "Shard": "holdfast.Shard((4, 8), offsets=(2, 0))",
    "SplitList": "holdfast.SplitList(tokens)",
    "__version__": "holdfast.__version__",
    "dcp": "holdfast.dcp.Writer('runs/gpt', step=500)",
    "declare": "holdfast.declare(tensor, holdfast.Shard((4, 8), offsets=(2, 0)))",
    "derived": "holdfast.derived(FusedAttention, ['wq.weight', 'wk.weight', 'wv.weight'])",
    "events": "holdfast.events.CheckpointPublished",
    "load": "holdfast.load('runs/gpt', {'model': model}, only=['model.*'])",
    "loader": "holdfast.loader(data, sampler, num_workers=2)",
    "loggers": "holdfast.loggers.to_tensorboard(writer)",
    "loggers.to_mlflow": "loggers.to_mlflow(client, run_id)",
    "loggers.to_tensorboard": "loggers.to_tensorboard(writer)",
    "loggers.to_wandb": "loggers.to_wandb(run)",
    "offload": "holdfast.offload.HybridAdamW(model.parameters(), lr=3e-4)",
    "open": "holdfast.open('runs/gpt')",
    "plan_restore": "holdfast.plan_restore('runs/gpt', 'dp=4,tp=2')",
    "register_enum": "holdfast.register_enum(Phase)",
    "register_tensor": "holdfast.register_tensor(QuantizedTensor, make=make_zeros)",
    "register_value": "holdfast.register_value(Projector, vars, lambda data: Projector(**data))",
    "rules": "holdfast.rules.Rules([('model.*', holdfast.rules.replicated)])",
    "save": "holdfast.save('runs/gpt', {'model': model}, step=100)",
    "subscribe": "holdfast.subscribe(sink)",
    "CheckpointReader": "holdfast.open('runs/gpt').leaves",
    "rules.MEGATRON": "rules.llama(config, names=rules.MEGATRON, qkv='grouped', gate_up='fused')",
    "rules.META": "rules.llama(config, names={**rules.META, 'norm': 'final_norm.weight'})",
    "rules.NANOGPT": "rules.gpt2(config, names=rules.NANOGPT)",
    "rules.Kind": "('experts.*', rules.shard(0, 'ep'), rules.unique)",
    "rules.Local": "rules.Rules([('w', rules.shard(0, 'tp'))], {'tp': 2}).local('w', (4, 8), 1)",
    "rules.LocalPatch": "rules.local_patches(seen, held)[0].box",
    "rules.Patch": "rules.Rules([('w', rules.rename('v'))]).see('w', (4, 8)).patches[0].box",
    "rules.Rules": "rules.Rules([('w', rules.shard(0, 'tp'))], {'tp': 2})",
    "rules.Seen": "rules.Rules([('w', rules.rename('v'))]).see('w', (4, 8))",
    "rules.Table": "rules.Rules([('w', rules.rename('v'))]).inverse({'w': (4, 8)})",
    "rules.averaged": "('model.*.momentum', rules.averaged)",
    "rules.cast": "('model.*', rules.cast('bfloat16'))",
    "rules.flat": "('w', rules.flat((4, 8), 'dp'))",
    "rules.fused": "('qkv', rules.fused(0, [8, 4, 4], ['q', 'k', 'v'], over='tp'))",
    "rules.gpt2": "rules.Rules(rules.gpt2(config, tp='tp'), {'tp': 2})",
    "rules.llama": "rules.Rules(rules.llama(config, tp='tp'), {'tp': 2})",
    "rules.local_padding": "rules.local_padding(seen, held)",
    "rules.local_patches": "rules.local_patches(seen, held)",
    "rules.mixtral": "rules.Rules(rules.mixtral(config, ep='ep'), {'ep': 4})",
    "rules.optional": "rules.Rules([('head', rules.tied('embedding'), rules.optional)])",
    "rules.padded": "('embedding', rules.padded(0, 50257))",
    "rules.paired": "('layers.{i}.q', rules.paired(0, heads=32))",
    "rules.part_of": "('q', rules.part_of('qkv', 0, at=0, whole=96))",
    "rules.rename": "('layers.{i}.w', rules.rename('model.layers.{i}.weight'))",
    "rules.replicated": "('norm', rules.replicated)",
    "rules.shard": "('w', rules.shard(0, 'tp', units=8))",
    "rules.stack": "('layers.{n}.w', rules.stack('layers.w', 0, count=12))",
    "rules.tied": "('head', rules.tied('embedding'))",
    "rules.transpose": "('w', rules.transpose(1, 0))",
    "rules.turned": "rules.turned({'w': seen})",
    "rules.unique": "('experts.{e}', rules.unique)",
    "rules.unstack": "('experts', rules.unstack(0, 'experts.{n}'))",
    "dcp.Reader": "dcp.Reader('runs/gpt', step=500)",
    "dcp.Stager": "dcp.Stager(writer)",
    "dcp.Writer": "dcp.Writer('runs/gpt', step=500)",
    "dcp.async_save": "dcp.async_save(state_dict, checkpoint_id='runs/gpt/step-500')",
    "dcp.load": "dcp.load(state_dict, checkpoint_id='runs/gpt')",
    "dcp.save": "dcp.save(state_dict, checkpoint_id='runs/gpt/step-500')",
    "offload.HybridAdamW": "offload.HybridAdamW(model.parameters(), lr=3e-4, device_share=0.2)",
    "offload.HybridOptimizer": "offload.HybridOptimizer(params, {'lr': 1e-4}, kernel, options)",
    "offload.HybridSGD": "offload.HybridSGD(model.parameters(), lr=0.1, momentum=0.9)",
    "offload.Kernel": "kernel.update(group, tensors, is_first=False)",
    "offload.Options": "offload.Options(device_share=0.0, threads=4)",
    "offload.Tensors": "tensors.states['exp_avg']",
}
ERRORS = {
    name
    for name, one in vars(errors).items()
    if isinstance(one, type) and issubclass(one, errors.HoldfastError)
}
_ERROR_NAME = re.compile(rf"(?<![\w`.])({'|'.join(sorted(ERRORS))})\b")
_SENTENCE = re.compile(r"(?:(?<=\.)|(?<=\.\))) (?=[A-Z`])")
_TYPE_NAME = re.compile(r"(?<![\w.\"'])[A-Z]\w+")

PAGES = {
    "holdfast.md": (
        "holdfast",
        "",
        "Every name of `holdfast`, found on first use: `import holdfast` alone loads no torch.",
    ),
    "rules.md": (
        "holdfast.rules",
        "rules.",
        "Every name of `holdfast.rules`, the language that says what the tensors of a training are "
        "in the checkpoint. [Changing the layout](../guides/changing-the-layout.md) and "
        "[a partition of your own](../guides/a-partition-of-your-own.md) show it at work.",
    ),
    "offload.md": (
        "holdfast.offload",
        "offload.",
        "Every name of `holdfast.offload`. "
        "The guide is "
        "[the optimizer's state in host memory](../guides/optimizer-in-host-memory.md).",
    ),
    "loggers.md": (
        "holdfast.loggers",
        "loggers.",
        "Every name of `holdfast.loggers`: what saves and restores of a rank cost, in charts of "
        "TensorBoard, Weights & Biases or MLflow. [Monitoring](../operations/monitoring.md).",
    ),
    "dcp.md": (
        "holdfast.dcp",
        "dcp.",
        "Every name of `holdfast.dcp`, for code that calls `torch.distributed.checkpoint`: see "
        "[checkpoints of other writers](../foreign-checkpoints.md).",
    ),
    "events.md": (
        "holdfast.events",
        "events.",
        "Every event that `holdfast.subscribe` hands to a sink, as `holdfast.events.NAME`. Sizes "
        "are bytes and times are seconds. Each event has the three fields of `Event` as well.",
    ),
}
HEAD = """\
# {title}

{note}

{text}

A parameter is listed with its type, its default and its unit. The words are those of the
[glossary](../glossary.md), and the errors those of [errors](../operations/errors.md).
"""


@dataclass
class Text:
    """A docstring, taken apart."""

    prose: list[str] = field(default_factory=list)
    items: dict[str, str] = field(default_factory=dict)
    raises: list[str] = field(default_factory=list)

    def of(self, name: str) -> str:
        """The text of a parameter: its own, or the first clause that names it."""
        if name in self.items:
            return self.items[name]
        clauses = (part for text in (*self.prose, *self.raises) for part in re.split(r"; ", text))
        sentences = (one for part in clauses for one in _SENTENCE.split(part))
        return next((one for one in sentences if f"``{name}``" in one), "")


def take_apart(docstring: str, names: Sequence[str]) -> Text:
    """The prose, the text of each of ``names``, and the sentences that name an error."""
    text = Text()
    for paragraph in re.split(r"\n\n+", inspect.cleandoc(docstring)):
        if paragraph.startswith("    "):
            text.prose.append("```text\n" + inspect.cleandoc(paragraph) + "\n```")
            continue
        parts = _item_mark(names).split(" ".join(paragraph.split()))
        text.prose.append(_without_errors(parts[0], text))
        for listed, said in zip(parts[1::2], parts[2::2], strict=True):
            explained = _without_errors(said, text, is_item=True).rstrip(";, ")
            text.items |= dict.fromkeys(re.findall(r"``(\w+)``", listed), explained)
    text.prose = [one for one in text.prose if one]
    return text


def _item_mark(names: Sequence[str]) -> re.Pattern[str]:
    any_of = "|".join(sorted(names)) or "(?!)"
    return re.compile(rf"(?:(?<=[.;:)] )|^)((?:``(?:{any_of})``(?:, | and ))*``(?:{any_of})``): ")


def _without_errors(text: str, into: Text, *, is_item: bool = False) -> str:
    """What begins with an error is taken out; what names one further on is there twice."""
    kept = []
    for sentence in _SENTENCE.split(text.strip()):
        is_error = bool(_ERROR_NAME.match(sentence)) or sentence.startswith("Raises ")
        if is_error or (_ERROR_NAME.search(sentence) and not is_item):
            into.raises.append(sentence)
        if not is_error:
            kept.append(sentence)
    return " ".join(kept)


def linked(text: str) -> str:
    """Markdown of a docstring's text: names as code, errors as links."""
    parts = text.replace("``", "`").split("`")
    for number in range(0, len(parts), 2):
        parts[number] = _ERROR_NAME.sub(_error_link, parts[number])
    return "`".join(parts)


def _error_link(found: re.Match[str]) -> str:
    return f"[{found[1]}](../operations/errors.md#{found[1].lower()})"


# ── types ────────────────────────────────────────────────────────────────────────────────


def annotation(given: Any) -> str:
    """A type as the source has it."""
    given = getattr(given, "__forward_arg__", given)
    text = given if isinstance(given, str) else inspect.formatannotation(given)
    return text.replace("holdfast.events.", "")


@cache
def _tree(module: str) -> ast.Module:
    source = inspect.getsourcefile(sys.modules[module])
    assert source is not None
    return ast.parse(Path(source).read_text())


def alias(module: str, name: str) -> str | None:
    """What a name of a type stands for in a module; None where it is a class or not known."""
    if module not in sys.modules or not module.startswith("holdfast"):
        return None
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.unparse(node.value)
        if isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names):
            return alias(node.module or "", name)
    return None


def aliases(module: str, types: Sequence[str]) -> dict[str, str]:
    """All aliases in these types, those that they are made of too."""
    found: dict[str, str] = {}
    waiting = [name for text in types for name in _TYPE_NAME.findall(text)]
    while waiting:
        name = waiting.pop(0)
        meaning = None if name in found else alias(module, name)
        if meaning is not None:
            found[name] = meaning
            waiting += _TYPE_NAME.findall(meaning)
    return found


def without_bounds(module: str, type_: str) -> str:
    """A type in which the names of bounded numbers are the numbers: `Seconds` is `float`."""
    for name in _TYPE_NAME.findall(type_):
        bounded = re.match(r"Annotated\[(\w+), ", alias(module, name) or "")
        if bounded:
            type_ = re.sub(rf"\b{name}\b", bounded[1], type_)
    return type_


def unit(name: str, type_: str) -> str:
    """The unit that a number's name says."""
    if not re.search(r"\b(int|float)\b", type_):
        return ""
    return next((one for end, one in UNITS.items() if _has_unit(name, end)), "")


def _has_unit(name: str, end: str) -> bool:
    return name.endswith(end) if end.startswith("_") else name == end


# ── one name ─────────────────────────────────────────────────────────────────────────────


@dataclass
class Parameter:
    """What is listed of a parameter or an attribute."""

    name: str
    type: str
    default: str | None = None
    text: str = ""

    def line(self) -> str:
        """One line of the page."""
        facts = [f"`{self.type}`"] if self.type else []
        facts += [] if self.default is None else [f"default `{self.default}`"]
        facts += [unit(self.name, self.type)] if unit(self.name, self.type) else []
        text = linked(self.text[:1].upper() + self.text[1:])
        if text and not text.endswith((".", "`", ":")):
            text += "."
        return f"* `{self.name}`: " + ", ".join(facts) + (f". {text}" if text else ".")


def is_event(one: object) -> bool:
    """Whether it is a class of events."""
    return isinstance(one, type) and issubclass(one, events.Event)


def docstring_of(one: Any) -> str:
    """Its own docstring: a class of the standard library's making has one that says nothing."""
    own = one.__dict__.get("__doc__") if isinstance(one, type) else one.__doc__
    return "" if not own or (isinstance(one, type) and own.startswith(one.__name__ + "(")) else own


def attribute_texts(one: type) -> dict[str, str]:
    """The strings below the fields of a class, by field."""
    found: dict[str, str] = {}
    for node in _tree(one.__module__).body:
        if isinstance(node, ast.ClassDef) and node.name == one.__name__:
            for before, after in zip(node.body, node.body[1:], strict=False):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(before, ast.AnnAssign) and is_text:
                    found[ast.unparse(before.target)] = " ".join(str(after.value.value).split())
    return found


def parameters(one: Any) -> list[Parameter]:
    """The parameters of a call, or the fields of a class that is given by its fields."""
    if is_event(one):
        own = [name for name in one.__struct_fields__ if name in one.__annotations__]
        values = one.__struct_defaults__
        ends = one.__struct_fields__[len(one.__struct_fields__) - len(values) :]
        defaults = dict(zip(ends, values, strict=True))
        return [
            Parameter(name, annotation(one.__annotations__[name]), _shown(defaults.get(name)))
            for name in own
        ]
    if isinstance(one, type) and (getattr(one, "_is_protocol", False) or hasattr(one, "__total__")):
        return [
            Parameter(name, annotation(one.__annotations__[name])) for name in one.__annotations__
        ]
    found = []
    for name, given in inspect.signature(one).parameters.items():
        if name in ("self", "cls") or name.startswith("_"):
            continue
        default = None if given.default is given.empty else default_text(given.default)
        type_ = "" if given.annotation is given.empty else annotation(given.annotation)
        found.append(Parameter(_starred(given), type_, default))
        if type_ == "Unpack[Options]":
            found += parameters(holdfast.offload.Options)
    return found


def default_text(default: Any) -> str:
    """A default as one would write it: a constant of ``rules`` by its name."""
    tables = (name for name in holdfast.rules.__all__ if getattr(holdfast.rules, name) is default)
    return next(tables, "empty" if repr(default) == "<factory>" else repr(default))


def _shown(default: Any) -> str | None:
    return None if "NODEFAULT" in repr(default) or default is None else repr(default)


def _starred(given: inspect.Parameter) -> str:
    stars = {given.VAR_POSITIONAL: "*", given.VAR_KEYWORD: "**"}
    return stars.get(given.kind, "") + given.name


def call_text(name: str, one: Any) -> str:
    """How it is called: the names of its parameters."""
    found: list[str] = []
    is_keyword = False
    for given in inspect.signature(one).parameters.values():
        if given.name == "self" or given.name.startswith("_"):
            continue
        if given.kind == given.KEYWORD_ONLY and not is_keyword:
            found.append("*")
        is_keyword = is_keyword or given.kind in (given.KEYWORD_ONLY, given.VAR_POSITIONAL)
        found.append(_starred(given))
    return f"{name}({', '.join(found)})"


def described(one: Any) -> tuple[Text, list[Parameter]]:
    """A class or function: its text, and its parameters with theirs."""
    listed = parameters(one)
    names = [parameter.name.lstrip("*") for parameter in listed]
    text = take_apart(docstring_of(one), names)
    below = attribute_texts(one) if isinstance(one, type) else {}
    if any(parameter.name == "**options" for parameter in listed):
        below |= attribute_texts(holdfast.offload.Options)
    for parameter, name in zip(listed, names, strict=True):
        parameter.text = text.of(name) if name in text.items else below.get(name) or text.of(name)
    return text, listed


def _body(name: str, one: Any, heading: str, *, is_returned: bool = False) -> Iterator[str]:
    text, listed = described(one)
    for parameter in listed:
        parameter.type = without_bounds(one.__module__, parameter.type)
    yield from (
        paragraph if paragraph.startswith("```") else linked(paragraph) for paragraph in text.prose
    )
    if listed:
        yield "\n".join([f"**{heading}**\n", *(parameter.line() for parameter in listed)])
    known = aliases(one.__module__, [parameter.type for parameter in listed])
    if known:
        yield "Here " + ", ".join(f"`{name}` is `{of}`" for name, of in known.items()) + "."
    if text.raises:
        yield "**Raises**: " + linked(" ".join(text.raises)).replace("Raises ", "", 1)


def members(one: type) -> list[tuple[str, Any]]:
    """The methods and properties of a class for its users."""
    hidden = INTERNAL.get(one.__name__, set())
    return [
        (name, value)
        for name, value in vars(one).items()
        if not name.startswith("_") and name not in hidden
        if isinstance(value, property | cached_property)
        # torch puts an inherited `step` into the class itself when the first object is made.
        or (inspect.isfunction(value) and value.__qualname__ == f"{one.__qualname__}.{name}")
    ]


def class_parts(name: str, one: type) -> Iterator[str]:
    """A class: its constructor or its fields, its properties, its methods."""
    short = name.rpartition(".")[2]
    if is_event(one):
        yield from _body(name, one, "Fields")
        return
    bases = [base.__name__ for base in one.__mro__[1:2] if base.__name__ == "HybridOptimizer"]
    yield from (f"Also a [{base}](#{base.lower()}), with its methods." for base in bases)
    is_called = not getattr(one, "_is_protocol", False) and not hasattr(one, "__total__")
    if short in RETURNED and not hasattr(one, "__dataclass_fields__"):
        text = take_apart(docstring_of(one), [])
        yield from map(linked, text.prose)
    elif short == "Kind":
        yield linked(take_apart(docstring_of(one), []).prose[0])
    else:
        if is_called and short not in RETURNED:
            yield f"`{call_text(name, one)}`"
        is_plain = not is_called or short in RETURNED
        yield from _body(name, one, "Attributes" if is_plain else "Parameters")
    if short == "Kind":
        return
    properties = [(key, value) for key, value in members(one) if not inspect.isfunction(value)]
    if properties:
        yield "\n".join(["**Properties**\n", *(_property_line(*pair) for pair in properties)])
    for key, value in members(one):
        if inspect.isfunction(value):
            yield f"### `{short}.{key}`"
            yield f"`{call_text(key, value)}`"
            yield from _body(f"{short}.{key}", value, "Parameters")
            yield from _returns(value)


def _property_line(name: str, value: Any) -> str:
    get = value.fget if isinstance(value, property) else value.func
    returned = annotation(inspect.signature(get).return_annotation)
    text = " ".join(" ".join(docstring_of(get).split("\n\n")).split())
    return Parameter(name, returned, None, text).line()


def _returns(one: Any) -> Iterator[str]:
    returned = inspect.signature(one).return_annotation
    if returned is not inspect.Signature.empty and annotation(returned) != "None":
        yield f"**Returns** `{annotation(returned)}`"


def entry(prefix: str, name: str, one: Any, texts: dict[str, str]) -> Iterator[str]:
    """All that a page says of one name, in blocks."""
    yield f"## `{name}`"
    if isinstance(one, type):
        yield from class_parts(name, one)
    elif inspect.isfunction(one):
        yield f"`{call_text(name, one)}`"
        yield from _body(name, one, "Parameters")
        yield from _returns(one)
    elif inspect.ismodule(one):
        page = one.__name__.rpartition(".")[2]
        yield (
            linked(take_apart(one.__doc__ or "", []).prose[0]) + f" Its names: [{page}]({page}.md)."
        )
    else:
        text = texts.get(name, "The version of the package.")
        yield linked(text[:1].upper() + text[1:])
        if isinstance(one, dict):
            yield "Its keys: " + ", ".join(f"`{key}`" for key in one) + "."
    use = USAGE.get(prefix + name)
    if use:
        yield f"**Usage**: `{use}`"


# ── pages ────────────────────────────────────────────────────────────────────────────────


def public(page: str) -> list[tuple[str, Any]]:
    """The names of a page with what they are."""
    module = sys.modules[PAGES[page][0]]
    if page == "events.md":
        return [("Event", events.Event), *((one.__name__, one) for one in event_classes())]
    found = [(name, getattr(module, name)) for name in module.__all__]
    if page == "holdfast.md":
        found.append(("CheckpointReader", CheckpointReader))
    return [(name, one) for name, one in found if name not in ERRORS]


def event_classes() -> list[type]:
    """Every event class, in the order of the source."""
    return [one for one in vars(events).values() if is_event(one) and one is not events.Event]


def render(page: str) -> str:
    """One whole page."""
    title, prefix, text = PAGES[page]
    parts = [HEAD.format(title=f"`{title}`", note=NOTE, text=text).rstrip("\n")]
    texts = _constants(title)
    for name, one in public(page):
        parts += [block for block in entry(prefix, name, one, texts) if block]
    if page == "holdfast.md":
        parts.append(_errors())
    return "\n\n".join(parts) + "\n"


def _constants(module: str) -> dict[str, str]:
    one = sys.modules[module]
    return take_apart(one.__doc__ or "", getattr(one, "__all__", [])).items


def _errors() -> str:
    rows = []
    for name in holdfast.__all__:
        if name in ERRORS:
            first = " ".join(docstring_of(getattr(errors, name)).split("\n\n")[0].split())
            rows.append(
                f"* [{name}](../operations/errors.md#{name.lower()}): {first.replace('``', '`')}"
            )
    return "## Errors\n\n" + "\n".join(rows)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page in PAGES:
        (FOLDER / page).write_text(render(page))
