"""Completes commands, options, steps and leaves in the shell: ``holdfast completion``.

The script calls ``holdfast completion --words`` at every press of the key, so all three shells
offer the same words, which are read from the commands themselves. A library would not do better:
shtab writes static scripts, which know no steps and no leaves; argcomplete would be one more
dependency and loads every command. This loads only the command being typed, and no torch.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.cli.command import Commands, add_command, print_json
from holdfast.errors import HoldfastError, UsageError
from holdfast.observe.text import printable

BASH = """\
# To use it now:    source <(holdfast completion bash)
# and for good:     holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast
_holdfast() {
    local -a found
    mapfile -t found < <("$1" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    COMPREPLY=()
    ((${#found[@]})) && mapfile -t COMPREPLY < <(printf '%q\\n' "${found[@]}")
}
complete -o bashdefault -o default -F _holdfast holdfast
"""

ZSH = """\
#compdef holdfast
# To use it now:    source <(holdfast completion zsh)
# and for good:     holdfast completion zsh > a directory of $fpath, as _holdfast
_holdfast() {
    local -a found
    found=("${(@f)$("${words[1]}" completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then
        compadd -- "${found[@]}"
    else
        _files
    fi
}
if [[ "${funcstack[1]}" == "_holdfast" ]]; then
    _holdfast
else
    compdef _holdfast holdfast
fi
"""

FISH = """\
# To use it now:    holdfast completion fish | source
# and for good:     holdfast completion fish > ~/.config/fish/completions/holdfast.fish
function __holdfast_words
    set -l typed (commandline -opc)
    set -l now (commandline -ct)
    set -l found ($typed[1] completion --words $typed[2..-1] "$now" 2>/dev/null)
    if set -q found[1]
        printf '%s\\n' $found
    else
        __fish_complete_path "$now"
    end
end
complete -c holdfast -f -a '(__holdfast_words)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def add_to(commands: Commands[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    command = add_command(
        commands,
        "completion",
        "print a script for the shell that completes commands, options, steps and leaves",
        "source <(holdfast completion bash)",
        "holdfast completion zsh > ~/.zfunc/_holdfast",
        "holdfast completion fish | source",
    )
    command.add_argument("shell", choices=SCRIPTS, nargs="?", help="the shell the script is for")
    command.add_argument(
        "--words",
        metavar="WORD",
        nargs=argparse.REMAINDER,
        help="what the scripts ask: the words that fit the last of those typed behind `holdfast`",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the script, or the words that could complete the last one."""
    if args.words is not None:
        for word in complete(args.words):
            print(word)
    elif args.shell is None:
        raise UsageError(f"completion: say for which shell: {', '.join(SCRIPTS)}")
    elif args.json:
        print_json({"shell": args.shell, "script": SCRIPTS[args.shell]})
    else:
        print(SCRIPTS[args.shell], end="")
    return 0


@dataclass(slots=True)
class _Typed:
    """The words before the word that is being typed."""

    places: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    pending: argparse.Action | None = None


def complete(typed: Sequence[str]) -> list[str]:
    """Returns the words that complete the last of ``typed``, the words after ``holdfast``.

    Returns nothing where a file belongs, or nothing is known: the shell then offers files.
    """
    from holdfast.cli import COMMANDS

    *before, word = typed or [""]
    if not before:
        return _fitting(("--help", "--version") if word.startswith("-") else COMMANDS, word)
    if before[0] not in COMMANDS:
        return []
    return _fitting(_candidates(_declared(before[0]), before[1:], word), word)


def _declared(name: str) -> argparse.ArgumentParser:
    """Returns one command's own parser."""
    commands = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"holdfast.cli.{name}").add_to(commands)
    found: argparse.ArgumentParser = commands.choices[name]
    return found


def _fitting(words: Iterable[str], start: str) -> list[str]:
    fit = [word for word in words if word.startswith(start)]
    # The words are inserted into the line being typed: a name with control characters is not
    # offered.
    return [word for word in fit if word == printable(word)]


def _candidates(command: argparse.ArgumentParser, before: Sequence[str], word: str) -> list[str]:
    options = {text: action for action in command._actions for text in action.option_strings}
    places = [action for action in command._actions if not action.option_strings]
    typed = _read(options, before)
    if typed.pending is not None:
        return _values(typed.pending, typed)
    if word.startswith("-"):
        return [text for text in options if text.startswith("--") and text not in before]
    at = len(typed.places)
    return _values(places[at], typed) if at < len(places) else []


def _read(options: dict[str, argparse.Action], before: Sequence[str]) -> _Typed:
    """Separates options, their values and the words between them."""
    typed = _Typed()
    for word in before:
        if typed.pending is not None:
            typed.values[typed.pending.dest] = word
            typed.pending = None
        elif word in options:
            takes_value = options[word].nargs != 0
            typed.pending = options[word] if takes_value else None
        elif not word.startswith("-"):
            typed.places.append(word)
    return typed


def _values(action: argparse.Action, typed: _Typed) -> list[str]:
    """Returns the possible values of an option or argument, by its name in the help."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    try:
        if action.metavar == "STEP":
            is_other = action.dest == "other_step" and len(typed.places) > 1
            return steps(typed.places[1 if is_other else 0])
        if action.metavar in ("LEAF", "PATTERN"):
            return names(typed.places[0], typed.values.get("step"))
    except (HoldfastError, OSError, IndexError):  # no root yet, or none that can be read
        return []
    return []


def steps(root: str) -> list[str]:
    """Returns the checkpoints of a root as ``--step`` takes them."""
    checkpoints = importlib.import_module("holdfast.cli.checkpoints")
    opened = checkpoints.open_readable(root, is_brief=True)
    found = opened.catalogue.generations
    kept = [str(each.step) for each in found if each in opened.lineage]
    return kept + [str(each) for each in found if each not in opened.lineage]


def names(root: str, step: str | None) -> list[str]:
    """Returns the leaves of a checkpoint."""
    checkpoints = importlib.import_module("holdfast.cli.checkpoints")
    return list(checkpoints.open_checkpoint(checkpoints.open_readable(root), step).leaves)
