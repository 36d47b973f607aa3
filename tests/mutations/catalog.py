"""Every planted bug."""

from tests.mutations.planted_cluster import CLUSTER
from tests.mutations.planted_engine import ENGINE_BUGS
from tests.mutations.planted_group import GROUP_BUGS
from tests.mutations.planted_kvstore import KVSTORE
from tests.mutations.planted_transfer import TRANSFER_BUGS
from tests.mutations.planted_workers import WORKERS

PLANTED = (*KVSTORE, *TRANSFER_BUGS, *WORKERS, *ENGINE_BUGS, *GROUP_BUGS, *CLUSTER)
