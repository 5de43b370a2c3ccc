"""Every error Holdfast raises, each named after the situation it reports.

HoldfastError
├── UsageError                the call cannot mean anything; nothing was changed
│   ├── UnsupportedState      an object in the state that cannot be stored faithfully
│   └── StateMismatch         the state offered and the state stored do not fit each other
├── NotFound                  what was asked for is not there
├── FormatError               bytes that are not what format v1 says they must be
│   ├── NewerFormat           written by a newer Holdfast that requires features unknown here
│   ├── ForeignFormatError    a file of another checkpointer that cannot be what it should be
│   ├── ChecksumMismatch      bytes changed after they were written
│   └── CoverageError         the images do not produce every element exactly once
├── StorageError              a store refused or failed (retryable says which)
│   ├── AlreadyPublished      something exists that is never overwritten
│   └── RootBusy              another run holds the root's lock
├── SaveError                 a save that did not reach what it promised; training is unharmed
│   ├── SnapshotSkipped       no rank captured it
│   ├── CaptureOvertaken      the state changed while it was copied; never sealed
│   ├── NotProtected          captured, but parity of it could not be made
│   └── PersistFailed         captured, but not durable
├── RestoreError              no rank was given a state it can train with
│   ├── StatePoisoned         a restore broke off half-way; the objects must not be used
│   └── TooManyLost           more members of a group are missing than its parity replaces
├── ArenaError                shared memory is missing, too small, or not ours
├── KeeperError               the keeper could not be started or does not answer
│   └── Fenced                a newer incarnation has taken over; this one must stop
├── Preempted                 the process was told to end; what it had done is saved
├── PeerError                 another host's keeper did not give what it was asked for
└── DeadlineExceeded          a wait ended; the message names the ranks and phase missing

An error's ``retryable`` says whether the same call may succeed later without a change by the
user; ``exit_code`` is what the command line exits with; ``fields`` are its facts for machines.
``docs/operations/errors.md`` is generated from the classes below.
"""

from __future__ import annotations

from typing import Any, ClassVar


class HoldfastError(Exception):
    """The root of the tree: ``except holdfast.HoldfastError`` catches all of them.

    ``fields`` holds what is known in this case, under the names that ``keys`` explains and no
    others; read it with ``.get``.
    """

    retryable: bool = False
    exit_code: ClassVar[int] = 1
    #: What may be found in ``fields``, and what it means; a class adds to those above it.
    keys: ClassVar[dict[str, str]] = {}
    #: Why it comes, and what to do, for the page of errors.
    cause: ClassVar[str] = "Another rank failed with an exception that is not one of Holdfast's."
    remedy: ClassVar[str] = "Look at the log of the rank that the message names."

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields: dict[str, Any] = fields

    @property
    def told_fields(self) -> dict[str, Any]:
        """``fields`` as they are told to other processes: what is not plain, as text."""
        told = {key: _plain(value) for key, value in self.fields.items()}
        return told | ({"retryable": self.retryable} if "retryable" in vars(self) else {})


class UsageError(HoldfastError):
    """The call cannot mean anything as it was made; nothing was changed."""

    exit_code = 2
    keys: ClassVar[dict[str, str]] = {
        "path": "the name below a root that cannot be one",
        "leaf": "the leaf that a rule does not fit",
        "pattern": "the pattern of the rule, or the part of it, that does not fit",
    }
    cause = "An argument, an environment variable or the order of calls has no meaning."
    remedy = "Change the call as the message says. Trying again gives the same error."


class UnsupportedState(UsageError):
    """An object in the state cannot be stored faithfully; the message names it."""

    keys: ClassVar[dict[str, str]] = {
        "leaf": "the name of the tensor that cannot be stored",
        "where": "the place of the value that cannot be stored, as in notes.history[3]",
    }
    cause = (
        "The state holds a value that needs code to be read back, or a tensor of which this rank "
        "cannot say which elements it holds. Nothing is stored approximately."
    )
    remedy = (
        "Store the parts of the value, or wrap it in an object with state_dict and "
        "load_state_dict; redistribute the tensor to Shard or Replicate."
    )


class StateMismatch(UsageError):
    """The offered state and the stored one do not fit; every difference is listed."""

    keys: ClassVar[dict[str, str]] = {
        "problems": "one sentence for each difference between state and checkpoint, or between "
        "ranks; the message shows the first 20",
        "leaves": "the names of the leaves in which ranks contradict each other",
        "differences": "pairs of leaf and sentence, for ranks that contradict each other",
    }
    cause = (
        "The model or the optimizer was built differently from when it was saved, or the ranks "
        "of this run built different ones. Nothing was changed yet."
    )
    remedy = "Build them as they were. To load a part only, leave the other keys out of the state."


class NotFound(HoldfastError):
    """The checkpoint, step, leaf or directory asked for is not there."""

    exit_code = 3
    keys: ClassVar[dict[str, str]] = {
        "root": "the root that was looked at",
        "step": "the step or generation that is not there",
        "generation": "the same as incarnation-step, where it was asked for so",
        "leaf": "the leaf that is not there",
        "path": "the file or directory that is not there",
    }
    cause = "A wrong path or step; a checkpoint that was pruned; a run that saved nothing yet."
    remedy = "Look at what is there with `holdfast ls ROOT`."


class FormatError(HoldfastError):
    """Bytes are not what the format says they must be; the message names file and field."""

    exit_code = 4
    keys: ClassVar[dict[str, str]] = {
        "path": "the document that is wrong",
        "image": "the image that is wrong",
        "leaf": "the leaf that is wrong",
        "broken": "the paths of the files that cannot be read, where there are several",
    }
    cause = "A file was cut short, damaged, swapped with another, or not written by Holdfast."
    remedy = (
        "A restore goes on to the next source by itself. Find what else is damaged with "
        "`holdfast verify --deep ROOT`; restore another step by name."
    )


class NewerFormat(FormatError):
    """The checkpoint requires features this version does not know."""

    cause = "A newer Holdfast wrote it and marked it as not readable without what it added."
    remedy = "Install that version or a newer one. Nothing is wrong with the files."


class ForeignFormatError(FormatError):
    """A file of another checkpointer cannot be what its format says; nothing in it was executed."""

    keys: ClassVar[dict[str, str]] = {"offset": "the byte of the file, or of its pickle"}
    cause = (
        "The file is damaged, was cut short, is of a kind that is not read, or was made to run "
        "code or to use up memory in whoever opens it."
    )
    remedy = "Copy the file again from where it was written; do not open it by other means."


class ChecksumMismatch(FormatError):
    """Bytes changed after they were written; the message names file and block."""

    keys: ClassVar[dict[str, str]] = {"block": "the number of the block (1 MiB) in the image"}
    cause = "A disk, a controller, memory or another program changed bytes. They are never used."
    remedy = (
        "Run `holdfast verify --deep ROOT`, restore another step if this was the only copy, and "
        "have disk and memory of the machine checked."
    )


class CoverageError(FormatError):
    """The images do not produce every element of a leaf exactly once."""

    cause = "An image or the layout is from another checkpoint, or damaged in a way that parses."
    remedy = "Nothing was read. Restore another step, and report this: the writer should not do it."


class StorageError(HoldfastError):
    """A store refused or failed an operation; the operating system's reason is kept as cause."""

    exit_code = 5
    retryable = True
    keys: ClassVar[dict[str, str]] = {
        "operation": "what was tried: write, fsync, rename, ...",
        "path": "the file, relative to the root",
        "url": "the root",
        "errno": "the operating system's number for the reason; 0 when it gave none",
        "offset_bytes": "where the read that went past the end began",
        "size_bytes": "how much it asked for",
        "have_bytes": "how much there is",
    }
    cause = (
        "The disk is full, a quota is used up, the directory is read-only or gone, the network "
        "file system does not answer."
    )
    remedy = (
        "Do what the message says. `retryable` is False for what stays so until somebody acts "
        "(rights, read-only); a run tries again with its next durable save by itself."
    )


class AlreadyPublished(StorageError):
    """A name exists that is never overwritten."""

    retryable = False
    cause = "Somebody published the same generation before, from another attempt."
    remedy = "Nothing is lost: the earlier one stays. Make sure one run writes to one root."


class RootBusy(StorageError):
    """Another run holds the lock of this root."""

    keys: ClassVar[dict[str, str]] = {
        "name": "the lock",
        "owner": "what the holder signed the lock with: its process",
    }
    cause = "A run, its keeper that is still writing, or a `holdfast.save` works on this root."
    remedy = "Wait until it ends, stop the process that the message names, or take another root."


class SaveError(HoldfastError):
    """A save did not reach what it promised. Training is unharmed."""

    exit_code = 6
    retryable = True
    keys: ClassVar[dict[str, str]] = {
        "leaf": "the leaf that was changed too early; empty when no leaf is to blame"
    }
    cause = "See the classes below it."
    remedy = (
        "Go on training: the next save is taken. Neither Checkpointer.step nor Checkpointer.save "
        "raises it."
    )


class SnapshotSkipped(SaveError):
    """No rank captured this step; the message says why."""

    cause = (
        "Every slot was still being written to storage, a rank refused or died, or the keeper did "
        "not answer in time. All ranks skip a step together."
    )
    remedy = (
        "A durable save is made good by a later one by itself. If it goes on: `holdfast report`."
    )


class CaptureOvertaken(SaveError):
    """The state changed while it was copied; the copy was thrown away on all ranks."""

    cause = "Parameters or optimizer state were written without a step of the optimizer."
    remedy = "Call checkpointer.before_update() before every update outside Optimizer.step."


class NotProtected(SaveError):
    """The snapshot was captured, but the hosts could not make parity of it."""

    keys: ClassVar[dict[str, str]] = {
        "generation": "what is not protected, as incarnation-step",
        "host": "the host whose keeper says so; empty when no host is to blame",
    }
    cause = "A host of the group was lost, cut off or too slow, or bytes changed on their way."
    remedy = "What was protected before stays so, and the next snapshot is tried. Look at the host."


class PersistFailed(SaveError):
    """The snapshot was captured but did not become durable."""

    cause = "Storage refused, the keeper was killed, or a rank died before all had captured."
    remedy = "The message names the reason. The snapshot stays in memory; the next one is written."


class RestoreError(HoldfastError):
    """No state that all ranks can train with could be restored."""

    exit_code = 7
    cause = (
        "Every generation was damaged or unreadable, a load_state_dict of yours raised, or a "
        "record is missing that tells which generations are the run's."
    )
    remedy = "The message lists each source and its reason. `holdfast verify --deep ROOT`."


class StatePoisoned(RestoreError):
    """A restore broke off half-way: the objects hold a mixture and must not be used."""

    cause = "An earlier restore failed after it had begun to change the objects."
    remedy = "Restore again, or end the process and start anew. step() and save() refuse till then."


class TooManyLost(RestoreError):
    """More members of a group are missing than its parity replaces."""

    keys: ClassVar[dict[str, str]] = {
        "missing": "the numbers of the members that are not there, in the order of the group",
        "parity": "how many may be missing",
    }
    cause = "More hosts of one group were lost, or do not answer, than the run's parity replaces."
    remedy = "Nothing is guessed: the restore goes on with storage. A larger parity survives more."


class ArenaError(HoldfastError):
    """Shared memory is missing, too small, or belongs to somebody else."""

    exit_code = 8
    keys: ClassVar[dict[str, str]] = {
        "needed_bytes": "how much the slot takes",
        "free_bytes": "how much the file system has left",
    }
    cause = "/dev/shm has no room for three images per rank (64 MiB in a container by default)."
    remedy = (
        "Enlarge it (docker: --shm-size; Kubernetes: an emptyDir with medium Memory), or set "
        "HOLDFAST_ARENA_DIR to another directory in memory."
    )


class KeeperError(HoldfastError):
    """The keeper could not be started or does not answer."""

    exit_code = 9
    retryable = True
    cause = "It was killed (out of memory, perhaps), could not start, or is stopped."
    remedy = "Its last lines are in the message, all of them in keeper.log in the arena."


class Fenced(KeeperError):
    """A newer incarnation has taken over this run; this process must stop saving."""

    retryable = False
    cause = "The run was started again while this process still lived."
    remedy = "End this process. The newer one has the run, and nothing this one saves will count."


class Preempted(HoldfastError):
    """This process was told to end by SIGTERM; its last step is saved, and nothing more is."""

    retryable = True
    keys: ClassVar[dict[str, str]] = {
        "step": "the last step, which all ranks saved",
        "is_durable": "whether it is in storage; else it is in memory at most",
    }
    cause = (
        "SIGTERM came, to this rank or to another, and the Checkpointer was made with grace_s: a "
        "scheduler takes the machine back, or the job was ended."
    )
    remedy = "Let it end the process. The next start goes on after this step."


class PeerError(HoldfastError):
    """Another host's keeper did not give what it was asked for, or cannot be believed."""

    exit_code = 12
    retryable = True
    keys: ClassVar[dict[str, str]] = {
        "peer": "the name of the host",
        "address": "where its keeper was asked, as host:port",
        "path": "what it was asked for",
        "range": "which bytes of it, as bytes=FIRST-LAST; empty for all",
        "phase": "how far it got: connect, request, answer or body; or cancelled; or client, for a "
        "fault on this side",
        "status": "what it answered, as a status of HTTP: 404 for what it has not, 410 for what it "
        "has no more; 0 when it gave no such answer",
    }
    cause = (
        "That host is gone, cut off or overloaded, its keeper has another secret or is of an "
        "incarnation that is over, or what it had was withdrawn meanwhile."
    )
    remedy = "Nothing of it is used; another source is. Look at the host that the message names."


class DeadlineExceeded(HoldfastError):
    """A wait ended before what it waited for came; the message names who is missing, and where."""

    exit_code = 10
    retryable = True
    keys: ClassVar[dict[str, str]] = {
        "ranks": "the ranks that did not come",
        "phase": "what they were waited for in",
        "step": "the step that was waited for",
    }
    cause = "A rank died, hangs in a collective, or does not make the same calls as the others."
    remedy = "Look at the ranks that the message names; raise timeout_s if they are only slow."


def error_of(
    kind: str,
    message: str,
    fields: dict[str, Any],
    otherwise: type[HoldfastError] = HoldfastError,
) -> HoldfastError:
    """The error that another process told of, by its class name."""
    found = globals().get(kind)
    is_ours = isinstance(found, type) and issubclass(found, HoldfastError)
    error: HoldfastError = (found if is_ours else otherwise)(  # type: ignore[misc]
        message, **{key: value for key, value in fields.items() if key != "retryable"}
    )
    if "retryable" in fields:
        error.retryable = bool(fields["retryable"])
    return error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
