"""Have a checkpoint's files on disk: a local folder as it is, a hub repository through the hub's own cache."""

from __future__ import annotations

from pathlib import Path

from nextn.errors import NextnError
from nextn.smollm2 import NAME, smollm2_folder

WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt"]
"""What decoding reads; weights in other formats stay where they are."""


def local_folder(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
) -> Path:
    """The folder of a checkpoint.

    Args:
        source: a folder; ``smollm2`` (`nextn.smollm2`); or a hub repository id, which is downloaded once (HF_HOME,
            HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE work as in the hub's own tools).
        revision: branch, tag or commit.
        token: access token.
        cache_dir: another cache than HF_HOME's.
    Raises:
        NextnError: neither a folder nor a repository that can be had.
    """
    path = Path(source)
    if path.is_dir():
        return path
    if str(source) == NAME:
        return smollm2_folder()
    if path.exists() or str(source).startswith((".", "/", "~")) or str(source).count("/") != 1:
        raise NextnError(
            f"{source} is not the folder of a checkpoint.",
            "Name a folder with config.json and safetensors files, a hub repository as org/name, or smollm2.",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    from nextn.checkpoint.hub import explain
    from nextn.checkpoint.listing import Remote

    try:
        return Path(
            snapshot_download(
                str(source),
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                allow_patterns=WANTED,
                library_name="nextn",
            )
        )
    except HFValidationError:
        raise NextnError(
            f"{source} is neither a folder nor a valid hub repository id.", "Check the spelling."
        ) from None
    except LocalEntryNotFoundError:
        raise NextnError(
            f"{source} is no folder here, is not in the local cache, and the hub cannot be reached.",
            "Check the spelling and the connection, or name a local folder.",
        ) from None
    except OSError as error:
        from huggingface_hub import constants

        response = getattr(error, "response", None)
        facts = Remote(str(source), revision or "main", constants.ENDPOINT)
        raise explain(error, response.status_code if response is not None else None, facts) from None
