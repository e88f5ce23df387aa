"""What a repository on the Hugging Face Hub holds, asked before anything is downloaded."""

from __future__ import annotations

from pathlib import Path

from edgespec.models.folders import GIVE_A_FOLDER, ModelFolderError, one_line


def hub_files(reference: str) -> list[str]:
    """The paths in a repository ``owner/name[@revision]``. Raises ``ModelFolderError`` naming the
    reference and what the host said."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import ENDPOINT

    name, _, revision = reference.partition("@")
    try:
        return list(HfApi().list_repo_files(name, revision=revision or None))
    except Exception as error:  # the library's, its HTTP client's and the system's share no base
        kind = type(error).__name__
        raise ModelFolderError(
            f"model {reference!r} is no local folder, and {ENDPOINT} does not list its files"
            f" ({kind}: {one_line(error)}){GIVE_A_FOLDER}"
        ) from error


def cached_snapshot(reference: str, error: ModelFolderError) -> Path:
    """The repository as it lies in the local cache; raises ``error`` where it does not."""
    from huggingface_hub import snapshot_download

    name, _, revision = reference.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except Exception:  # as above
        raise error from error.__cause__
