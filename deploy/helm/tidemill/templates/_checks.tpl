{{- /* Refuse values that exclude each other, for which a schema would give unclear errors. */ -}}
{{- define "tidemill.checks" -}}
{{- if and (not .Values.clusterTls.existingSecret) (not .Values.clusterTls.plain) -}}
{{- fail "clusterTls.existingSecret is empty: name a Secret with tls.crt, tls.key and ca.crt for the DNS name tidemill (docs/kubernetes.md makes one), or set clusterTls.plain to true if no other host can reach the pods" -}}
{{- end -}}
{{- if and .Values.clusterTls.existingSecret .Values.clusterTls.plain -}}
{{- fail "clusterTls.existingSecret and clusterTls.plain exclude each other: leave one" -}}
{{- end -}}
{{- if and .Values.joining.existingSecret .Values.clusterTls.plain -}}
{{- fail "joining.existingSecret signs for pods with certificates: name them in clusterTls.existingSecret" -}}
{{- end -}}
{{- if and .Values.joining.existingSecret .Values.networkPolicy.enabled (not .Values.joining.peers) -}}
{{- fail "joining.peers is empty: name the peers of a NetworkPolicy that may connect to routers and workers, like {ipBlock: {cidr: 10.1.0.0/16}}" -}}
{{- end -}}
{{- if and .Values.apiKeys.existingSecret .Values.apiKeys.keys -}}
{{- fail "apiKeys.existingSecret and apiKeys.keys exclude each other: leave one" -}}
{{- end -}}
{{- if and .Values.edgeTls.clientCa (not .Values.edgeTls.existingSecret) -}}
{{- fail "edgeTls.clientCa needs edgeTls.existingSecret, whose ca.crt signs the certificates of clients" -}}
{{- end -}}
{{- if and .Values.ingress.tlsSecret (not .Values.ingress.host) -}}
{{- fail "ingress.tlsSecret needs ingress.host, the name in that certificate" -}}
{{- end -}}
{{- with .Values.edges.autoscaling -}}
{{- if and .enabled (gt (int64 .minReplicas) (int64 .maxReplicas)) -}}
{{- fail "edges.autoscaling.minReplicas is more than maxReplicas: set it to maxReplicas or less" -}}
{{- end -}}
{{- end -}}
{{- include "tidemill.checkGroups" . -}}
{{- include "tidemill.checkStore" . -}}
{{- if and .Values.ray.tls.enabled .Values.ray.autoscaling.enabled -}}
{{- fail "ray.tls.enabled and ray.autoscaling.enabled exclude each other: for Ray's certificates the frontend is labelled as a pod of the RayCluster, and Ray's autoscaler would delete it" -}}
{{- end -}}
{{- end -}}

{{- define "tidemill.checkGroups" -}}
{{- $values := .Values -}}
{{- $names := list -}}
{{- range .Values.models -}}
{{- $urls := include "tidemill.engineUrls" . | fromJsonArray -}}
{{- range .groups -}}
{{- $workers := int64 (default 1 .replicas) -}}
{{- if and $urls (ne $workers (len $urls | int64)) -}}
{{- fail (printf "group %s has %d workers for the %d servers of adapter.engine: set replicas to that" .name $workers (len $urls)) -}}
{{- end -}}
{{- if has .name $names -}}
{{- fail (printf "two groups are called %s: the names of Ray's worker groups must be unique over all models" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if has .name (list "head" "headgroup" "frontend" "edge" "routers" "mooncake" "store-memory") -}}
{{- fail (printf "a group is called %s, like other pods of a release: give it another name" .name) -}}
{{- end -}}
{{- if and .replicas_max (not $values.ray.autoscaling.enabled) -}}
{{- fail (printf "group %s has replicas_max: set ray.autoscaling.enabled, or its additional workers have no pods" .name) -}}
{{- end -}}
{{- if and (hasPrefix "cuda" (default "cpu" .device)) (not (contains "nvidia.com/" (toJson .pod.resources))) -}}
{{- fail (printf "group %s computes on %s: set nvidia.com/gpu in pod.resources.limits" .name .device) -}}
{{- end -}}
{{- $ranks := int64 (default 1 .tensor_parallel_size) -}}
{{- $nodes := int64 (default 1 .tensor_parallel_nodes) -}}
{{- if mod $ranks $nodes -}}
{{- fail (printf "group %s has %d ranks on %d nodes, not as many on each: set tensor_parallel_nodes to a divisor of tensor_parallel_size" .name $ranks $nodes) -}}
{{- end -}}
{{- $ranks = div $ranks $nodes -}}
{{- $gpus := dig "resources" "limits" "nvidia.com/gpu" "" .pod | toString -}}
{{- if and (eq (default "cpu" .device) "cuda") $gpus (gt (mulf $ranks (default 1 .num_gpus)) (float64 $gpus)) -}}
{{- fail (printf "group %s has %d ranks on %s GPUs: set nvidia.com/gpu in pod.resources.limits to the GPUs of all ranks of a pod" .name $ranks $gpus) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tidemill.checkStore" -}}
{{- $store := .Values.store -}}
{{- if and $store.url (or .Values.mooncake.enabled $store.folder.size) -}}
{{- fail "store.url excludes the chart's own stores: set mooncake.enabled to false and leave store.folder.size empty" -}}
{{- end -}}
{{- if not (or $store.url .Values.mooncake.enabled $store.folder.size (not (include "tidemill.ownEngine" .))) -}}
{{- fail "workers have no store: set mooncake.enabled, store.folder.size or store.url" -}}
{{- end -}}
{{- if and $store.folder.size (not $store.folder.volume) -}}
{{- fail "store.folder.size needs store.folder.volume, for instance emptyDir: {}" -}}
{{- end -}}
{{- if and $store.folder.volume (not $store.folder.size) (not $store.url) -}}
{{- fail "store.folder.volume needs store.folder.size, or a store.url below /var/lib/tidemill/pages" -}}
{{- end -}}
{{- if and $store.folder.size (not .Values.mooncake.enabled) (hasKey $store.folder.volume "emptyDir") -}}
{{- $workers := 0 -}}
{{- range .Values.models -}}{{- range .groups -}}
{{- $workers = add $workers (mul (default 1 .tensor_parallel_nodes) (max (int64 (default 1 .replicas)) (int64 (default 1 .replicas_max)))) -}}
{{- end -}}{{- end -}}
{{- if gt $workers 1 -}}
{{- fail "store.folder is an emptyDir, which pods do not share: use a volume that all worker pods share, or set mooncake.enabled" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.mooncake.enabled .Values.mooncake.ha.enabled (not .Values.mooncake.ha.etcdEndpoints) -}}
{{- fail "mooncake.ha.etcdEndpoints is empty: name the etcd that the masters elect their leader in, like etcd:2379" -}}
{{- end -}}
{{- end -}}
