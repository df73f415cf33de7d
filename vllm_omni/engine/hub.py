# SPDX-License-Identifier: Apache-2.0
"""Whether a name is a checkpoint on the Hugging Face hub, asked once: the libraries that read checkpoints ask several
times, each of them again after a failure, and report the last failure only.
"""

import functools
from http import HTTPStatus
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from vllm import envs

from vllm_omni.errors import StageConfigError
from vllm_omni.metrics.logs import get_logger

logger = get_logger(__name__)

_TIMEOUT_S = 10.0


@functools.cache
def check_on_hub(model: str, revision: str | None = None, token: bool | str | None = None) -> None:
    """Asks the hub about what is neither a folder nor, in any revision, in the cache.

    Raises:
        StageConfigError: The hub has no such model, refuses it, or cannot be reached.
    """
    repository = model.partition(":")[0]  # vLLM's names of GGUF files have more.
    if Path(model).exists() or envs.VLLM_USE_MODELSCOPE or _is_cached(repository):
        return
    nowhere = f"{model!r} is no checkpoint: there is no such folder, "
    if constants.HF_HUB_OFFLINE:
        raise StageConfigError(f"{nowhere}it is not in the cache of the hub, and HF_HUB_OFFLINE is set")
    hub = constants.ENDPOINT
    logger.info("Asking %s about %s", hub, model)
    try:
        api = HfApi()
        info = api.model_info(repository, revision=revision, timeout=_TIMEOUT_S, token=token)
        if info.gated:  # Everybody may read about it.
            api.auth_check(repository, token=token)
    except GatedRepoError as error:
        raise StageConfigError(
            f"{model}: {hub} gives it to those only who have accepted its terms; accept them there and set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise StageConfigError(f"{model}: {hub} has no revision {revision!r} of it") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise StageConfigError(
            f"{nowhere}and {hub} has no model of this name; if it is private, set HF_TOKEN"
        ) from error
    except HTTPError as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code == HTTPStatus.UNAUTHORIZED:
            raise StageConfigError(
                f"{model}: {hub} refuses the token; set HF_TOKEN to a valid one, or to none"
            ) from error
        raise StageConfigError(
            f"{nowhere}and {hub} cannot be asked: {error or type(error).__name__}; check the name and the network, or "
            "give the folder of a download"
        ) from error


def _is_cached(repository: str) -> bool:
    folder = repo_folder_name(repo_id=repository, repo_type="model")
    return (Path(constants.HF_HUB_CACHE) / folder / "snapshots").is_dir()
