{{- /* Names, labels, ports and images that several templates use. */ -}}

{{- define "tidemill.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tidemill.selector" -}}
app.kubernetes.io/name: tidemill
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- /* Without app.kubernetes.io/name, which KubeRay sets on its pods and selects by. */ -}}
{{- define "tidemill.rayLabels" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "tidemill.labels" -}}
{{ include "tidemill.selector" . }}
app.kubernetes.io/version: {{ .root.Values.image.tag | default .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "tidemill.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* The servers that others run, of `vllm=URL,URL`, as a JSON list. */ -}}
{{- define "tidemill.engineUrls" -}}
{{- regexReplaceAll "^[a-z]+=?" (dig "adapter" "engine" "" .) "" | splitList "," | compact | toJson -}}
{{- end -}}

{{- /* Not empty if workers of a model have our own engine, which needs a store. */ -}}
{{- define "tidemill.ownEngine" -}}
{{- range .Values.models -}}{{- if not (hasPrefix "vllm" (dig "adapter" "engine" "" .)) -}}true{{- end -}}{{- end -}}
{{- end -}}

{{- /* The name that KubeRay gives the head's Service. */ -}}
{{- define "tidemill.head" -}}
{{ include "tidemill.fullname" . }}-head-svc
{{- end -}}

{{- define "tidemill.authSecret" -}}
{{ .Values.ray.authSecretName | default (include "tidemill.fullname" .) }}
{{- end -}}

{{- /* The address at which edges find routers. The first one knows the others. */ -}}
{{- define "tidemill.routers" -}}
{{- $ports := fromYaml (include "tidemill.ports" .) -}}
{{ include "tidemill.fullname" . }}-routers:{{ index $ports.routers 0 | int64 }}
{{- end -}}

{{- /* The port at which edges join by tokens: the one after those of all routers. */ -}}
{{- define "tidemill.joinPort" -}}
{{- $ports := fromYaml (include "tidemill.ports" .) -}}
{{- $port := index $ports.routers 0 | int64 -}}
{{- range .Values.models -}}
{{- $port = add $port (default 1 .routers | int64) -}}
{{- end -}}
{{- $port -}}
{{- end -}}

{{- /* The component that answers clients. */ -}}
{{- define "tidemill.answers" -}}
{{- ternary "edge" "frontend" .Values.edges.enabled -}}
{{- end -}}

{{- define "tidemill.master" -}}
{{ include "tidemill.fullname" . }}-mooncake
{{- end -}}

{{- /* The listening ports of our pods. They are fixed, for a policy must name them and Ray would take any free port.
`ours` is the range of the kernel's ephemeral ports in these pods, also for the gRPC of workers. */ -}}
{{- define "tidemill.ports" -}}
http: 8000
grpc: 8001
gcs: 6379
nodeManager: 6380
objectManager: 6381
runtimeEnvAgent: 6382
dashboardAgentGrpc: 6383
dashboardAgent: 52365
rayMetrics: 8080
workers: [10002, 10999]
ours: [40000, 49999]
routers: [20000, 20255]
master: 50051
masterAdmin: 9003
lent: [15000, 17000]
{{- end -}}

{{- /* The ports of a policy, from names of tidemill.ports. */ -}}
{{- define "tidemill.policyPorts" -}}
{{- $ports := fromYaml (include "tidemill.ports" .) -}}
{{- range .names }}
{{- $port := index $ports . }}
{{- if kindIs "slice" $port }}
- {protocol: TCP, port: {{ index $port 0 | int64 }}, endPort: {{ index $port 1 | int64 }}}
{{- else }}
- {protocol: TCP, port: {{ $port | int64 }}}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The options of `ray start` that every node has, as a mapping. */ -}}
{{- define "tidemill.rayStart" -}}
{{- $ports := fromYaml (include "tidemill.ports" .) -}}
node-manager-port: {{ $ports.nodeManager | int64 | quote }}
object-manager-port: {{ $ports.objectManager | int64 | quote }}
runtime-env-agent-port: {{ $ports.runtimeEnvAgent | int64 | quote }}
dashboard-agent-grpc-port: {{ $ports.dashboardAgentGrpc | int64 | quote }}
dashboard-agent-listen-port: {{ $ports.dashboardAgent | int64 | quote }}
metrics-export-port: {{ $ports.rayMetrics | int64 | quote }}
min-worker-port: {{ index $ports.workers 0 | int64 | quote }}
max-worker-port: {{ index $ports.workers 1 | int64 | quote }}
object-store-memory: "83886080"
{{- end -}}

{{- /* On newer kernels the filter that restricts Mooncake's ports to their peers needs CAP_NET_ADMIN: the policy replaces it. */ -}}
{{- define "tidemill.masterUrl" -}}
{{- $ports := fromYaml (include "tidemill.ports" .) -}}
{{- $master := include "tidemill.master" . -}}
{{- $open := ternary "&ports=open" "" .Values.networkPolicy.enabled -}}
{{- printf "mooncake://%s:%d?admin=%s:%d%s" $master (int64 $ports.master) $master (int64 $ports.masterAdmin) $open -}}
{{- end -}}

{{- /* The peers that the store's policies admit. */ -}}
{{- define "tidemill.storeUsers" -}}
- podSelector:
    matchLabels:
      ray.io/cluster: {{ include "tidemill.fullname" . }}
      ray.io/node-type: worker
- podSelector:
    matchLabels:
      {{- include "tidemill.selector" (dict "root" . "component" "frontend") | nindent 6 }}
{{- end -}}
