"""Every planted bug."""

from tests.mutations.cluster.planted_chart import CHART_BUGS
from tests.mutations.cluster.planted_cluster import CLUSTER, RESILIENCE
from tests.mutations.cluster.planted_config import CONFIG_BUGS
from tests.mutations.cluster.planted_edge import EDGE_BUGS
from tests.mutations.cluster.planted_fleet_wide import FLEET_WIDE
from tests.mutations.cluster.planted_operations import OPERATIONS_BUGS
from tests.mutations.cluster.planted_placement import PLACING
from tests.mutations.kvstore.planted_kvstore import KVSTORE
from tests.mutations.kvstore.planted_store import PUBLISHING_BUGS, STORE_BUGS
from tests.mutations.kvstore.planted_transfer import TRANSFER_BUGS
from tests.mutations.kvstore.planted_windows import WINDOW_BUGS
from tests.mutations.planted_kernels import KERNEL_BUGS
from tests.mutations.workers.planted_engine import ENGINE_BUGS
from tests.mutations.workers.planted_group import GROUP_BUGS
from tests.mutations.workers.planted_models import MODEL_BUGS
from tests.mutations.workers.planted_mtp import MTP_BUGS
from tests.mutations.workers.planted_scores import SCORING
from tests.mutations.workers.planted_weights import WEIGHT_BUGS
from tests.mutations.workers.planted_workers import WORKERS

PLANTED = (
    *KERNEL_BUGS,
    *KVSTORE,
    *STORE_BUGS,
    *TRANSFER_BUGS,
    *WINDOW_BUGS,
    *PUBLISHING_BUGS,
    *WORKERS,
    *MODEL_BUGS,
    *WEIGHT_BUGS,
    *ENGINE_BUGS,
    *GROUP_BUGS,
    *MTP_BUGS,
    *SCORING,
    *CLUSTER,
    *PLACING,
    *RESILIENCE,
    *FLEET_WIDE,
    *OPERATIONS_BUGS,
    *EDGE_BUGS,
    *CONFIG_BUGS,
    *CHART_BUGS,
)
