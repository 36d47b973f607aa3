"""Every planted bug."""

from tests.mutations.planted_cluster import CLUSTER
from tests.mutations.planted_kvstore import KVSTORE
from tests.mutations.planted_workers import WORKERS

PLANTED = (*KVSTORE, *WORKERS, *CLUSTER)
