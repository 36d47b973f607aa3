{{- /* The parts of a RayCluster. */ -}}

{{- define "tidemill.rayOptions" -}}
rayVersion: {{ .Values.ray.version | quote }}
upgradeStrategy:
  type: {{ .Values.ray.upgradeStrategy }}
authOptions:
  mode: token
  {{- with .Values.ray.authSecretName }}
  secretName: {{ . }}
  {{- end }}
{{- if .Values.ray.tls.enabled }}
tlsOptions:
  enabled: true
{{- end }}
{{- with .Values.ray.gcsFaultTolerance }}
gcsFaultToleranceOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.networkPolicy.enabled }}
networkPolicy:
  mode: DenyAllIngress
  head:
    ingressRules:
      {{- include "tidemill.fromFrontend" (dict "root" . "names" (list "gcs" "nodeManager" "objectManager" "workers")) | nindent 6 }}
  worker:
    ingressRules:
      {{- include "tidemill.fromFrontend" (dict "root" . "names" (list "nodeManager" "objectManager" "workers" "ours")) | nindent 6 }}
      {{- if .Values.edges.enabled }}
      {{- include "tidemill.fromComponent" (dict "root" . "component" "edge" "names" (list "ours")) | nindent 6 }}
      {{- end }}
      {{- if .Values.joining.existingSecret }}
      - from:
          {{- toYaml .Values.joining.peers | nindent 10 }}
        ports:
          {{- include "tidemill.policyPorts" (dict "names" (list "ours")) | trim | nindent 10 }}
      {{- end }}
{{- end }}
{{- if .Values.ray.autoscaling.enabled }}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  upscalingMode: Default
  idleTimeoutSeconds: {{ .Values.ray.autoscaling.idleTimeoutSeconds | int64 }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  env:
    - name: HOME
      value: /tmp
  securityContext:
    {{- include "tidemill.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
{{- end }}
{{- end -}}

{{- define "tidemill.fromFrontend" -}}
{{- include "tidemill.fromComponent" (merge (dict "component" "frontend") .) -}}
{{- end -}}

{{- define "tidemill.fromComponent" -}}
- from:
    - podSelector:
        matchLabels:
          {{- include "tidemill.selector" . | nindent 10 }}
  ports:
    {{- include "tidemill.policyPorts" . | trim | nindent 4 }}
{{- end -}}

{{- /* One worker per pod, or per so many pods as it has nodes: a pod offers as many units of its custom
resource as it has ranks. */ -}}
{{- define "tidemill.workerGroup" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $model := .model -}}
{{- $replicas := default 1 $group.replicas | int64 -}}
{{- $nodes := default 1 $group.tensor_parallel_nodes | int64 -}}
{{- $scaling := default dict $model.autoscaling -}}
- groupName: {{ $group.name }}
  replicas: {{ $replicas }}
  minReplicas: {{ ternary 0 $replicas (hasKey $scaling "downscale_to_zero_delay_s") }}
  maxReplicas: {{ default $replicas $group.replicas_max | int64 }}
  {{- if gt $nodes 1 }}
  numOfHosts: {{ $nodes }}
  {{- end }}
  labels:
    tidemill-group: {{ $group.name }}
  resources:
    tidemill-{{ $group.name }}-ranks: {{ div (default 1 $group.tensor_parallel_size | int64) $nodes | quote }}
  rayStartParams:
    {{- include "tidemill.rayStart" $root | nindent 4 }}
  template:
    metadata:
      labels:
        {{- include "tidemill.rayLabels" (dict "root" $root "component" "worker") | nindent 8 }}
        {{- with $group.pod.labels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $group.pod.annotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "tidemill.podBasics" $root | nindent 6 }}
      {{- with include "tidemill.place" $group.pod | trim }}{{ . | nindent 6 }}{{- end }}
      {{- with $group.pod.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      terminationGracePeriodSeconds: 10
      containers:
        - name: ray-worker
          image: {{ $group.pod.image | default (include "tidemill.image" $root) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          env:
            {{- include "tidemill.env" $root | nindent 12 }}
            {{- if $root.Values.kernelCache }}
            - name: TRITON_CACHE_DIR
              value: /var/cache/tidemill
            {{- if hasPrefix "vllm" (dig "adapter" "engine" "" $model) }}
            - name: VLLM_CACHE_ROOT
              value: /var/cache/tidemill/vllm
            {{- end }}
            {{- end }}
            {{- with include "tidemill.downloadEnv" (dict "root" $root "own" $group.pod.env) }}{{ . | nindent 12 }}{{- end }}
          resources:
            {{- toYaml $group.pod.resources | nindent 12 }}
          securityContext:
            {{- include "tidemill.containerSecurity" $root | nindent 12 }}
          volumeMounts:
            {{- include "tidemill.mounts" $root | nindent 12 }}
            {{- if $root.Values.kernelCache }}
            - name: kernels
              mountPath: /var/cache/tidemill
            {{- end }}
            {{- with include "tidemill.sharedMounts" $root | trim }}{{ . | nindent 12 }}{{- end }}
      volumes:
        {{- include "tidemill.volumes" $root | nindent 8 }}
        {{- with $root.Values.kernelCache }}
        - name: kernels
          {{- toYaml . | nindent 10 }}
        {{- end }}
        {{- with include "tidemill.sharedVolumes" $root | trim }}{{ . | nindent 8 }}{{- end }}
{{- end -}}
