"""The command line: verbs only. Each imports what it needs when it is called, so `rowdit --help` is quick.

A mistake of the user's ends in one line on the error stream and exit code 2; an interrupted run in exit code 130. Under
torchrun rank 0 prints it, and another rank only what differs.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Sequence
from datetime import timedelta

try:
    from rowdit.commands.parsing import fail
    from rowdit.commands.ranks import USAGE as USAGE_ERROR
    from rowdit.commands.ranks import rank, tell, told_by_first
except ModuleNotFoundError as missing:  # `pip install .` without the extra installs this command too
    sys.exit(f"rowdit: {missing}; the library alone is installed. The system: pip install '.[rowdit]' in the clone")

# verb -> its module in `rowdit.commands`, imported when the verb is called
VERBS = {
    "train": "train",
    "compare": "compare",
    "tune": "tune",
    "study": "study",
    "report": "report",
    "plan": "plan",
    "sample": "sample",
    "export": "export",
    "eval": "eval",
    "encode": "encode",
    "train-vae": "train_vae",
    "bench": "bench",
    "data": "data",
}

CONSEQUENCE = timedelta(seconds=2)
"""Rank 0 tells its error before it ends, so another rank that lost it needn't wait long for it."""

# module that defines it, name
USER_ERRORS = (
    ("rowdit.data.batch", "DataError"),
    ("rowdit.study.report.reading", "StudyError"),
    ("rowdit.train.checkpoint", "CheckpointError"),
    ("rowdit.train.plain", "ConfigError"),
)

USAGE = """\
usage: rowdit VERB [ARGUMENTS]      rowdit VERB --help says more

  train [RECIPE]           one run, on this process or on all that torchrun starts; goes on where it was
  compare [RECIPE]         train the same model with AdamW, Muon and Periodic Row-wise Muon; who wins, and a page
  tune [RECIPE]            a grid of settings for one optimizer of a recipe
  study NAME               sizes, optimizers, learning rates and seeds, tuned and repeated; --table prints a headline
  report OUT               make the page of a finished comparison again
  plan [RECIPE]            what a run takes on N ranks, without them: memory, bytes, FLOPs
  sample RUN               images from a trained model
  eval RUN|IMAGES          Frechet and kernel distance, precision and recall, with all that it takes to repeat them
  export RUN               averaged weights and config as one safetensors file
  encode SOURCE            images to latent shards
  train-vae SOURCE         a small autoencoder for encode, in about a minute
  bench                    time the optimizer step against fused AdamW, torch.optim.Muon and public Muons
  data check SOURCE        decode every image; how many each class has, and which are bad
  data get fashion-mnist   fetch the full Fashion-MNIST, checked by its hashes
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    verb, rest = arguments[0], arguments[1:]
    if verb == "--version":
        from importlib.metadata import version

        print(f"rowmuon {version('rowmuon')}")
        return 0
    if verb not in VERBS:
        import difflib

        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(VERBS)}."
        return fail(f"there is no verb {verb!r}; {hint}")
    try:
        return importlib.import_module(f"rowdit.commands.{VERBS[verb]}").run(rest)
    except SystemExit as usage:
        if usage.code:
            tell(USAGE_ERROR)
        raise
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except BrokenPipeError:
        return 1
    except ModuleNotFoundError as error:
        ours = str(error) == f"No module named {error.name!r}"  # Python's words; the weights' error has a way out
        return fail(f"{error}; pip install '.[rowdit]' in the clone installs what is missing" if ours else str(error))
    except Exception as error:
        if (message := _for_user(error)) is not None:
            return fail(message)
        if isinstance(error, RuntimeError) and rank() > 0 and told_by_first(CONSEQUENCE) is not None:
            return 1  # rank 0 has ended with an error that it told, and what was sent to it can't arrive
        raise


def _for_user(error: Exception) -> str | None:
    """What to tell, for an error that the user can do something about; None for one of the program's."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({error}); make room and run the same command again, it goes on where it was"
    if isinstance(error, OSError) and type(error).__module__ == "builtins" and error.filename is not None:
        return f"{error.filename}: {error.strerror}"  # without the [Errno 21]
    if isinstance(error, _user_errors()):
        return str(error)
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return (
            f"out of memory ({str(error).splitlines()[0] if str(error) else type(error).__name__}); take smaller "
            "images, a smaller model or fewer at a time (batch_size, micro_batch_size, num_samples)"
        )
    return None


def _is_out_of_memory(error: Exception) -> bool:
    """Torch has a type for GPUs alone."""
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _user_errors() -> tuple[type[Exception], ...]:
    """Errors whose message is for the user, with no traceback: bad configs and data, a full disk.

    What was raised comes from a module that is loaded, so none is imported here: a fault in one would hide the message.
    """
    loaded = [vars(sys.modules[module])[name] for module, name in USER_ERRORS if module in sys.modules]
    return *loaded, OSError
