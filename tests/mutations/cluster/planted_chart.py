"""Bugs to plant in the Helm chart. Golden files would notice any change: asked here are the tests that know
what a template is for."""

from tests.mutations.planted import Planted

PODS = "tests/deploy/test_pods.py"
NETWORK = "tests/deploy/test_network.py"

TEMPLATES = "deploy/helm/tidemill/templates"
BASICS = f"{TEMPLATES}/_pods.tpl"
FRONTEND = f"{TEMPLATES}/frontend.yaml"
RAY = f"{TEMPLATES}/_ray.tpl"
POLICY = f"{TEMPLATES}/networkpolicy.yaml"
BUDGETS = f"{TEMPLATES}/poddisruptionbudget.yaml"

CHART_BUGS = (
    Planted(
        "containers write to their root",
        BASICS,
        "readOnlyRootFilesystem: true",
        "readOnlyRootFilesystem: false",
        PODS,
    ),
    Planted(
        "pods get a token of Kubernetes",
        BASICS,
        "automountServiceAccountToken: false\n",
        "",
        PODS,
    ),
    Planted(
        "containers keep what root may do",
        BASICS,
        "capabilities:\n  drop: [ALL]\n",
        "",
        PODS,
    ),
    Planted(
        "a file is mounted where nobody reads it",
        BASICS,
        "mountPath: /etc/tidemill/cluster-tls",
        "mountPath: /etc/tidemill/cluster",
        PODS,
    ),
    Planted(
        "the frontend is killed while it drains",
        FRONTEND,
        "terminationGracePeriodSeconds: {{ add .Values.frontend.drainSeconds 30 }}",
        "terminationGracePeriodSeconds: 30",
        PODS,
    ),
    Planted(
        "the frontend goes on with what it served before",
        FRONTEND,
        '        checksum/config: {{ include "tidemill.config" . | sha256sum }}\n',
        "",
        PODS,
    ),
    Planted(
        "the frontend serves a configuration that is not there",
        FRONTEND,
        "            name: {{ $name }}-config",
        "            name: {{ $name }}-configuration",
        PODS,
    ),
    Planted(
        "a pod offers a place for one rank of a group",
        RAY,
        "-ranks: {{ default 1 $group.tensor_parallel_size | int64 | quote }}",
        "-ranks: {{ 1 | int64 | quote }}",
        PODS,
    ),
    Planted(
        "workers do not let the frontend in",
        RAY,
        '(dict "root" . "names" (list "nodeManager" "objectManager" "workers" "ours"))',
        '(dict "root" . "names" (list "nodeManager" "objectManager" "workers"))',
        NETWORK,
    ),
    Planted(
        "anybody may ask the store",
        POLICY,
        '    - from:\n        {{- include "tidemill.storeUsers" . | nindent 8 }}\n      ports:\n',
        "    - ports:\n",
        NETWORK,
    ),
    Planted(
        "the policy of the frontend is for other pods",
        POLICY,
        '(dict "root" . "component" "frontend") | nindent 6 }}',
        '(dict "root" . "component" "front") | nindent 6 }}',
        NETWORK,
    ),
    Planted(
        "a store opens its ports to everybody where no policy guards them",
        f"{TEMPLATES}/store-memory.yaml",
        "{{- if .Values.networkPolicy.enabled }}",
        "{{- if true }}",
        NETWORK,
    ),
    Planted(
        "masters that follow are asked",
        f"{TEMPLATES}/mooncake.yaml",
        "            tcpSocket: {port: rpc}",
        "            tcpSocket: {port: admin}",
        f"{NETWORK} {PODS}",
    ),
    Planted(
        "all workers of a group may be evicted at once",
        BUDGETS,
        "minAvailable: {{ sub (int64 (default 1 .replicas)) 1 }}",
        "minAvailable: 0",
        PODS,
    ),
    Planted(
        "the service leads nowhere",
        f"{TEMPLATES}/service.yaml",
        "targetPort: http}",
        "targetPort: web}",
        NETWORK,
    ),
)
