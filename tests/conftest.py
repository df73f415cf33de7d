# SPDX-License-Identifier: Apache-2.0
"""For all tests: the environment, set before torch or vLLM is imported, and shared fixtures."""

import atexit
import fcntl
import functools
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_timeout

from tests.forked_programs import QuickForkServer, import_for_tests, imported
from tests.servers import ENDLESS_STEPS, SMALL_CSM, SMALL_VLLM, RunningServer
from vllm_omni.entrypoints import omni_base

if TYPE_CHECKING:
    from tests.simulated_device import SimulatedDevice

# `make test` sets OMP_NUM_THREADS before Python starts; this is for a bare `pytest`.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# A test that would download files or report usage fails.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["DO_NOT_TRACK"] = "1"
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
gc.disable()  # While modules are imported it finds nothing and takes a fifth of the time.
omni_base.ForkServer = QuickForkServer  # type: ignore[misc]  # Pipelines start without imports.


# One process runs the files that share something: the folders with engines, and files that declare the same group.
_FOLDERS_WITH_ENGINES = re.compile(
    "tests/(?:engine|stage|clients|model_executor/models/(?:qwen|csm|glm|higgs|janus|vibevoice)[^/]*)/"
)
_GROUP = re.compile(r'^GROUP = "(\w+)"$', re.MULTILINE)
"""A test file's declaration. The process that assigns tests to others does not import them, so it reads the line."""
_MACHINES = "machines"
"""Ray's clusters and hosts need memory, and answers in time: one after the other, before other tests keep servers."""
_SERVERS = "server"
"""Four servers at once: after the other groups, so that they do not meet the machines, which need as much memory."""
_LONG_FILES = (
    "tests/diffusion/test_parallel_denoiser.py", "tests/coloured_shapes/test_quality.py",
    "tests/stage/test_watchdog.py", "tests/diffusion/test_parity.py", "tests/docs/test_quickstart.py",
    "tests/scripts/test_run_tests.py", "tests/talk/test_talk.py", "tests/testing/test_tiny_checkpoints.py",
)  # fmt: skip
_A_PROCESS_DIED = pytest.StashKey[bool]()
_is_xdist_worker = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in several processes, a file stays in one, and so do files that share something."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # `pytest_collection_modifyitems` has sorted them.

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(config.rootpath, nodeid.split("::")[0])

    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """By groups: machines first, then what takes long, so that no process is alone with it at the end; then servers."""
    first: dict[str, int] = {}
    for item in items:
        first.setdefault(_group_of_item(item), len(first))

    def rank(item: pytest.Item) -> tuple[bool, bool, bool, int]:
        file, group = item.nodeid.split("::")[0], _group_of_item(item)
        is_long = file in _LONG_FILES or group != file
        return group != _MACHINES, not is_long, group == _SERVERS, first[group]

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A process that died fails the run also if it was in no test."""
    if error:
        node.config.stash[_A_PROCESS_DIED] = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(_A_PROCESS_DIED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """pytest-timeout 2.4 stops its timer when a test fails; the teardown gets one of its own."""
    settings = pytest_timeout._get_item_settings(item)
    if settings.timeout:
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)
    return (yield)


class _GroupFixtures:
    """Ends what a group shares with its last test, because engines and servers need memory; not the checkpoints.

    Such fixtures have the scope of a session, because pytest has none for what several files share. A plugin, because
    for them pytest does not call the hooks in the conftest.py of a folder.
    """

    def __init__(self) -> None:
        self._running: list[tuple[pytest.FixtureDef[Any], pytest.FixtureRequest]] = []

    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
        if fixturedef.scope == "session" and fixturedef.baseid and not fixturedef.argname.startswith("tiny_"):
            self._running.append((fixturedef, request))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        yield
        if nextitem is not None and _group_of_item(nextitem) != _group_of_item(item):
            while self._running:
                fixturedef, request = self._running.pop()
                fixturedef.finish(request)
            _end_process_groups()


def _end_process_groups() -> None:
    """Each group of tests begins without vLLM's process groups.

    An engine that fails to start leaves its own; the next engine uses them, and a model without experts has none for
    experts. Their threads end one after the other, each 0.2 s late (`long_timer_slack`), unless the system is told.
    """
    if parallel_state := sys.modules.get("vllm.distributed.parallel_state"):
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # It has ended, or only root may.
                Path("/proc", thread, "timerslack_ns").write_text("50000")
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


class _FailureNames:
    """Names what fails at once: a long run that is ended has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.write_line(f" {report.nodeid} ({report.when})")


def pytest_configure(config: pytest.Config) -> None:
    global _is_xdist_worker
    _is_xdist_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(_GroupFixtures())
    config.pluginmanager.register(_FailureNames(config))
    if _is_xdist_worker:
        _import_before_tests(config)


def _import_before_tests(config: pytest.Config) -> None:
    """With the streams of a program; what is forked from it writes where this process does."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.suspend_global_capture(in_=True)
    import_for_tests()
    capture.resume_global_capture()
    imported()


def _group_of_item(item: pytest.Item) -> str:
    return group_of(item.config.rootpath, item.nodeid.split("::")[0])


@functools.cache
def group_of(root: Path, file: str) -> str:
    if folder := _FOLDERS_WITH_ENGINES.match(file):
        return folder[0]
    declared = _GROUP.search((root / file).read_text())
    return declared[1] if declared else file


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """No collection looks at what was imported, also none of vLLM, which unfreezes all when an engine is closed.

    The last one of the interpreter does: nanobind writes a report of what was not freed by then.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only checkpoint with random weights."""
    return _write("qwen3", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen2_5_omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Qwen2.5-Omni checkpoint with random weights."""
    return _write("qwen2_5_omni", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen3_omni_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Qwen3-Omni checkpoint with random weights."""
    return _write("qwen3_omni_moe", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_csm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete CSM checkpoint with random weights."""
    return _write("csm", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_higgs_audio_v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete Higgs Audio v2 checkpoint with random weights, its codec included."""
    return _write("higgs_audio_v2", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_vibevoice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete VibeVoice checkpoint with random weights."""
    return _write("vibevoice", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_diffusion(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny diffusers checkpoint, by its name; each is written once."""
    return functools.cache(lambda name: _write(name, tmp_path_factory))


@pytest.fixture
def device() -> "Iterator[SimulatedDevice]":
    """A simulated device other than the CPU."""
    from tests.simulated_device import simulate_device  # imports torch

    with simulate_device() as device:
        yield device


@pytest.fixture(scope="session")
def omni_server(tiny_qwen3_omni_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server for an omni model; max_tokens limits the speech, which would take minutes with random weights."""
    flags = (
        *SMALL_VLLM, "--stage.talker.default_sampling_params.max_tokens=64", "--allowed-media-domains=127.0.0.1",
        "--enable-auto-tool-choice", "--tool-call-parser=hermes", "--max-realtime-message-bytes=1048576",
    )  # fmt: skip
    env = {"VLLM_MEDIA_FETCH_MAX_RETRIES": "1"}  # An address that does not answer is tried for five seconds.
    yield from _serve(tiny_qwen3_omni_moe, tmp_path_factory, *flags, env=env)


@pytest.fixture(scope="session")
def voice_server(tiny_csm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server for a model that speaks with the voice of a recording; about 40 frames by default."""
    yield from _serve(tiny_csm, tmp_path_factory, *SMALL_CSM)


@pytest.fixture(scope="session")
def image_server(
    tiny_diffusion: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server for an image model, also image to image; few steps by default."""
    yield from _serve(tiny_diffusion("z_image"), tmp_path_factory, f"{_DEFAULTS}.num_inference_steps=3")


@pytest.fixture(scope="session")
def video_server(
    tiny_diffusion: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server for a video model; small and short videos by default, and `ENDLESS_STEPS` allowed."""
    small = {"height": 32, "width": 32, "num_inference_steps": 2, "num_frames": 5}
    flags = [f"{_DEFAULTS}.{name}={value}" for name, value in small.items()]
    yield from _serve(tiny_diffusion("wan"), tmp_path_factory, *flags, ENDLESS_STEPS)


_DEFAULTS = "--stage.diffusion.default_sampling_params"


def _serve(
    model: Path, tmp_path_factory: pytest.TempPathFactory, *flags: str, env: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    server = RunningServer(model, *flags, log=tmp_path_factory.mktemp("server") / "log.txt", env=env)
    yield server
    server.stop()


def _write(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once for all processes of a run. No test may change it."""
    from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint  # imports torch

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if _is_xdist_worker else own) / "checkpoints"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            write_tiny_checkpoint(name, folder / f"{name}.new").rename(folder / name)
    return folder / name
