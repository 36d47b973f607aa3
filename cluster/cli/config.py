"""`tidemill config`: check or show a configuration file, or print the schema of such files."""

# ruff: noqa: PLC0415 - checking a file must not wait for the import of torch

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from tidemill.cluster.cli.security import cluster_tls, security_of
from tidemill.cluster.cli.serve import count_gpus
from tidemill.cluster.config.flags import with_config_paths
from tidemill.cluster.config.fleets import (
    Surroundings,
    engine_settings,
    folders_of,
    hosted_settings,
    memory_bytes_of,
    programs_of,
    summary,
    with_visible_gpus,
    with_workers_of_urls,
)
from tidemill.cluster.config.problems import ConfigError
from tidemill.cluster.config.reading import dump, read_config
from tidemill.cluster.config.tree import ModelConfig, RootConfig
from tidemill.cluster.settings import authority
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.stores.secret import read_secret
from tidemill.workers.settings import HostedSettings, SettingsError
from tidemill.workers.sources.download import download
from tidemill.workers.sources.names import SourceError

if TYPE_CHECKING:  # with torch
    from tidemill.workers.contract.engine import Check

EXIT_REFUSED = 2


def add_config_commands(config: argparse.ArgumentParser) -> None:
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="list all errors of a file, or summarize what it would start")
    check.add_argument("file", type=Path, metavar="FILE", help="a file for `tidemill serve --config`")
    check.add_argument(
        "--offline",
        action="store_true",
        help="check only the file, for another machine: skip the models, keys and certificates that it names",
    )
    check.set_defaults(run=_check)
    show = actions.add_parser("show", help="print the whole configuration with its defaults")
    show.add_argument("file", type=Path, metavar="FILE", help="a file for `tidemill serve --config`")
    show.set_defaults(run=_show)
    schema = actions.add_parser("schema", help="print the JSON schema of configuration files")
    schema.set_defaults(run=_schema)


def _check(options: argparse.Namespace) -> int:
    try:
        config = read_config(options.file)
        config = with_workers_of_urls(config)
        config = config if options.offline else with_visible_gpus(config, count_gpus)
    except ConfigError as error:
        return _print_problems(options.file, error.problems)
    problems = list(local_problems(config, offline=options.offline))
    if problems:
        return _print_problems(options.file, problems)
    weights = "" if options.offline else _weights(config)
    sys.stdout.write(f"{options.file} is right: {_description(config)}{weights}\n")
    return 0


def _print_problems(path: Path, problems: Sequence[str]) -> int:
    for problem in problems:
        sys.stderr.write(f"{path}: {problem}\n")
    return EXIT_REFUSED


def _show(options: argparse.Namespace) -> int:
    sys.stdout.write(dump(read_config(options.file)))
    return 0


def _schema(options: argparse.Namespace) -> int:
    from tidemill.cluster.config.reference import schema

    del options
    sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
    return 0


def local_problems(config: RootConfig, *, offline: bool) -> Iterator[str]:
    """Yield the problems with models, memory, files and the store on this machine, each one once."""
    reported: set[str] = set()
    for location, check in _checks(config, offline=offline):
        try:
            check()
        except ConfigError as error:  # which names its location
            new = [problem for problem in error.problems if problem not in reported]
        except TidemillError as error:
            new = [] if str(error) in reported else [f"{location}: {error}"]
            reported.add(str(error))
        else:
            continue
        reported.update(new)
        yield from new


def _checks(config: RootConfig, *, offline: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each check with the location in the file that it is about."""
    for index, model in enumerate(config.models):
        try:
            surroundings = surroundings_of(model)
        except SourceError as error:
            yield f"models[{index}].model", partial(_raise, error)
            continue
        for number, group in enumerate(model.groups):
            engine = partial(hosted_settings, config, model, group, surroundings)
            check = engine if offline else partial(_check_engine, config, model, engine)
            yield f"models[{index}].groups[{number}]", partial(_with_config_paths, check, index, number)
    if config.store.url is not None:
        yield "store.url", partial(_check_store, config.store.url, offline=offline)
    if offline:
        return
    if config.store.secret_file is not None:
        yield "store.secret_file", partial(read_secret, Path(config.store.secret_file))
    yield "edge", partial(security_of, config.edge, None, {})
    yield "cluster", partial(cluster_tls, config.cluster)


def surroundings_of(model: ModelConfig) -> Surroundings:
    """Return the surroundings of a model that is on this machine already. Raises SourceError."""
    folders = folders_of([model], partial(download, offline=True))
    return Surroundings(store_url="", cache_folder=Path(), folders=folders)


def _raise(error: SourceError) -> None:
    raise error


def _with_config_paths(check: Callable[[], object], model: int, group: int) -> None:
    """Run a check. Raises ConfigError with paths of the file where SettingsError names flags."""
    try:
        check()
    except SettingsError as error:
        message = with_config_paths(str(error), model, group)
        if message == str(error):
            raise
        raise ConfigError([message]) from error


def _check_engine(config: RootConfig, model: ModelConfig, engine: Callable[[], HostedSettings]) -> None:
    check = cast("Check", resolve_name(programs_of(model)["check"]))  # imports torch
    made = engine()
    # A file with GPUs may be checked on a machine without any.
    check(made, here=config.cluster.ray_address is None and (not made.on_cuda or count_gpus() > 0))


def _check_store(url: str, *, offline: bool) -> None:
    from tidemill.cluster.processes.store_plan import check_shared, other_tiers, plan_store
    from tidemill.kvstore.stores.open_store import check_url

    check_shared(url)
    # `plan_store` looks for free ports and memory of this machine.
    url = other_tiers(url) if offline else plan_store(url).url
    if url:
        check_url(url)


def _description(config: RootConfig) -> str:
    """Describe what `tidemill serve` would start."""
    edge, cluster = config.edge, config.cluster
    groups = [group for model in config.models for group in model.groups]
    sizes = [(group.replicas, memory_bytes_of(group)) for group in groups]
    memory = [f"{sum(fixed) / 2**30:.3g} GiB"] if (fixed := [n * size for n, size in sizes if size]) else []
    memory += ["what their GPUs have left"] if len(fixed) < len(sizes) else []
    processes = sum(group.replicas * group.tensor_parallel_size for group in groups)
    url = f"{'http' if edge.ssl_certfile is None else 'https'}://{authority(edge.host, edge.port)}"
    routers = sum(model.routers for model in config.models)
    ray = (
        "a Ray cluster of its own"
        if cluster.ray_address is None
        else f"the Ray cluster {cluster.ray_address}"
    )
    return (
        f"{summary(config)}, at {url}\n"
        f"{processes} worker processes with {' and '.join(memory)} for pages and states, "
        f"{routers} router(s), on {ray}, pages in {config.store.url or 'a folder of its own'}"
    )


def _weights(config: RootConfig) -> str:
    """Describe the size of the weights that each worker of our own engine loads."""
    from tidemill.cluster.cli.status import human_bytes
    from tidemill.workers.engine.build import weight_bytes

    models = [model for model in config.models if model.adapter.is_own]
    made = [engine_settings(config, model, model.groups[0], surroundings_of(model)) for model in models]
    sizes = [
        f"{model.names[0]} {human_bytes(weight_bytes(settings))}"
        for model, settings in zip(models, made, strict=True)
    ]
    return f"\nweights of each worker: {', '.join(sizes)}" if sizes else ""
