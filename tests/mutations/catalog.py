"""Every planted bug."""

from tests.mutations.planted_cluster import CLUSTER, RESILIENCE
from tests.mutations.planted_config import CONFIG_BUGS
from tests.mutations.planted_edge import EDGE_BUGS
from tests.mutations.planted_engine import ENGINE_BUGS
from tests.mutations.planted_fleet_wide import FLEET_WIDE
from tests.mutations.planted_group import GROUP_BUGS
from tests.mutations.planted_kernels import KERNEL_BUGS
from tests.mutations.planted_kvstore import KVSTORE
from tests.mutations.planted_operations import OPERATIONS_BUGS
from tests.mutations.planted_placement import PLACING
from tests.mutations.planted_scores import SCORING
from tests.mutations.planted_store import PUBLISHING_BUGS, STORE_BUGS
from tests.mutations.planted_transfer import TRANSFER_BUGS
from tests.mutations.planted_workers import WORKERS

PLANTED = (
    *KERNEL_BUGS,
    *KVSTORE,
    *STORE_BUGS,
    *TRANSFER_BUGS,
    *PUBLISHING_BUGS,
    *WORKERS,
    *ENGINE_BUGS,
    *GROUP_BUGS,
    *SCORING,
    *CLUSTER,
    *PLACING,
    *RESILIENCE,
    *FLEET_WIDE,
    *OPERATIONS_BUGS,
    *EDGE_BUGS,
    *CONFIG_BUGS,
)
