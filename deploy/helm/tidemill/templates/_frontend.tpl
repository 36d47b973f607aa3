{{- /* The frontend's container. It runs both a Ray node and the server: they share a folder, memory and process ids,
and neither works without the other, so they start and stop together. */ -}}

{{- define "tidemill.serve" -}}
{{- $ports := fromYaml (include "tidemill.ports" .) -}}
(ulimit -n 65536) 2>/dev/null && ulimit -n 65536
ray start --address="$RAY_HEAD" --node-ip-address="$POD_IP" --num-cpus=0 --num-gpus=0 --disable-usage-stats \
{{- $options := fromYaml (include "tidemill.rayStart" .) }}
{{- range $index, $option := keys $options | sortAlpha }}
  --{{ $option }}={{ index $options $option }}{{ if lt (add1 $index) (len $options) }} \{{ end }}
{{- end }}
exec tidemill serve --config /etc/tidemill/cluster.yaml
{{- end -}}

{{- define "tidemill.frontendEnv" -}}
{{- $ports := fromYaml (include "tidemill.ports" .) -}}
{{ include "tidemill.env" . }}
- name: RAY_HEAD
  value: {{ include "tidemill.head" . }}:{{ $ports.gcs | int64 }}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "tidemill.authSecret" . }}
      key: auth_token
{{- if .Values.ray.gcsFaultTolerance }}
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "600"
{{- end }}
{{- if .Values.ray.tls.enabled }}
- name: RAY_USE_TLS
  value: "1"
- name: RAY_TLS_SERVER_CERT
  value: /etc/ray/tls/tls.crt
- name: RAY_TLS_SERVER_KEY
  value: /etc/ray/tls/tls.key
- name: RAY_TLS_CA_CERT
  value: /etc/ray/tls/ca.crt
{{- end }}
{{- end -}}

{{- define "tidemill.rayTlsMount" -}}
{{- if .Values.ray.tls.enabled }}
- name: ray-tls
  mountPath: /etc/ray/tls
  readOnly: true
{{- end }}
{{- end -}}

{{- /* Wait for Ray's head and the store's master, if there is one, without which the server would exit. */ -}}
{{- define "tidemill.waitForOthers" -}}
{{- $ports := fromYaml (include "tidemill.ports" .) -}}
- name: wait
  image: {{ include "tidemill.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: ["/bin/sh", "-ec"]
  args:
    - |
      until ray health-check --address "$RAY_HEAD"; do echo "waiting for Ray at $RAY_HEAD"; sleep 2; done
      {{- if .Values.mooncake.enabled }}
      until tidemill store stat --store {{ include "tidemill.masterUrl" . | quote }}; do echo "waiting for the store"; sleep 2; done
      {{- end }}
  env:
    {{- include "tidemill.frontendEnv" . | nindent 4 }}
  resources:
    requests: {cpu: 200m, memory: 1Gi}
    limits: {memory: 1Gi}
  securityContext:
    {{- include "tidemill.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "tidemill.mounts" . | nindent 4 }}
    {{- with include "tidemill.rayTlsMount" . | trim }}{{ . | nindent 4 }}{{- end }}
{{- end -}}

{{- /* Ray's nodes connect by address, so the certificate must have this pod's address first. */ -}}
{{- define "tidemill.waitForCertificate" -}}
- name: wait-for-certificate
  image: {{ include "tidemill.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: ["/bin/sh", "-ec"]
  args:
    - |
      until openssl x509 -in /etc/ray/tls/tls.crt -noout -ext subjectAltName | tr ', ' '\n' | grep -qxF "Address:$POD_IP"; do
        echo "waiting for $POD_IP in Ray's certificate"; sleep 2
      done
  env:
    {{- include "tidemill.env" . | nindent 4 }}
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {memory: 64Mi}
  securityContext:
    {{- include "tidemill.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- with include "tidemill.rayTlsMount" . | trim }}{{ . | nindent 4 }}{{- end }}
{{- end -}}

{{- /* The kubelet has no client certificate, so with edgeTls.clientCa the probe only checks the port. */ -}}
{{- define "tidemill.probe" -}}
{{- if .root.Values.edgeTls.clientCa }}
tcpSocket:
  port: http
{{- else }}
httpGet:
  path: {{ .path }}
  port: http
  {{- if .root.Values.edgeTls.existingSecret }}
  scheme: HTTPS
  {{- end }}
{{- end }}
{{- end -}}

{{- define "tidemill.probes" -}}
startupProbe:
  {{- include "tidemill.probe" (dict "root" . "path" "/health/live") | trim | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .Values.frontend.startupSeconds 4) 5 }}
readinessProbe:
  {{- include "tidemill.probe" (dict "root" . "path" "/health/ready") | trim | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  {{- include "tidemill.probe" (dict "root" . "path" "/health/live") | trim | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end -}}
