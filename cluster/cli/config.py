"""`tidemill config`: what a configuration file says, what is wrong with it, and the schema of such files."""

# ruff: noqa: PLC0415 - a look at a file must not wait for torch

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tidemill.cluster.cli.security import cluster_tls, security_of
from tidemill.cluster.config.flags import with_places
from tidemill.cluster.config.fleets import Surroundings, engine_settings, summary
from tidemill.cluster.config.problems import ConfigError
from tidemill.cluster.config.reading import dumped, read_config
from tidemill.cluster.config.tree import RootConfig
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.sizes import parse_bytes
from tidemill.kvstore.stores.secret import read_secret
from tidemill.workers.settings import EngineSettings, SettingsError

EXIT_REFUSED = 2


def add_config_commands(config: argparse.ArgumentParser) -> None:
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="say all that is wrong with a file, and what it would start")
    check.add_argument("file", type=Path, metavar="FILE", help="as of `tidemill serve --config`")
    check.add_argument(
        "--offline",
        action="store_true",
        help="the file alone, for another machine: not the models, keys and certificates that it names",
    )
    check.set_defaults(run=_check)
    show = actions.add_parser("show", help="print the whole tree with its defaults")
    show.add_argument("file", type=Path, metavar="FILE", help="as of `tidemill serve --config`")
    show.set_defaults(run=_show)
    actions.add_parser("schema", help="print the JSON schema of such files").set_defaults(run=_schema)


def _check(options: argparse.Namespace) -> int:
    try:
        config = read_config(options.file)
    except ConfigError as error:
        return _told(options.file, error.problems)
    problems = list(problems_here(config, offline=options.offline))
    if problems:
        return _told(options.file, problems)
    sys.stdout.write(f"{options.file} is right: {_started(config)}\n")
    return 0


def _told(path: Path, problems: Sequence[str]) -> int:
    for problem in problems:
        sys.stderr.write(f"{path}: {problem}\n")
    return EXIT_REFUSED


def _show(options: argparse.Namespace) -> int:
    sys.stdout.write(dumped(read_config(options.file)))
    return 0


def _schema(options: argparse.Namespace) -> int:
    from tidemill.cluster.config.reference import schema

    del options
    sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
    return 0


def problems_here(config: RootConfig, *, offline: bool) -> Iterator[str]:
    """What is wrong with it that only looking tells: models, memory, files, the store; each said once."""
    said: set[str] = set()
    for place, check in _checks(config, offline=offline):
        try:
            check()
        except ConfigError as error:  # which names its place
            new = [one for one in error.problems if one not in said]
        except TidemillError as error:
            new = [] if str(error) in said else [f"{place}: {error}"]
            said.add(str(error))
        else:
            continue
        said.update(new)
        yield from new


def _checks(config: RootConfig, *, offline: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    around = Surroundings(store_url="", cache_folder=Path())
    for index, model in enumerate(config.models):
        for number, group in enumerate(model.groups):
            engine = partial(engine_settings, config, model, group, around)
            check = engine if offline else partial(_check_engine, engine)
            yield f"models[{index}].groups[{number}]", partial(_by_key, check, index, number)
    if config.store.url is not None:
        yield "store.url", partial(_check_store, config.store.url, offline=offline)
    if offline:
        return
    if config.store.secret_file is not None:
        yield "store.secret_file", partial(read_secret, Path(config.store.secret_file))
    yield "edge", partial(security_of, config.edge, None, {})
    yield "cluster", partial(cluster_tls, config.cluster)


def _by_key(check: Callable[[], object], model: int, group: int) -> None:
    """Raises ConfigError for a setting of the file that the engine refuses."""
    try:
        check()
    except SettingsError as error:
        told = with_places(str(error), model, group)
        if told == str(error):
            raise
        raise ConfigError([told]) from error


def _check_engine(engine: Callable[[], EngineSettings]) -> None:
    from tidemill.workers.engine.build import check_settings

    check_settings(engine())


def _check_store(url: str, *, offline: bool) -> None:
    from tidemill.cluster.supervisor.store_plan import check_shared, other_tiers, plan_store
    from tidemill.kvstore.stores.open_store import check_url

    check_shared(url)
    # what Mooncake would need is asked of the machine
    url = other_tiers(url) if offline else plan_store(url).url
    if url:
        check_url(url)


def _started(config: RootConfig) -> str:
    """What `tidemill serve` would start."""
    edge, cluster = config.edge, config.cluster
    groups = [group for model in config.models for group in model.groups]
    memory_bytes = sum(group.replicas * parse_bytes(group.memory) for group in groups)
    processes = sum(group.replicas * group.tensor_parallel_size for group in groups)
    url = f"{'http' if edge.ssl_certfile is None else 'https'}://{edge.host}:{edge.port}"
    routers = sum(model.routers for model in config.models)
    ray = (
        "a Ray cluster of its own"
        if cluster.ray_address is None
        else f"the Ray cluster {cluster.ray_address}"
    )
    return (
        f"{summary(config)}, at {url}\n"
        f"{processes} worker processes with {memory_bytes / 2**30:.3g} GiB for pages and states, {routers} "
        f"router(s), on {ray}, pages in {config.store.url or 'a folder of its own'}"
    )
