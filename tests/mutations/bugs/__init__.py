"""The planted bugs, one file per part of the product."""

from tests.mutations.bugs import (
    edge,
    engine,
    execution,
    kernels,
    memory,
    models,
    operations,
    parallel,
    processes,
    router,
    scheduling,
    stores,
    transfer,
)

PLANTED = (
    *kernels.BUGS,
    *memory.BUGS,
    *stores.BUGS,
    *transfer.BUGS,
    *models.BUGS,
    *execution.BUGS,
    *scheduling.BUGS,
    *engine.BUGS,
    *parallel.BUGS,
    *edge.BUGS,
    *router.BUGS,
    *processes.BUGS,
    *operations.BUGS,
)
