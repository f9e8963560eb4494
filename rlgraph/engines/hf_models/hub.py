"""Models by hub id: found in the cache of huggingface_hub, or downloaded once; a folder of that cache names its revision."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from rlgraph.errors import DataError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # of a model's repository; code that comes with it is not run
OFFLINE = "HF_HUB_OFFLINE"  # the environment variable that keeps libraries from asking a hub
PROBE_S = 5.0  # in which a hub that can be reached answers


def is_hub_id(path: str) -> bool:
    """Whether a path is no folder of this machine, but may be the id of a model on a hub.

    >>> is_hub_id("Qwen/Qwen3-0.6B"), is_hub_id("models"), is_hub_id("./models/mine")
    (True, False, False)
    """
    return HUB_ID.fullmatch(path) is not None and not path.startswith(".") and not Path(path).exists()


def cached(model: str) -> str | None:
    """Find the folder of a hub id in the cache, without a network; None if there is none, or half of one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, local_files_only=True, allow_patterns=list(WANTED)))
    except LocalEntryNotFoundError:
        return None
    return str(folder) if (folder / "config.json").exists() and any(folder.glob("*.safetensors")) else None


def downloaded(model: str) -> str:
    """The folder of a hub id: that of the cache, else a download of the revision that the hub names now.

    Raises DataError at once where the hub cannot be reached, or has no such model.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

    found = cached(model)
    if found is not None:
        return found
    fix = f"give a folder that holds config.json and *.safetensors, or fetch it where there is a network: `hf download {model}`"
    try:
        HfApi().model_info(model, timeout=PROBE_S)  # asked once: a download would try again and again
        return snapshot_download(model, allow_patterns=list(WANTED))
    except RepositoryNotFoundError:
        raise DataError(
            f"model '{model}': neither a folder here nor a model on {constants.ENDPOINT} that this user may read; {fix}"
        ) from None
    except OfflineModeIsEnabled:
        raise DataError(f"model '{model}': no such folder, it is not in the cache, and HF_HUB_OFFLINE forbids a download; {fix}") from None
    except Exception as error:  # noqa: BLE001 (of the library by which huggingface_hub asks, which its versions change)
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise DataError(
            f"model '{model}': no such folder, it is not in the cache, and {constants.ENDPOINT} gave none ({why}); {fix}"
        ) from None


def revision_of(folder: str) -> tuple[str, str] | None:
    """The hub id and the revision of a folder in the cache of huggingface_hub; None for any other folder.

    >>> revision_of("/cache/models--Qwen--Qwen3-0.6B/snapshots/c1899de")
    ('Qwen/Qwen3-0.6B', 'c1899de')
    """
    repository, snapshots, revision = Path(folder).parts[-3:] if len(Path(folder).parts) > 3 else ("", "", "")
    if snapshots != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/", 1), revision


@contextlib.contextmanager
def no_hub() -> Iterator[None]:
    """Keep libraries from asking a hub while they load a folder: without a network they would try for a minute."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Keep this process, and those that it starts meanwhile, from asking a hub while an engine loads.

    Afterwards the environment is as it was: a reward or a tool in the same process is a user's own, and may ask.
    """
    with no_hub():  # which reads the variable as the user has it, so before it is set
        given = os.environ.get(OFFLINE)
        os.environ[OFFLINE] = "1"
        try:
            yield
        finally:
            os.environ.pop(OFFLINE, None)
            os.environ.update({} if given is None else {OFFLINE: given})
